"""The tasks of a job that the user's process does: tasks of ``spec.tasks`` without a function.

Invariant: a session claims no rows of other tasks of a job, declares no tasks in it, and writes exactly the columns
that the task writes, with their dtypes and at most the lengths in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.api.job import RLJobSpec
from asyncflow.errors import Refused
from asyncflow.roles.task import outputs_of
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.rows import RowFailure, columns_of, read_results


def check_stage(spec: RLJobSpec, stage: str, columns: Sequence[str], *, where: str) -> None:
    """Raise Refused for a task that the job does not leave to the user, and for columns that the task does not read."""
    task = spec.own_tasks.get(stage)
    if task is None:
        names = ", ".join(sorted(spec.own_tasks)) or "none"
        hint = f"Use 'train', or a task of spec.tasks without a function: there is {names}"
        raise Refused(f"the job does not leave the task {stage!r} to you", where=where, hint=hint)
    if wrong := sorted(set(columns) - set(task.reads)):
        hint = f"It reads {', '.join(task.reads)}; add other columns to its reads"
        raise Refused(f"the task {stage} does not read {wrong[0]!r}", where=where, hint=hint)


def written(spec: RLJobSpec, data: Mapping[str, Any], rows: int, *, where: str) -> dict[str, Jagged]:
    """Return the columns that a task writes for ``rows`` rows; ``data`` has, for each column, a value for each row.

    Raises Refused if no task of the user's process writes these columns, and for values that they cannot hold.
    """
    own = spec.own_tasks.values()
    task = next((task for task in own if {column.name for column in task.writes} == set(data)), None)
    if task is None:
        each = "; ".join(f"{task.name}: {', '.join(column.name for column in task.writes)}" for task in own)
        hint = f"Pass all columns that the task writes ({each or 'no task is left to you'})"
        raise Refused(f"no task that is left to you writes {sorted(data)}", where=where, hint=hint)
    for name, values in data.items():
        try:
            count, kind = len(values), f"{len(values)} values"
        except TypeError:
            count, kind = -1, f"a {type(values).__name__}"
        if count != rows:
            what = f"the column {name} has {kind} for {rows} rows"
            raise Refused(what, where=where, hint="Pass a value for each claimed row")
    outputs = outputs_of(task, default=spec.sampling.max_tokens)
    results = read_results(
        [{name: values[row] for name, values in data.items()} for row in range(rows)], outputs, rows=rows
    )
    if failed := [result for result in results if isinstance(result, RowFailure)]:
        raise Refused(failed[0].detail, where=where, hint="Pass numbers of the dtypes in spec.tasks")
    return columns_of(results, outputs)
