"""A process in which a plain function of a task is called, and the parent's end of it.

The two talk over a pipe that only they hold, in pickles; nothing comes from a socket.

Invariant: the process ends with its parent (PR_SET_PDEATHSIG), also while the function runs.
"""

from __future__ import annotations

import inspect
import os
import signal
import traceback
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost
from asyncflow.process import die_with_parent
from asyncflow.tasks.loading import SHOWN, load_function
from asyncflow.tasks.rows import RowFailure, TaskRow

_END_S = 5.0
"""Seconds that the kernel may take to end what was killed."""


class FunctionProcess:
    """The parent's end. ``load`` and ``call`` block, and are called one after another."""

    def __init__(self, function: str, *, workdir: Path) -> None:
        self.is_async = False
        self.usable = True
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, function, str(workdir), os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    def load(self, timeout: float) -> None:
        """Wait until the function is loaded. Raises ManifestError where it cannot be, and what ``call`` raises."""
        answer = self._receive(timeout, what="the function took longer to load than")
        if isinstance(answer, RowFailure):
            self.kill()
            raise ManifestError(
                f"the function cannot be loaded: {answer.detail.strip()}",
                where="spec.tasks",
                hint="Its module lies beside the manifest or is installed; `def function(rows, config)`",
            )
        self.is_async = bool(answer)

    def call(self, rows: list[TaskRow], config: Mapping[str, Any], timeout: float) -> object:
        """Return what the function returned, or a RowFailure where it raised.

        Raises DeadlineExceeded, PeerLost where the process has ended. After either it has been killed.
        """
        try:
            self._pipe.send((rows, dict(config)))
        except (OSError, ValueError) as error:
            self.kill()
            raise PeerLost(f"the process of the function has ended: {error}") from error
        return self._receive(timeout, what="the function took longer than")

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        self.usable = False
        if self._process.is_alive():
            self._process.kill()
        self._process.join(timeout=_END_S)

    def _receive(self, timeout: float, *, what: str) -> object:
        try:
            if self._pipe.poll(timeout):
                return self._pipe.recv()
            self.kill()
            raise DeadlineExceeded(f"{what} {timeout:g} s")
        except (EOFError, OSError) as error:
            self.kill()
            how = f"exit status {self._process.exitcode}"
            raise PeerLost(f"the process of the function has ended ({how})") from error


def serve(pipe: Connection, function: str, workdir: str, parent: int) -> None:
    """Be the process: load the function, then answer calls until the pipe ends."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    try:
        called = load_function(function, workdir=Path(workdir))
    except Exception:  # noqa: BLE001  somebody else's module: the parent reports it
        pipe.send(RowFailure("raised", traceback.format_exc(limit=SHOWN)))
        return
    pipe.send(inspect.iscoroutinefunction(called))
    while True:
        try:
            rows, config = pipe.recv()
        except EOFError:
            return
        try:
            answer: object = called(rows, config)
        except Exception:  # noqa: BLE001  somebody else's code: what it raises is the outcome
            answer = RowFailure("raised", traceback.format_exc(limit=SHOWN))
        try:
            pipe.send(answer)
        except Exception:  # noqa: BLE001  what it returned cannot be sent, whatever pickle raises for it
            pipe.send(RowFailure("invalid", traceback.format_exc(limit=SHOWN)))
