"""The rows that are passed to a task's function, and their results.

Invariant: a returned value counts as the columns of a row only if it has exactly the columns that the task writes, with
values of their dtypes and at most the manifest's number of entries; any other value is a failure of that row, with its
reason.
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
"""The function raised, returned an invalid value, took too long, or its process or replica ended."""
_MOST_DETAIL: Final = 2000


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One sample as an argument of a task's function.

    serial, sample: its key; columns: one array for each column that the task reads, except ``task``; tags: the row's
    tags, such as ``reward`` and ``version_min``; response: the text of ``response_ids``; question, answer, meta: fields
    of the prompt, if the task reads ``task``.
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
    """A row without a result. detail: the end of a traceback, or a description of the error."""

    kind: FailureKind
    detail: str

    @property
    def tail(self) -> str:
        """The end of the detail, short enough for a tag."""
        return self.detail[-_MOST_DETAIL:].encode(errors="replace").decode()


Result: TypeAlias = Mapping[str, NDArray[Any]] | RowFailure
"""The result of a row: the values of its columns, [n] each, or a failure."""


class TaggedValues(NamedTuple):
    """Values of a row's columns, [n] each, and its tags; a failed row has the tag ``failure``."""

    values: Mapping[str, NDArray[Any]]
    tags: Mapping[str, Tag]


Outcome: TypeAlias = Result | TaggedValues
"""The outcome of a row that is written: a result, or values with tags."""


@dataclass(frozen=True, kw_only=True)
class OutputColumn:
    """A column that a task writes. most: most entries of a row."""

    name: str
    dtype: str
    most: int


def read_results(returned: object, outputs: Sequence[OutputColumn], *, rows: int) -> list[Result]:
    """Return a result for each row from the value that a function returned for ``rows`` rows. Raises nothing."""
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)) or len(returned) != rows:
        what = f"{len(returned)} entries" if isinstance(returned, Sequence) else f"a {type(returned).__name__}"
        failure = RowFailure(
            "invalid", f"the function returned {what}; it must return a list with one entry for each row"
        )
        return [failure] * rows
    return [_result(entry, outputs) for entry in returned]


def _result(entry: object, outputs: Sequence[OutputColumn]) -> Result:
    if not isinstance(entry, Mapping):
        return RowFailure("invalid", f"the function returned a {type(entry).__name__} for a row, not a mapping")
    names = [output.name for output in outputs]
    if sorted(map(str, entry)) != sorted(names):
        return RowFailure("invalid", f"the function returned {sorted(map(str, entry))}, and the task writes {names}")
    made: dict[str, NDArray[Any]] = {}
    for output in outputs:
        try:
            values = np.asarray(entry[output.name]).reshape(-1)
            kind = np.result_type(values.dtype, np.bool_).kind if values.size else "b"
            dtype = np.dtype(output.dtype)
            if kind not in "biuf" or (kind == "f" and dtype.kind != "f"):
                return RowFailure("invalid", f"{output.name} holds {values.dtype}, which is no {output.dtype}")
            made[output.name] = cast = values.astype(dtype)
            if dtype.kind != "f" and len(lossy := values[values != cast]):
                return RowFailure("invalid", f"{output.name} holds {lossy[0]}, which {output.dtype} cannot hold")
        except (TypeError, ValueError) as error:
            return RowFailure("invalid", f"{output.name}: {error}")
        if len(made[output.name]) > output.most:
            return RowFailure("invalid", f"{output.name} has {len(made[output.name])} entries, more than {output.most}")
    return made


def packed(results: Sequence[Result]) -> list[dict[str, bytes] | RowFailure]:
    """Return the results of ``read_results`` as bytes, which ``unpacked`` reads."""
    return [
        RowFailure(result.kind, result.tail)
        if isinstance(result, RowFailure)
        else {name: values.tobytes() for name, values in result.items()}
        for result in results
    ]


def unpacked(
    entries: Sequence[Mapping[str, bytes] | RowFailure], outputs: Sequence[OutputColumn], *, rows: int
) -> list[Result]:
    """Return the results that ``packed`` packed, checked again. Raises ValueError for data that it cannot have made."""
    if len(entries) != rows:
        raise ValueError(f"{len(entries)} outcomes of {rows} rows")
    dtypes = {output.name: output.dtype for output in outputs}
    return [
        entry
        if isinstance(entry, RowFailure)
        else _result({name: np.frombuffer(data, dtypes.get(name, "uint8")) for name, data in entry.items()}, outputs)
        for entry in entries
    ]


def columns_of(outcomes: Sequence[Outcome], outputs: Sequence[OutputColumn]) -> dict[str, Jagged]:
    """Return the columns of rows; the cells of a row that failed without values are empty."""
    results = [outcome.values if isinstance(outcome, TaggedValues) else outcome for outcome in outcomes]
    return {
        output.name: Jagged.from_rows(
            [() if isinstance(result, RowFailure) else result[output.name] for result in results], output.dtype
        )
        for output in outputs
    }


def task_rows(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged], *, texts: Sequence[str]) -> list[TaskRow]:
    """Return rows as arguments of a task's function. texts: texts of their responses, or empty."""
    made: list[TaskRow] = []
    for index, row in enumerate(rows):
        fields: dict[str, Any] = {}
        if "task" in columns:
            prompt = Prompt.unpack(columns["task"].row(index).tobytes())
            fields = {"question": prompt.question, "answer": prompt.answer, "meta": prompt.meta}
        made.append(
            TaskRow(
                serial=row.meta.serial,
                sample=row.meta.sample,
                columns={name: column.row(index) for name, column in columns.items() if name != "task"},
                tags=dict(row.meta.tags),
                response=texts[index] if texts else "",
                **fields,
            )
        )
    return made
