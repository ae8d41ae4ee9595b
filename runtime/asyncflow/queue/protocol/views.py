"""What a person is told of a partition: its tasks, and what each waits for. ``outlook`` makes it.

Invariant: plain data, as everything that crosses a socket.
"""

from __future__ import annotations

from msgspec import Struct


class Unready(Struct, frozen=True, kw_only=True):
    """A row that is not ready for a task. seconds: since the controller knows it; lacks: columns that it needs yet."""

    row: int
    serial: int
    sample: int
    seconds: float
    lacks: list[str]


class TaskView(Struct, frozen=True, kw_only=True):
    """One task. Counts are rows, but for ``parked``: claims that wait. oldest: the oldest row that is not ready."""

    name: str
    kind: str
    needs: list[str]
    writes: list[str]
    groups: bool
    lease_s: float
    ready: int
    leased: int
    done: int
    parked: int
    oldest: Unready | None


class PartitionView(Struct, frozen=True, kw_only=True):
    """One partition. rows: there or awaited; wanted: lost, to be put again; columns: their dtypes.

    silent: controllers that did not answer, with those of their tasks of which nothing is told.
    """

    name: str
    purpose: str
    rows: int
    wanted: int
    cleared: int
    expected: int | None
    columns: dict[str, str]
    tasks: list[TaskView]
    silent: dict[int, list[str]] = {}
