"""The commands for a live queue: ls, show and peek display its contents, drain makes a storage unit leave.

Invariant: ls, show and peek lease no rows and change nothing, except that the ledger counts peeked rows for the audit.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from msgspec import Struct
from rich.table import Table

from asyncflow.errors import DeadlineExceeded, ManifestError
from asyncflow.plan.describe import size
from asyncflow.queue.client import QueueClient, aconnect
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol.messages import PartitionView, PeekedRows, QueueStats, Tag, TaskView, UnitView
from asyncflow.queue.values import decode
from asyncflow.rpc.tls import Credentials
from asyncflow.view.console import make_console, make_table, print_json

T = TypeVar("T")
_CALL_S = 10.0
_POLL_S = 0.5
_LONGEST = 60


class Overview(Struct, frozen=True, kw_only=True):
    """Output of ``ls --json``."""

    stats: QueueStats
    partitions: list[PartitionView]
    units: list[UnitView]


class PartitionReport(PartitionView, frozen=True, kw_only=True):
    """Output of ``show --json``."""

    units: list[UnitView]


class SeenRow(Struct, frozen=True, kw_only=True):
    """Output of ``peek --json`` for one row.

    state: state of the row for the task, "" if none was named; values: values of the requested columns, as text.
    """

    row: int
    key: str
    tags: dict[str, Tag]
    state: str
    attempt: int
    bytes: dict[str, int]
    values: dict[str, str]


def ls(address: str, *, tls: Path | None, timeout: float, as_json: bool) -> None:
    """Print the partitions of a queue, and the memory in use."""

    async def query(queue: QueueClient) -> Overview:
        names = await queue.partitions(timeout=_CALL_S)
        stats, units, views = await asyncio.gather(
            queue.stats(timeout=_CALL_S),
            queue.list_units(timeout=_CALL_S),
            asyncio.gather(*(queue.show(name, timeout=_CALL_S) for name in names)),
        )
        return Overview(stats=stats, partitions=views, units=units)

    overview = _run_with_client(address, query, tls=tls, timeout=timeout)
    if as_json:
        print_json(overview)
        return
    table = make_table("PARTITION", "FOR", "ROWS", "WANTED", "READY", "LEASED", "WAITING CLAIMS")
    for view in overview.partitions:
        counts = (_by_task(view, lambda task: task.ready), _by_task(view, lambda task: task.leased))
        parked = _by_task(view, lambda task: task.parked)
        table.add_row(view.name, view.purpose or "-", str(view.rows), str(view.wanted), *counts, parked)
    make_console().print(table)
    make_console().print(_units_table(overview.units))
    stats = overview.stats
    units = "1 unit" if stats.units == 1 else f"{stats.units} units"
    click.echo(f"{units}, {size(stats.bytes)} of {size(stats.limit)} held, ledger {size(stats.ledger_bytes)}")
    click.echo(f"{stats.lease_expiries} leases expired, {stats.redeliveries} rows redelivered")
    for silent in stats.silent:
        click.echo(f"controller {silent} does not answer: its tasks are not counted here")


def drain(address: str, unit: int, *, tls: Path | None, timeout: float, as_json: bool) -> None:
    """Drain a storage unit. Raises DeadlineExceeded if it has not left after ``timeout`` seconds."""

    async def leave(queue: QueueClient) -> None:
        deadline = time.monotonic() + timeout
        await queue.drain_unit(unit, timeout=_CALL_S)
        while found := [view for view in await queue.list_units(timeout=_CALL_S) if view.unit == unit]:
            if found[0].state in ("serving", "silent"):
                break
            if time.monotonic() >= deadline:
                hint = "The drain continues; see asyncflow queue ls, and check that the other units have room"
                raise DeadlineExceeded(f"{found[0].rows} rows are still to be moved", where=f"unit {unit}", hint=hint)
            if not as_json:
                click.echo(f"unit {unit}: {found[0].rows} rows, {size(found[0].bytes)} to move")
            await asyncio.sleep(_POLL_S)

    _run_with_client(address, leave, tls=tls, timeout=timeout)
    if as_json:
        click.echo(json.dumps({"unit": unit, "left": True}))
    else:
        click.echo(f"unit {unit} has left; no row was lost")


def show(address: str, partition: str, *, tls: Path | None, timeout: float, as_json: bool) -> None:
    """Print the tasks of one partition and what each waits for, and the storage units."""

    async def query(queue: QueueClient) -> PartitionReport:
        calls = queue.show(partition, timeout=_CALL_S), queue.list_units(timeout=_CALL_S)
        shown, units = await asyncio.gather(*calls)
        return PartitionReport(**msgspec.structs.asdict(shown), units=units)

    view = _run_with_client(address, query, tls=tls, timeout=timeout)
    if as_json:
        print_json(view)
        return
    if not view.purpose and not view.tasks:
        raise ManifestError(f"there is no partition {partition!r}", where=address, hint="See asyncflow queue ls")
    expected = "" if view.expected is None else f" of {view.expected} expected"
    click.echo(f"{view.name} ({view.purpose or 'empty'}): {view.rows} rows{expected}, {view.wanted} wanted")
    click.echo("columns: " + ", ".join(f"{name} {dtype}" for name, dtype in view.columns.items()))
    table = make_table(
        "TASK", "NEEDS", "WRITES", "READY", "LEASED", "DONE", "WAITING CLAIMS", "OLDEST NOT READY", "LACKS"
    )
    for task in view.tasks:
        counts = (task.ready, task.leased, task.done, task.parked)
        oldest = ("-", "-")
        if task.oldest:
            oldest = (f"row {task.oldest.row}, {task.oldest.seconds:.0f} s", _list(task.oldest.lacks))
        name = f"{task.name} (groups)" if task.groups else task.name
        table.add_row(name, _list(task.needs), _list(task.writes), *map(str, counts), *oldest)
    make_console().print(table)
    for silent, tasks in view.silent.items():
        click.echo(f"controller {silent} does not answer: the state of its tasks is unknown: {_list(tasks)}")
    make_console().print(_units_table(view.units))


def peek(
    address: str,
    partition: str,
    *,
    task: str,
    most: int,
    columns: Sequence[str],
    tls: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Print the oldest rows of a partition, as ``task`` sees them, with the values of some columns."""

    async def query(queue: QueueClient) -> list[SeenRow]:
        peek = await Partition(queue, partition).peek(task, most=most, timeout=_CALL_S)
        values = {name: await _values(queue, peek, name) for name in columns}
        return [_row(peek, index, values, task=task) for index in range(len(peek.rows))]

    rows = _run_with_client(address, query, tls=tls, timeout=timeout)
    if as_json:
        print_json(rows)
        return
    table = make_table("ROW", "KEY", "TAGS", *(["STATE", "ATTEMPT"] if task else []), "BYTES", *columns)
    for row in rows:
        tags, sizes = (_list(f"{name}={value}" for name, value in pairs.items()) for pairs in (row.tags, row.bytes))
        for_task = (row.state, str(row.attempt)) if task else ()
        table.add_row(
            str(row.row), row.key or "-", tags, *for_task, sizes, *(row.values.get(name, "-") for name in columns)
        )
    make_console().print(table)


def _run_with_client(
    address: str, query: Callable[[QueueClient], Coroutine[Any, Any, T]], *, tls: Path | None, timeout: float
) -> T:
    """Run ``query`` with a client of the queue at ``address``, and return its result."""

    async def run() -> T:
        credentials = Credentials(tls) if tls is not None else None
        async with aconnect(address, credentials=credentials, timeout=timeout) as queue:
            return await query(queue)

    return asyncio.run(run())


async def _values(queue: QueueClient, peek: PeekedRows, column: str) -> dict[int, str]:
    """Return the values of a column as text, by row."""
    sizes = peek.sizes.get(column, [])
    present = [row for row, size in zip(peek.rows, sizes, strict=False) if size >= 0]
    fetched = await queue.fetch(present, [column], timeout=_CALL_S)
    return dict(zip(present, map(_text, decode(fetched[column])), strict=True))


def _text(value: Any) -> str:
    text = " ".join(repr(value.tolist() if hasattr(value, "tolist") else value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _row(peek: PeekedRows, index: int, values: Mapping[str, Mapping[int, str]], *, task: str) -> SeenRow:
    row = peek.rows[index]
    return SeenRow(
        row=row,
        key=peek.keys[index],
        tags=peek.tags[index],
        state=_state(peek, index) if task else "",
        attempt=peek.attempts[index],
        bytes={name: sizes[index] for name, sizes in peek.sizes.items() if sizes[index] >= 0},
        values={name: of[row] for name, of in values.items() if row in of},
    )


def _state(peek: PeekedRows, index: int) -> str:
    if peek.lacks[index]:
        return f"lacks {_list(peek.lacks[index])}"
    if peek.done[index]:
        return "done"
    if peek.leased[index]:
        return "leased"
    return "ready" if peek.ready[index] else "its group is not ready"


def _units_table(units: Sequence[UnitView]) -> Table:
    table = make_table("UNIT", "STATE", "ROWS", "HELD", "OF", "EPOCH", "ADDRESS")
    for unit in units:
        room = (size(unit.bytes), size(unit.limit))
        table.add_row(str(unit.unit), unit.state, str(unit.rows), *room, str(unit.epoch), unit.address or "-")
    return table


def _by_task(view: PartitionView, count: Callable[[TaskView], int]) -> str:
    return _list(f"{task.name} {count(task)}" for task in view.tasks if count(task))


def _list(items: Any) -> str:
    return ", ".join(items) or "-"
