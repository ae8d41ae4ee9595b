"""Raw pyzmq sockets as a queue: the baseline of all ratios.

One process with one ROUTER socket stores arrays in memory and returns them. It has no leases, no ledger and no fault
tolerance. It shows the performance of Python with zmq over TCP on this machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from implementations import CALL_S, Implementation
from samples import Sample

Packed: TypeAlias = dict[str, tuple[npt.NDArray[Any], list[int]]]
"""The concatenated values and the length of each row, by column."""
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode
_IDLE_MS = 1000.0


class Rows(NamedTuple):
    """Rows of a partition, identified by numbers in the order of their puts."""

    partition: str
    numbers: list[int]


class _Cell(NamedTuple):
    values: npt.NDArray[Any]
    start: int
    stop: int


@dataclass
class _Waiting:
    deadline: float
    caller: bytes
    request: dict[str, Any]


@dataclass
class _Partition:
    """A partition. cells: by column and row; lacks: the number of missing columns of each row, by task; ready: the rows
    with all columns of a task.
    """

    cells: dict[str, dict[int, _Cell]] = field(default_factory=dict)
    lacks: dict[str, dict[int, int]] = field(default_factory=dict)
    ready: dict[str, deque[int]] = field(default_factory=dict)
    rows: int = 0


class _Server:
    def __init__(self, socket: zmq.Socket[bytes], tasks: Mapping[str, Sequence[str]]) -> None:
        self._socket = socket
        self._tasks = {name: frozenset(columns) for name, columns in tasks.items()}
        self._partitions: dict[str, _Partition] = {}
        self._waiting: list[_Waiting] = []

    def run(self) -> None:
        """Serve requests until the call ``stop``."""
        calls: dict[str, Callable[[bytes, dict[str, Any], Sequence[Any]], None]] = {
            "put": self._put,
            "claim": self._claim,
            "fetch": self._fetch,
            "clear": self._clear,
        }
        while True:
            if not self._socket.poll(self._until_next()):
                self._end_waits()
                continue
            caller, head, *frames = self._socket.recv_multipart(copy=False)
            request = _decode(head.buffer)
            if request["call"] == "stop":
                self._answer(caller.bytes, {})
                return
            calls[request["call"]](caller.bytes, request, frames)

    def _until_next(self) -> float:
        ends = [waiting.deadline - time.monotonic() for waiting in self._waiting]
        return max(0.0, min(ends) * 1e3) if ends else _IDLE_MS

    def _end_waits(self) -> None:
        now = time.monotonic()
        for waiting in [waiting for waiting in self._waiting if waiting.deadline <= now]:
            self._waiting.remove(waiting)
            self._answer(waiting.caller, {"rows": None})

    def _answer(self, caller: bytes, reply: Mapping[str, Any], frames: Sequence[Any] = ()) -> None:
        self._socket.send_multipart([caller, _encode(reply), *frames], copy=not frames)

    def _put(self, caller: bytes, request: dict[str, Any], frames: Sequence[Any]) -> None:
        partition = self._partitions.setdefault(request["partition"], _Partition())
        rows = request["rows"]
        if rows is None:
            rows = list(range(partition.rows, partition.rows + len(request["columns"][0][2])))
            partition.rows += len(rows)
        for (name, dtype, lengths), frame in zip(request["columns"], frames, strict=True):
            values, stops = np.frombuffer(frame.buffer, dtype=dtype), np.cumsum(lengths).tolist()
            cells = partition.cells.setdefault(name, {})
            for row, length, stop in zip(rows, lengths, stops, strict=True):
                if row not in cells:
                    self._count(partition, name, row)
                cells[row] = _Cell(values, stop - length, stop)
        self._answer(caller, {"rows": rows})
        for waiting in list(self._waiting):
            if (found := self._take(waiting.request)) is not None:
                self._waiting.remove(waiting)
                self._answer(waiting.caller, {"rows": found})

    def _count(self, partition: _Partition, column: str, row: int) -> None:
        for task, needs in self._tasks.items():
            if column not in needs:
                continue
            lacks = partition.lacks.setdefault(task, {})
            lacks[row] = lacks.get(row, len(needs)) - 1
            if not lacks[row]:
                del lacks[row]
                partition.ready.setdefault(task, deque()).append(row)

    def _take(self, request: dict[str, Any]) -> list[int] | None:
        partition = self._partitions.get(request["partition"])
        ready = partition.ready.get(request["task"], ()) if partition is not None else ()
        return [ready.popleft() for _ in range(request["count"])] if len(ready) >= request["count"] else None  # type: ignore[union-attr]

    def _claim(self, caller: bytes, request: dict[str, Any], _frames: Sequence[Any]) -> None:
        found = self._take(request)
        if found is None and request["wait_s"] > 0:
            self._waiting.append(_Waiting(time.monotonic() + request["wait_s"], caller, request))
        else:
            self._answer(caller, {"rows": found})

    def _fetch(self, caller: bytes, request: dict[str, Any], _frames: Sequence[Any]) -> None:
        partition, columns, frames = self._partitions[request["partition"]], [], []
        for name in request["columns"]:
            cells = [partition.cells[name][row] for row in request["rows"]]
            whole = cells[0].values
            if all(a.values is whole and b.values is whole and a.stop == b.start for a, b in pairwise(cells)):
                values = whole[cells[0].start : cells[-1].stop]
            else:
                values = np.concatenate([cell.values[cell.start : cell.stop] for cell in cells])
            columns.append((name, values.dtype.str, [cell.stop - cell.start for cell in cells]))
            frames.append(values.view(np.uint8).data)
        self._answer(caller, {"columns": columns}, frames)

    def _clear(self, caller: bytes, request: dict[str, Any], _frames: Sequence[Any]) -> None:
        self._partitions.pop(request["partition"], None)
        self._answer(caller, {})


def _serve(port: Any, tasks: Mapping[str, Sequence[str]]) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    port.put(socket.bind_to_random_port("tcp://127.0.0.1"))
    _Server(socket, tasks).run()
    socket.close(500)
    context.term()


class RawSockets(Implementation):
    """The client of the server process; each thread has its own socket."""

    def start(self, *, units: int, tasks: Mapping[str, Sequence[str]]) -> str:  # noqa: ARG002 - it is one process
        spawn = multiprocessing.get_context("spawn")
        port = spawn.Queue()
        self._process = spawn.Process(target=_serve, args=(port, dict(tasks)), daemon=True)
        self._process.start()
        address = f"tcp://127.0.0.1:{port.get(timeout=CALL_S)}"
        self.attach(address)
        return address

    def attach(self, handle: str) -> None:
        self._address = handle
        self._own = threading.local()

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._call({"call": "stop"})
            self._process.join(10)

    @property
    def pids(self) -> dict[str, int]:
        return {"server": self._process.pid or 0}

    def pack(self, samples: Sequence[Sample]) -> Packed:
        return {
            name: (np.concatenate([sample[name] for sample in samples]), [len(sample[name]) for sample in samples])
            for name in samples[0]
        }

    def unpack(self, packed: Packed) -> list[Sample]:
        cut = {
            name: [values[start:stop] for start, stop in pairwise([0, *itertools.accumulate(lengths)])]
            for name, (values, lengths) in packed.items()
        }
        return [dict(zip(cut, row, strict=True)) for row in zip(*cut.values(), strict=True)]

    def put(self, partition: str, packed: Packed) -> Rows:
        return Rows(partition, self._store(partition, packed, None))

    def write(self, rows: Rows, packed: Packed) -> None:
        self._store(rows.partition, packed, rows.numbers)

    def claim(self, partition: str, task: str, count: int, *, timeout: float) -> Rows | None:
        request = {"call": "claim", "partition": partition, "task": task, "count": count, "wait_s": timeout}
        found = self._call(request)[0]["rows"]
        return None if found is None else Rows(partition, found)

    def fetch(self, rows: Rows, columns: Sequence[str]) -> Packed:
        request = {"call": "fetch", "partition": rows.partition, "rows": rows.numbers, "columns": list(columns)}
        reply, frames = self._call(request)
        return {
            name: (np.frombuffer(frame.buffer, dtype=dtype), lengths)
            for (name, dtype, lengths), frame in zip(reply["columns"], frames, strict=True)
        }

    def clear(self, partition: str) -> None:
        self._call({"call": "clear", "partition": partition})

    def names(self, rows: Rows) -> list[Hashable]:
        return list(rows.numbers)

    def _store(self, partition: str, packed: Packed, rows: list[int] | None) -> list[int]:
        columns = [(name, values.dtype.str, lengths) for name, (values, lengths) in packed.items()]
        request = {"call": "put", "partition": partition, "rows": rows, "columns": columns}
        reply, _ = self._call(request, [values.view(np.uint8).data for values, _ in packed.values()])
        stored: list[int] = reply["rows"]
        return stored

    def _call(self, request: Mapping[str, Any], frames: Sequence[Any] = ()) -> tuple[dict[str, Any], Sequence[Any]]:
        socket = getattr(self._own, "socket", None)
        if socket is None:
            socket = self._own.socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
        socket.send_multipart([_encode(request), *frames], copy=not frames)
        reply, *parts = socket.recv_multipart(copy=False)
        return _decode(reply.buffer), parts
