"""A user's function over rows, called within its deadline.

A plain function is called in processes of its own (``child``), as many at once as the task's ``parallel``: it may
compute as it likes, and is killed at its deadline. An ``async def`` is awaited in this process's event loop, so that
many calls wait at once (for a server, say); it must not compute there. Which of the two it is, its definition says.

A batch whose call fails is called again row by row, so that one bad row takes no other with it; not where the function
is given whole groups. A task's function is code of whoever wrote the job, as an engine is: it is not confined as
a reward is.

Invariants: a call ends, in a result or a failure, within its deadline and what it takes to load the function again; the
event loop never computes for a plain function; every process that is started here ends with this one.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from asyncflow.errors import DeadlineExceeded, PeerLost
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.child import FunctionProcess
from asyncflow.tasks.loading import SHOWN, load_function
from asyncflow.tasks.rows import OutputColumn, Result, RowFailure, TaskRow, read_results, task_rows

_START_S: Final = 120.0
"""Seconds that the function may take to load."""


class TaskFunction:
    """A function, and how it is called.

    workdir: where its module is looked for first; outputs: what it returns; config: what it is given beside the rows;
    parallel: most calls at once; timeout_s: of one call; groups: whether a batch is never called in parts; decode:
    gives the text of a response's token ids, None where the task does not read them.
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
        self._threads = ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="task")
        self._free: asyncio.LifoQueue[FunctionProcess] = asyncio.LifoQueue()
        self._alive: set[FunctionProcess] = set()
        self._awaited: Callable[..., Awaitable[object]] | None = None

    async def start(self) -> None:
        """Load the function, in as many processes as there may be calls. Raises ManifestError where it cannot be."""
        first = await self._add()
        if first.is_async:
            await self.close()
            self._awaited = await asyncio.to_thread(load_function, self._function, workdir=self._workdir)
            return
        self._free.put_nowait(first)
        for process in await asyncio.gather(*(self._add() for _ in range(self._parallel - 1))):
            self._free.put_nowait(process)

    async def close(self) -> None:
        """Kill all processes."""
        for process in self._alive:
            process.kill()
        self._alive.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def compute(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        """Return the result of each row; never raises for what the function does."""
        given = await asyncio.to_thread(self._given, rows, columns)
        results = await self._call(given)
        if len(given) == 1 or self._groups or not all(isinstance(result, RowFailure) for result in results):
            return results
        return [(await self._call([row]))[0] for row in given]

    def _given(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[TaskRow]:
        decode, ids = self._decode, columns.get("response_ids")
        texts = [] if decode is None or ids is None else [decode(ids.row(i).tolist()) for i in range(len(rows))]
        return task_rows(rows, columns, texts=texts)

    async def _call(self, rows: list[TaskRow]) -> list[Result]:
        found = await (self._await(rows) if self._awaited is not None else self._ask(rows))
        if isinstance(found, RowFailure):
            return [found] * len(rows)
        return read_results(found, self._outputs, rows=len(rows))

    async def _await(self, rows: list[TaskRow]) -> object:
        assert self._awaited is not None
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._awaited(rows, self._config)
        except Exception as error:  # noqa: BLE001  somebody else's code: what it raises is the outcome
            if isinstance(error, TimeoutError) and limit.expired():
                return RowFailure("timeout", f"the function took longer than {self._timeout_s:g} s")
            return RowFailure("raised", traceback.format_exc(limit=SHOWN))

    async def _ask(self, rows: list[TaskRow]) -> object:
        process = await self._free.get()
        try:
            if not process.usable:
                self._alive.discard(process)
                process = await self._add()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, process.call, rows, self._config, self._timeout_s)
        except DeadlineExceeded as error:
            return RowFailure("timeout", str(error))
        except PeerLost as error:
            return RowFailure("died", str(error))
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self._free.put_nowait(process)

    async def _add(self) -> FunctionProcess:
        """Start a process here, since the kernel ends it with the thread that started it, and wait until it is
        ready.
        """
        process = FunctionProcess(self._function, workdir=self._workdir)
        self._alive.add(process)
        await asyncio.get_running_loop().run_in_executor(self._threads, process.load, _START_S)
        return process
