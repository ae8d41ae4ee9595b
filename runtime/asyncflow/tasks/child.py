"""A process in which a plain function of a task is called, and the parent's end of it.

The two talk over the process's standard input and output, in frames (``rewards.wire.LENGTH``) of msgpack: rows and what
their columns are to be, never objects. What the function prints goes to the log of its parent.

Invariants: the process says one thing for each thing that it is told; it ends with its parent (PR_SET_PDEATHSIG), also
while the function runs; what was killed, or broke the protocol, is asked no more.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
import numpy as np

from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost
from asyncflow.process import die_with_parent
from asyncflow.rewards.wire import LENGTH
from asyncflow.tasks.loading import SHOWN, load_function
from asyncflow.tasks.rows import OutputColumn, Result, RowFailure, TaskRow, packed, read_results, unpacked

Said = TypeVar("Said", bound=msgspec.Struct)

_END_S: Final = 5.0
"""Seconds that the kernel may take to end what was killed."""


class FunctionLoad(msgspec.Struct, frozen=True):
    """The first thing that a process is told: the function, where its module lies, and what the task writes."""

    function: str
    workdir: str
    parent: int
    outputs: list[OutputColumn]


class FunctionLoaded(msgspec.Struct, frozen=True):
    """The answer: how the function is called, or why it cannot be."""

    is_async: bool = False
    failure: str = ""


class FunctionCall(msgspec.Struct, frozen=True):
    """Rows of one call."""

    rows: list[TaskRow]
    config: dict[str, Any]


class FunctionReturned(msgspec.Struct, frozen=True):
    """The outcome of each row: the bytes of its columns, or why there are none."""

    rows: list[dict[str, bytes] | RowFailure]


class FunctionProcess:
    """The parent's end. ``load`` and ``call`` are awaited one after another."""

    def __init__(self, process: Process, *, outputs: Sequence[OutputColumn]) -> None:
        self.pid = process.pid
        self.is_async = False
        self.usable = True
        self._process = process
        self._outputs = list(outputs)

    @classmethod
    async def start(cls, *, outputs: Sequence[OutputColumn]) -> FunctionProcess:
        """Start a process. outputs: what its function returns. Raises PeerLost where the machine has no room for it."""
        command = (sys.executable, "-P", "-m", __name__)
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        except OSError as error:
            raise PeerLost(f"no process for the function can be started: {error}") from error
        return cls(process, outputs=outputs)

    async def load(self, function: str, *, workdir: Path, timeout: float) -> None:
        """Have the function loaded. Raises ManifestError where it cannot be, and what ``call`` raises."""
        told = FunctionLoad(function, str(workdir), os.getpid(), self._outputs)
        late = f"the function took longer to load than {timeout:g} s"
        answer = await self._ask(told, FunctionLoaded, timeout=timeout, late=late)
        if answer.failure:
            self.kill()
            raise ManifestError(
                f"the function cannot be loaded: {answer.failure.strip()}",
                where="spec.tasks",
                hint="Its module lies beside the manifest or is installed; `def function(rows, config)`",
            )
        self.is_async = answer.is_async

    async def call(self, rows: list[TaskRow], config: Mapping[str, Any], *, timeout: float) -> list[Result]:
        """Return the outcome of each row.

        Raises DeadlineExceeded, PeerLost where the process has ended. After either it has been killed.
        """
        late = f"the function took longer than {timeout:g} s"
        answer = await self._ask(FunctionCall(rows, dict(config)), FunctionReturned, timeout=timeout, late=late)
        try:
            return unpacked(answer.rows, self._outputs, rows=len(rows))
        except ValueError as error:
            self.kill()
            raise PeerLost(f"the process of the function broke the protocol: {error}") from error

    def kill(self) -> None:
        """End the process, if it still runs."""
        self.usable = False
        if self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        """End the process, and wait until it has ended. Raises DeadlineExceeded."""
        self.kill()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"process {self.pid}, killed, did not end within {_END_S:g} s") from error

    async def _ask(self, told: msgspec.Struct, kind: type[Said], *, timeout: float, late: str) -> Said:
        written, read = self._process.stdin, self._process.stdout
        assert written is not None
        assert read is not None
        try:
            async with asyncio.timeout(timeout):
                written.write(await asyncio.to_thread(frame, told))
                await written.drain()
                (length,) = LENGTH.unpack(await read.readexactly(LENGTH.size))
                return msgspec.msgpack.decode(await read.readexactly(length), type=kind)
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


def frame(message: msgspec.Struct) -> bytes:
    """Return the frame of a message; of the arrays of rows their dtypes and bytes."""
    body = msgspec.msgpack.encode(message, enc_hook=lambda array: (array.dtype.str, array.tobytes()))
    return LENGTH.pack(len(body)) + body


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Be the process: load the function, then answer calls until the pipe ends."""
    told = _read(questions, FunctionLoad)
    if told is None:
        return
    die_with_parent(told.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    try:
        called = load_function(told.function, workdir=Path(told.workdir))
    except Exception:  # noqa: BLE001  somebody else's module: the parent reports it
        _write(answers, FunctionLoaded(failure=_raised().said))
        return
    _write(answers, FunctionLoaded(is_async=inspect.iscoroutinefunction(called)))
    while (call := _read(questions, FunctionCall)) is not None:
        _write(answers, FunctionReturned(packed(_outcomes(called, call, told.outputs))))


def _outcomes(called: Callable[..., Any], call: FunctionCall, outputs: Sequence[OutputColumn]) -> list[Result]:
    try:
        return read_results(called(call.rows, call.config), outputs, rows=len(call.rows))
    except Exception:  # noqa: BLE001  somebody else's code: what it raises is the outcome
        return [_raised()] * len(call.rows)


def _raised() -> RowFailure:
    return RowFailure("raised", traceback.format_exc(limit=SHOWN))


def _read(pipe: BinaryIO, kind: type[Said]) -> Said | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(pipe.read(LENGTH.unpack(head)[0]), type=kind, dec_hook=_array)


def _write(pipe: BinaryIO, message: msgspec.Struct) -> None:
    pipe.write(frame(message))
    pipe.flush()


def _array(_: Any, said: Any) -> Any:
    dtype, data = said
    return np.frombuffer(data, dtype).copy()


def _main() -> None:
    """Serve over the pipes alone: what the function reads is nothing, what it prints goes to the log."""
    with os.fdopen(os.dup(0), "rb") as questions, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        serve(questions, answers)


if __name__ == "__main__":
    _main()
