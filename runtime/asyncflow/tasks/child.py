"""A child process that calls a plain function of a task, and the parent's side of it.

Parent and child exchange frames (``rewards.wire.LENGTH``) of msgpack over the child's standard input and output. The
frames contain rows and descriptions of columns, never objects. The output of the function goes to the parent's log.

Invariants: the child sends one answer to each request; it ends with its parent (PR_SET_PDEATHSIG), also while the
function runs; a child that was killed or broke the protocol receives no further requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import traceback
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
import numpy as np

from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost, in_one_line
from asyncflow.functions import import_function
from asyncflow.process import die_with_parent, reap
from asyncflow.rewards.wire import LENGTH
from asyncflow.tasks.rows import OutputColumn, Result, RowFailure, TaskRow, packed, read_results, unpacked

Message = TypeVar("Message", bound=msgspec.Struct)

START_S: Final = 120.0
"""Seconds that a function may take to load."""
SHOWN: Final = -8
"""Limit of a traceback: its last eight frames are kept."""
_END_S: Final = 5.0
"""Seconds that the kernel may take to end a killed process."""


class FunctionLoad(msgspec.Struct, frozen=True):
    """The first request to a child: the function, its module's folder, the parent's pid, and its output columns."""

    function: str
    workdir: str
    parent: int
    outputs: list[OutputColumn]


class FunctionLoaded(msgspec.Struct, frozen=True):
    """The answer to ``FunctionLoad``: whether the function is async, or why it cannot be loaded."""

    is_async: bool = False
    failure: str = ""


class FunctionCall(msgspec.Struct, frozen=True):
    """One call of the function."""

    rows: list[TaskRow]
    config: dict[str, Any]


class FunctionReturned(msgspec.Struct, frozen=True):
    """The answer to ``FunctionCall``: for each row the bytes of its columns, or the reason of its failure."""

    rows: list[dict[str, bytes] | RowFailure]


class FunctionProcess:
    """The parent's side of a child. At most one call of ``load`` or ``call`` may be in progress."""

    def __init__(self, process: Process, *, outputs: Sequence[OutputColumn]) -> None:
        self.pid = process.pid
        self.is_async = False
        self.usable = True
        self._process = process
        self._outputs = list(outputs)

    @classmethod
    async def start(cls, *, outputs: Sequence[OutputColumn], silent: bool = False) -> FunctionProcess:
        """Start a child. outputs: columns that its function returns; silent: whether the function's output is dropped.

        Raises PeerLost if no process can be started.
        """
        command = (sys.executable, "-P", "-m", __name__)
        log = DEVNULL if silent else None
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=log, process_group=0
            )
        except OSError as error:
            raise PeerLost(f"no process for the function can be started: {error}") from error
        return cls(process, outputs=outputs)

    async def load(self, function: str, *, workdir: Path, timeout: float) -> None:
        """Load the function in the child. Raises ManifestError if it cannot be loaded, and as ``call`` does."""
        request = FunctionLoad(function, str(workdir), os.getpid(), self._outputs)
        late = f"the function took longer to load than {timeout:g} s"
        answer = await self._ask(request, FunctionLoaded, timeout=timeout, late=late)
        if answer.failure:
            self.kill()
            raise ManifestError(
                f"{function!r} cannot be loaded: {answer.failure}",
                where="spec.tasks",
                hint="Put its module next to the manifest or install it; define it as def function(rows, config)",
            )
        self.is_async = answer.is_async

    async def call(self, rows: list[TaskRow], config: Mapping[str, Any], *, timeout: float) -> list[Result]:
        """Return the result of each row.

        Raises DeadlineExceeded, and PeerLost if the process has ended. In both cases the process has been killed.
        """
        late = f"the function took longer than {timeout:g} s"
        answer = await self._ask(FunctionCall(rows, dict(config)), FunctionReturned, timeout=timeout, late=late)
        try:
            return unpacked(answer.rows, self._outputs, rows=len(rows))
        except ValueError as error:
            self.kill()
            raise PeerLost(f"the process of the function broke the protocol: {error}") from error

    def kill(self) -> None:
        """End the process and all processes of its group, unless this was called before."""
        if self.usable:
            self.usable = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """End the process and its group, and wait until all have ended. Raises DeadlineExceeded."""
        self.kill()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
                await reap(-self.pid)
        except TimeoutError as error:
            raise DeadlineExceeded(f"process {self.pid}, killed, did not end within {_END_S:g} s") from error

    async def _ask(self, request: msgspec.Struct, kind: type[Message], *, timeout: float, late: str) -> Message:
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        try:
            async with asyncio.timeout(timeout):
                writer.write(await asyncio.to_thread(frame, request))
                await writer.drain()
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
        except TimeoutError as error:
            self.kill()
            raise DeadlineExceeded(late) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            await self.end()
            how = f"exit status {self._process.returncode}"
            raise PeerLost(f"the process of the function has ended ({how})") from error
        except msgspec.MsgspecError as error:
            self.kill()
            raise PeerLost(f"the process of the function broke the protocol: {error}") from error
        except BaseException:
            self.kill()
            raise


def load_function(function: str, *, workdir: Path) -> Callable[..., Any]:
    """Import the function. Raises ManifestError if there is none that can be called with rows and config."""
    found: Callable[..., Any] = import_function(function, workdir=workdir)
    try:
        inspect.signature(found).bind([], {})
    except TypeError as error:
        raise ManifestError(f"it cannot be called with rows and config: {error}") from error
    return found


def frame(message: msgspec.Struct) -> bytes:
    """Return the frame of a message; arrays of rows are encoded as dtype and bytes."""
    body = msgspec.msgpack.encode(message, enc_hook=lambda array: (array.dtype.str, array.tobytes()))
    return LENGTH.pack(len(body)) + body


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Run the child: load the function, then answer calls until the pipe ends."""
    request = _read(requests, FunctionLoad)
    if request is None:
        return
    die_with_parent(request.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal: the parent ends this process
    try:
        function = load_function(request.function, workdir=Path(request.workdir))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may raise anything: the parent reports it
        if not isinstance(error, ManifestError):
            traceback.print_exc()
        _write(answers, FunctionLoaded(failure=in_one_line(error, folder=Path(request.workdir))))
        return
    _write(answers, FunctionLoaded(is_async=inspect.iscoroutinefunction(function)))
    while (call := _read(requests, FunctionCall)) is not None:
        _write(answers, FunctionReturned(packed(_results(function, call, request.outputs))))


def _results(function: Callable[..., Any], call: FunctionCall, outputs: Sequence[OutputColumn]) -> list[Result]:
    try:
        return read_results(function(call.rows, call.config), outputs, rows=len(call.rows))
    except (Exception, SystemExit):  # noqa: BLE001  the user's code may raise anything: that is the result
        return [_raised()] * len(call.rows)


def _raised() -> RowFailure:
    return RowFailure("raised", traceback.format_exc(limit=SHOWN))


def _read(pipe: BinaryIO, kind: type[Message]) -> Message | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(pipe.read(LENGTH.unpack(head)[0]), type=kind, dec_hook=_array)


def _write(pipe: BinaryIO, message: msgspec.Struct) -> None:
    pipe.write(frame(message))
    pipe.flush()


def _array(_: Any, encoded: Any) -> Any:
    dtype, data = encoded
    return np.frombuffer(data, dtype).copy()


def _main() -> None:
    """Serve over the pipes; redirect standard input of the function to /dev/null and its output to the log."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        serve(requests, answers)


if __name__ == "__main__":
    _main()
