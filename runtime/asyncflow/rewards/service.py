"""Rewards from a process beside this one, over a Unix socket: on Kubernetes, from a container without any Secret.

The server runs a pool; a client is used as a pool is. A connection begins with the server's word whether its function
is loaded; then each example comes with a number, and each result goes back with the number of its example.

Invariants: a sample is sent again once where its connection breaks, and has failed where that one breaks too; a server
that says nothing while samples are open is given up after a bounded time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from asyncflow.api.learning import RewardSpec
from asyncflow.api.load import load_reward
from asyncflow.api.names import REWARD_SOCKET_ENV
from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost
from asyncflow.rewards.pool import RewardPool
from asyncflow.rewards.wire import LENGTH, MAX_FRAME, Example, RewardResult, frame
from asyncflow.telemetry.logs import setup_logging

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_RETRY_S: Final = 0.2
_OWNER_ONLY: Final = 0o600
_TRIES: Final = 2
_SILENT_TURNS: Final = 2
"""A pool answers at least one sample in the time that a sample may take, unless all its processes are new."""
_START_S: Final = 60.0


class Rewards(Protocol):
    """Scorer of samples: a pool here, or a client of one beside this process."""

    async def start(self) -> None:
        """Get ready. Raises ManifestError where the function cannot be loaded, DeadlineExceeded, PeerLost."""

    async def score(self, example: Example) -> RewardResult:
        """Score one sample; never raises for what the function does."""
        ...

    async def close(self) -> None:
        """End it; samples that are being scored fail as ``died``."""


def open_rewards(spec: RewardSpec, *, workdir: Path, run: Path | None = None, within_s: float) -> Rewards:
    """Return what scores for a manifest: at the socket that the substrate names, else in processes of this one.

    workdir: the job's folder; run: the run's own, which is hidden from the function; within_s: how long a process
    beside this one may take until it listens.
    """
    path = os.environ.get(REWARD_SOCKET_ENV)
    if path is None:
        return RewardPool.of(spec, workdir=workdir, run=run)
    silence_s = _SILENT_TURNS * spec.timeout_seconds + _START_S
    return RewardClient(Path(path), start_timeout_s=within_s, silence_s=silence_s)


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a connection. failure: why there is no function to score with, "" where there is."""

    failure: str = ""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An example to score."""

    number: int
    example: Example


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Its result."""

    number: int
    result: RewardResult


class RewardServer:
    """Serves ``pool`` at ``path``, to processes of this user."""

    def __init__(self, pool: RewardPool, *, path: Path) -> None:
        self._pool = pool
        self._path = path
        self._greeting = Greeting()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the function, then listen. A function that cannot be loaded is reported to every client."""
        try:
            await self._pool.start()
        except ManifestError as error:
            log.error("%s", error)
            self._greeting = Greeting(failure=str(error))
        self._path.unlink(missing_ok=True)
        before = os.umask(~_OWNER_ONLY & 0o777)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Hang up, and end the pool."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)
        await self._pool.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._connections.add(me)
        try:
            async with asyncio.TaskGroup() as scoring:
                writer.write(frame(self._greeting))
                while True:
                    asked = await _read(reader, ScoreRequest)
                    scoring.create_task(self._score(asked, writer))
        except* (asyncio.IncompleteReadError, ConnectionError):
            log.info("the rollout has hung up")
        except* (msgspec.DecodeError, PeerLost) as group:
            log.warning("hanging up on a client: %s", group.exceptions[0])
        finally:
            self._connections.discard(me)
            writer.close()

    async def _score(self, asked: ScoreRequest, writer: asyncio.StreamWriter) -> None:
        result = await self._pool.score(asked.example)
        writer.write(frame(ScoreReply(number=asked.number, result=result)))


class RewardClient:
    """Scores at a server, as ``RewardPool`` does here.

    path: the server's socket; start_timeout_s: how long the server may take until it listens; silence_s: how long it
    may say nothing while samples are open.
    """

    def __init__(self, path: Path, *, start_timeout_s: float, silence_s: float) -> None:
        self._path = path
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def start(self) -> None:
        """Connect. Raises ManifestError where the server cannot load its function, DeadlineExceeded, PeerLost."""
        await self._connected()

    async def score(self, example: Example) -> RewardResult:
        """Score one sample; never raises for what the function or the server does."""
        why = ""
        for _ in range(_TRIES):
            try:
                return await (await self._connected()).ask(example)
            except ValueError as error:
                return RewardResult(value=0.0, failure="raised", detail=str(error))
            except (PeerLost, DeadlineExceeded, ManifestError) as error:
                why = str(error)
        return RewardResult(value=0.0, failure="died", detail=why)

    async def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is not None and not self._connection.over:
                return self._connection
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    reader, writer = await self._dial()
                    greeting = await _read(reader, Greeting)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"nothing scores there after {self._start_timeout_s:g} s",
                    where=str(self._path),
                    hint="The log of the container `rewards` says why.",
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise PeerLost("it hung up at once", where=str(self._path)) from error
            if greeting.failure:
                writer.close()
                raise ManifestError(greeting.failure)
            self._connection = _Connection(reader, writer, silence_s=self._silence_s, where=str(self._path))
            return self._connection

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(_RETRY_S)


class _Connection:
    """One connection to a server. over: it can be asked no more."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silence_s: float, where: str
    ) -> None:
        self.over = False
        self._reader = reader
        self._writer = writer
        self._silence_s = silence_s
        self._where = where
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[RewardResult]] = {}
        self._heard = 0.0
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, example: Example) -> RewardResult:
        """Score an example. Raises PeerLost, ValueError where it cannot be sent."""
        number = next(self._numbers)
        message = frame(ScoreRequest(number=number, example=example))
        if not self._open:
            self._heard = time.monotonic()
        answer: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self._writer.write(message)
            while not answer.done():
                await asyncio.wait([answer], timeout=self._silence_s / 4)
                if not answer.done() and time.monotonic() - self._heard > self._silence_s:
                    self._end(f"the process that scores has said nothing for {self._silence_s:g} s")
            return answer.result()
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """Hang up; what is open fails."""
        self._end("the connection was closed")
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                told = await _read(self._reader, ScoreReply)
                self._heard = time.monotonic()
                if (answer := self._open.get(told.number)) is not None and not answer.done():
                    answer.set_result(told.result)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._end("the process that scores has hung up")
        except (msgspec.DecodeError, PeerLost) as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        self.over = True
        self._writer.close()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(PeerLost(why, where=self._where))


async def _read(reader: asyncio.StreamReader, kind: type[T]) -> T:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_FRAME:
        raise PeerLost(f"a frame of {length} bytes was announced")
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)


def serve(reward: Path, *, path: Path) -> None:
    """Score samples at the Unix socket ``path`` until SIGTERM or SIGINT: the process of ``asyncflow rewards``.

    reward: a file that holds the section ``spec.reward`` of a job. Raises ManifestError where it does not.
    """
    setup_logging("rewards", 0)
    asyncio.run(_serve(reward, path))


async def _serve(reward: Path, path: Path) -> None:
    server = RewardServer(RewardPool.of(load_reward(reward), workdir=reward.parent), path=path)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await server.start()
    try:
        await stopping.wait()
    finally:
        await server.close()
