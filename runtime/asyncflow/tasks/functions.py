"""Calls of a user's function over rows, with a deadline.

A plain function is called in child processes (``child``), as many as the task's ``parallel``: it may compute, and is
killed at its deadline. An ``async def`` function is awaited in the event loop of this process, so many calls can wait
at the same time, for example for a server; it must not compute there.

If the call of a batch fails, the function is called again for each row, so that one bad row does not affect others,
unless the function takes whole groups. The function of a task is code of the job's author, like an engine: it is not
sandboxed as a reward is.

Invariants: a call ends with a result or a failure within its deadline plus the time to load the function again; the
event loop never computes for a plain function; every process that is started here ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost
from asyncflow.process import adopt_orphans
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.child import SHOWN, START_S, FunctionProcess, load_function
from asyncflow.tasks.rows import OutputColumn, Result, RowFailure, TaskRow, read_results, task_rows


class TaskFunction:
    """A function of a task, with the processes or the coroutine that run it.

    workdir: folder that is searched first for its module; outputs: columns that it returns; config: its second
    argument; parallel: most calls of a plain function at the same time; timeout_s: deadline of one call; groups:
    whether a batch must not be split; decode: returns the text of a response's token ids, None if the task does not
    read them.
    """

    def __init__(
        self,
        function: str,
        *,
        workdir: Path,
        outputs: Sequence[OutputColumn],
        config: Mapping[str, Any],
        parallel: int = 1,
        timeout_s: float = 60.0,
        groups: bool = False,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._function = function
        self._workdir = workdir
        self._outputs = tuple(outputs)
        self._config = dict(config)
        self._timeout_s = timeout_s
        self._groups = groups
        self._decode = decode
        self._parallel = parallel
        self._free: asyncio.LifoQueue[FunctionProcess] = asyncio.LifoQueue()
        self._alive: set[FunctionProcess] = set()
        self._awaited: Callable[..., Awaitable[object]] | None = None

    async def start(self) -> None:
        """Load the function, a plain one in ``parallel`` processes, and adopt orphans from now on.

        Raises ManifestError if the function cannot be loaded.
        """
        adopt_orphans(enabled=True)
        first = await self._add()
        if first.is_async:
            await self.close()
            self._awaited = await asyncio.to_thread(load_function, self._function, workdir=self._workdir)
            return
        self._free.put_nowait(first)
        for process in await asyncio.gather(*(self._add() for _ in range(self._parallel - 1))):
            self._free.put_nowait(process)

    async def close(self) -> None:
        """End all processes."""
        alive, self._alive = self._alive, set()
        await asyncio.gather(*(process.end() for process in alive))

    async def compute(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        """Return the result of each row; an error of the function is a result, not an exception."""
        arguments = await asyncio.to_thread(self._arguments, rows, columns)
        results = await self._call(arguments)
        if len(arguments) == 1 or self._groups or not all(isinstance(result, RowFailure) for result in results):
            return results
        return [(await self._call([row]))[0] for row in arguments]

    def _arguments(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[TaskRow]:
        decode, ids = self._decode, columns.get("response_ids")
        texts = [] if decode is None or ids is None else [decode(ids.row(i).tolist()) for i in range(len(rows))]
        return task_rows(rows, columns, texts=texts)

    async def _call(self, rows: list[TaskRow]) -> list[Result]:
        try:
            return await (self._await(rows) if self._awaited is not None else self._ask(rows))
        except DeadlineExceeded as error:
            return [RowFailure("timeout", str(error))] * len(rows)
        except (PeerLost, ManifestError) as error:
            return [RowFailure("died", str(error))] * len(rows)

    async def _await(self, rows: list[TaskRow]) -> list[Result]:
        assert self._awaited is not None
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return read_results(await self._awaited(rows, self._config), self._outputs, rows=len(rows))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything: that is the result
            if isinstance(error, TimeoutError) and limit.expired():
                return [RowFailure("timeout", f"the function took longer than {self._timeout_s:g} s")] * len(rows)
            return [RowFailure("raised", traceback.format_exc(limit=SHOWN))] * len(rows)

    async def _ask(self, rows: list[TaskRow]) -> list[Result]:
        process = await self._free.get()
        try:
            if not process.usable:
                self._alive.discard(process)
                with contextlib.suppress(DeadlineExceeded):
                    await process.end()
                process = await self._add()
            return await process.call(rows, self._config, timeout=self._timeout_s)
        finally:
            self._free.put_nowait(process)

    async def _add(self) -> FunctionProcess:
        """Start a process in the event loop's thread, since the kernel ends it with the thread that started it."""
        process = await FunctionProcess.start(outputs=self._outputs)
        self._alive.add(process)
        await process.load(self._function, workdir=self._workdir, timeout=START_S)
        return process
