"""The parent's end of one reward process: start it, ask it, kill it.

Invariant: a question has an answer within its deadline or the process is killed with its process group, so that an
answer never belongs to an earlier question.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost
from asyncflow.rewards.wire import LENGTH, MAX_FRAME, Example, Ready, Scored, frame

T = TypeVar("T", bound=msgspec.Struct)


class RewardProcess:
    """One child, with its function loaded."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, *, function: str, extractor: str, workdir: Path, timeout: float) -> RewardProcess:
        """Start a child and wait until it has loaded ``function``.

        timeout: seconds. Raises ManifestError where the function cannot be loaded, DeadlineExceeded, PeerLost.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncflow.rewards.child", function, extractor, str(workdir), str(os.getpid())),
            stdin=PIPE,
            stdout=PIPE,
            cwd=workdir,
            process_group=0,
        )
        child = cls(process)
        try:
            ready = await child._answer(Ready, timeout=timeout, what=f"the reward {function!r} to load")
        except BaseException:
            await child.kill()
            raise
        if ready.error:
            await child.kill()
            raise ManifestError(
                f"{function!r} cannot be loaded: {ready.error}", where="reward.function", hint="see the log of the role"
            )
        return child

    async def score(self, example: Example, *, timeout: float) -> Scored:
        """Have one example scored. After any exception but ValueError the child must be killed.

        Raises ValueError where the example is too large or is no JSON (nothing was sent), DeadlineExceeded after
        ``timeout`` seconds, PeerLost where the process died.
        """
        writer = self._process.stdin
        assert writer is not None
        writer.write(frame(example))
        return await self._answer(Scored, timeout=timeout, what="a reward")

    async def kill(self) -> None:
        """End the process and what it started in its process group, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()

    async def _answer(self, kind: type[T], *, timeout: float, what: str) -> T:
        reader = self._process.stdout
        assert reader is not None
        try:
            async with asyncio.timeout(timeout):
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MAX_FRAME:
                    raise PeerLost(f"a reward process announced {length} bytes")
                return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} did not come in {timeout:g} s", where=f"pid {self.pid}") from error
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerLost(f"the reward process died while it worked: {error}", where=f"pid {self.pid}") from error
