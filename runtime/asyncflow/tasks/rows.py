"""The rows that a task's function is given, and what becomes of each.

Invariant: what a function returned is the columns of a row only if there is exactly what the task writes, of the dtypes
and no longer than the manifest says; everything else is a failure of that row, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.data.base import Prompt
from asyncflow.queue.protocol.messages import LeasedRow, Tag
from asyncflow.rpc.columns import Jagged

FailureKind = Literal["raised", "invalid", "timeout", "died"]
"""The function raised, returned something else than it should, took too long, or its process or replica ended."""
_MOST_DETAIL: Final = 2000


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One sample, as a task's function is given it.

    serial, sample: its key; columns: one array for each column that the task reads; tags: what travels with the row,
    such as ``reward`` and ``version_min``; response: the text of ``response_ids``, question, answer, meta: of the
    prompt, where the task reads ``task``.
    """

    serial: int
    sample: int
    columns: Mapping[str, NDArray[Any]]
    tags: Mapping[str, Tag] = field(default_factory=dict)
    response: str = ""
    question: str = ""
    answer: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column]


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """A row for which there is no result. detail: the end of a traceback, or what was wrong."""

    kind: FailureKind
    detail: str

    @property
    def said(self) -> str:
        """The detail, as long as may travel with a row."""
        return self.detail[-_MOST_DETAIL:].encode(errors="replace").decode()


Result: TypeAlias = Mapping[str, NDArray[Any]] | RowFailure
"""What became of a row: the values of its columns, [n] each, or why there are none."""


class TaggedValues(NamedTuple):
    """Values of a row's columns, [n] each, and tags that travel with it; ``failure`` among them where it has failed."""

    values: Mapping[str, NDArray[Any]]
    tags: Mapping[str, Tag]


Outcome: TypeAlias = Result | TaggedValues
"""What is written of a row: a result, or values with tags."""


@dataclass(frozen=True, kw_only=True)
class OutputColumn:
    """A column that a task writes. most: entries of a row."""

    name: str
    dtype: str
    most: int


def read_results(found: object, outputs: Sequence[OutputColumn], *, rows: int) -> list[Result]:
    """Return what a function returned for ``rows`` rows as a result for each. Raises nothing."""
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)) or len(found) != rows:
        what = f"{len(found)} entries" if isinstance(found, Sequence) else f"a {type(found).__name__}"
        wrong = RowFailure(
            "invalid", f"the function returned {what}; it must return a list with one entry for each row"
        )
        return [wrong] * rows
    return [_result(one, outputs) for one in found]


def _result(found: object, outputs: Sequence[OutputColumn]) -> Result:
    if not isinstance(found, Mapping):
        return RowFailure("invalid", f"the function returned a {type(found).__name__} for a row, not a mapping")
    names = [output.name for output in outputs]
    if sorted(map(str, found)) != sorted(names):
        return RowFailure("invalid", f"the function returned {sorted(map(str, found))}, and the task writes {names}")
    made: dict[str, NDArray[Any]] = {}
    for output in outputs:
        try:
            values = np.asarray(found[output.name]).reshape(-1)
            kind = np.result_type(values.dtype, np.bool_).kind if values.size else "b"
            wanted = np.dtype(output.dtype)
            if kind not in "biuf" or (kind == "f" and wanted.kind != "f"):
                return RowFailure("invalid", f"{output.name} holds {values.dtype}, which is no {output.dtype}")
            made[output.name] = cast = values.astype(wanted)
            if wanted.kind != "f" and len(odd := values[values != cast]):
                return RowFailure("invalid", f"{output.name} holds {odd[0]}, which {output.dtype} cannot hold")
        except (TypeError, ValueError) as error:
            return RowFailure("invalid", f"{output.name}: {error}")
        if len(made[output.name]) > output.most:
            return RowFailure("invalid", f"{output.name} has {len(made[output.name])} entries, more than {output.most}")
    return made


def packed(results: Sequence[Result]) -> list[dict[str, bytes] | RowFailure]:
    """Return what ``read_results`` gave as bytes, which ``unpacked`` reads."""
    return [
        RowFailure(result.kind, result.said)
        if isinstance(result, RowFailure)
        else {name: values.tobytes() for name, values in result.items()}
        for result in results
    ]


def unpacked(
    said: Sequence[Mapping[str, bytes] | RowFailure], outputs: Sequence[OutputColumn], *, rows: int
) -> list[Result]:
    """Return the results that ``packed`` was given, checked again. Raises ValueError for what it did not give."""
    if len(said) != rows:
        raise ValueError(f"{len(said)} outcomes of {rows} rows")
    dtypes = {output.name: output.dtype for output in outputs}
    return [
        one
        if isinstance(one, RowFailure)
        else _result({name: np.frombuffer(data, dtypes.get(name, "uint8")) for name, data in one.items()}, outputs)
        for one in said
    ]


def columns_of(outcomes: Sequence[Outcome], outputs: Sequence[OutputColumn]) -> dict[str, Jagged]:
    """Return the columns of rows; of those that failed without values they are empty."""
    found = [outcome.values if isinstance(outcome, TaggedValues) else outcome for outcome in outcomes]
    return {
        output.name: Jagged.from_rows(
            [() if isinstance(result, RowFailure) else result[output.name] for result in found], output.dtype
        )
        for output in outputs
    }


def task_rows(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged], *, texts: Sequence[str]) -> list[TaskRow]:
    """Return rows as a function is given them. texts: of their responses, or none."""
    made: list[TaskRow] = []
    for index, row in enumerate(rows):
        asked: dict[str, Any] = {}
        if "task" in columns:
            prompt = Prompt.unpack(columns["task"].row(index).tobytes())
            asked = {"question": prompt.question, "answer": prompt.answer, "meta": prompt.meta}
        made.append(
            TaskRow(
                serial=row.meta.serial,
                sample=row.meta.sample,
                columns={name: column.row(index) for name, column in columns.items() if name != "task"},
                tags=dict(row.meta.tags),
                response=texts[index] if texts else "",
                **asked,
            )
        )
    return made
