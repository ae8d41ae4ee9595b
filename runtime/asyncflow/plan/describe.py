"""Text output: durations, sizes, and a plan as tables for ``asyncflow plan FILE``.

Invariant: every row of a table has one text for each column.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncflow.api.graph import Companion, Task
from asyncflow.api.job import RLJob
from asyncflow.api.names import TRAIN
from asyncflow.plan.job import begins, generated_by, swapped
from asyncflow.plan.roles import JobPlan, Resources, Role

ABSENT = "–"
"""The text for an unknown number."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A titled table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(job: RLJob, plan: JobPlan) -> tuple[TextTable, ...]:
    """Return the roles, the training tasks with their companions, and the figures of a job as tables."""
    return (
        TextTable(
            title="Roles",
            columns=("role", "processes", "each", "restarts", "starts after"),
            rows=tuple(_role(role) for role in plan.roles),
        ),
        TextTable(
            title="Tasks",
            columns=("task", "run by", "reads", "writes", "claims", "when"),
            rows=(*(_task(job, task) for task in plan.graph.of(TRAIN)), *map(_companion, plan.graph.companions)),
        ),
        TextTable(title="Figures", columns=("figure", "value"), rows=_figures(job)),
    )


def _role(role: Role) -> tuple[str, ...]:
    processes = str(role.replicas) if role.ranks == 1 else f"{role.replicas} x {role.ranks} ranks"
    if role.elastic:
        processes += f" ({role.core} to {role.most})"
    if role.spread:
        processes += ", one gang"
    restarts = f"{role.restart.max_restarts} in {role.restart.window_s:g} s"
    return role.name, processes, _each(role.resources), restarts, ", ".join(role.after) or "-"


def _task(job: RLJob, task: Task) -> tuple[str, ...]:
    reads, writes = ", ".join(task.reads), ", ".join(task.writes) or ABSENT
    return task.name, task.role, reads, writes, taken_by(task), begins(job.spec, task)


def _companion(one: Companion) -> tuple[str, ...]:
    where = f"inside {one.role}" if one.inside else one.role
    return one.name, where, ", ".join(one.reads), ", ".join(one.writes), f"queries of {one.task}", one.when


def taken_by(task: Task) -> str:
    """Return the unit in which a task claims rows, and the order, as text."""
    unit = "equal slots of all ranks" if task.gang else "groups" if task.groups else "rows"
    return unit + {"fifo": "", "key": ", by key"}.get(task.order, f", {task.order} first")


def _each(resources: Resources) -> str:
    parts = [f"{resources.cpu:g} CPU"]
    if resources.memory is not None:
        parts.append(size(resources.memory))
    if resources.accelerators:
        share = "" if resources.share == 1 else f"{resources.share:g} of "
        parts.append(f"{share}{resources.accelerators} {resources.resource}")
    return ", ".join(parts)


def _figures(job: RLJob) -> tuple[tuple[str, str], ...]:
    spec = job.spec
    algorithm = spec.algorithm
    held = spec.transfer_queue.bytes_per_unit.bytes * spec.transfer_queue.storage_units
    return (
        ("optimizer steps", f"{algorithm.steps}"),
        ("samples of a step", f"{algorithm.prompts_per_step} prompts x {algorithm.group_size}"),
        ("weights", f"{generated_by(spec.schedule)}; pulled {swapped(spec.schedule)}"),
        ("staleness", f"at most {spec.schedule.max_staleness}"),
        ("samples of a checkpoint interval", f"at most {size(spec.bytes_of_interval)} of {size(held)}"),
        ("checkpoints", f"every {spec.storage.checkpoints.every} steps, {spec.storage.checkpoints.keep} kept"),
    )


def size(count: float | None) -> str:
    """Return bytes in the largest unit in which they are at least 1 (``1536`` -> ``1.5 KiB``), a dash for None."""
    if count is None:
        return ABSENT
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {_UNITS[-1]}"


def duration(seconds: float | None) -> str:
    """Return seconds in their two largest units (``45s``, ``2m13s``, ``3h07m``, ``1h``), a dash for None."""
    if seconds is None:
        return ABSENT
    whole = round(seconds)
    for large, small, (name, next_name) in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large}{name}" + (f"{rest:02d}{next_name}" if rest else "")
    return f"{whole}s"
