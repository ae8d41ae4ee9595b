"""Rewards from a process beside this one, over a Unix socket: on Kubernetes, from a container without any Secret.

A client is used as the pools of a job are. A connection begins with the server's word whether its functions are
loaded; then samples come, those of one prompt together where they are scored so, with a number, and their results go
back with it.

Invariants: samples are sent again once where their connection breaks, and have failed where that one breaks too; a
server that says nothing while samples are open is given up after a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from asyncflow.api.names import REWARD_SOCKET_ENV
from asyncflow.api.rewards import RewardSpec
from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.wire import LENGTH, MAX_FRAME, Example, RewardResult, frame
from asyncflow.telemetry.logs import setup_logging

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_RETRY_S: Final = 0.2
_OWNER_ONLY: Final = 0o600
_TRIES: Final = 2
_SILENT_TURNS: Final = 4
"""At least one call is over in the time that it may take, unless all processes are new; one may be made again."""


class Rewards(Protocol):
    """Scorer of samples: pools here, or a client of those beside this process."""

    @property
    def by_group(self) -> bool:
        """True where all samples of a prompt have to be scored together; known once started."""
        ...

    async def start(self) -> None:
        """Get ready. Raises ManifestError where a function cannot be loaded, DeadlineExceeded, PeerLost."""

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Score samples, all those of a prompt where ``by_group``; never raises for what the functions do."""
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
        return WeightedRewards.of(spec, workdir=workdir, run=run)
    return RewardClient(
        Path(path), start_timeout_s=within_s, silence_s=silence_of(spec, timeout_s=spec.timeout_seconds)
    )


def silence_of(spec: RewardSpec, *, timeout_s: float) -> float:
    """Return how many seconds a server may say nothing whose calls take at most ``timeout_s``."""
    return _SILENT_TURNS * timeout_s + spec.start_seconds


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a connection.

    failure: why there is no function to score with, "" where there is; by_group: as ``Rewards`` says it.
    """

    failure: str = ""
    by_group: bool = False


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Samples to score."""

    number: int
    examples: list[Example]


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Their results, in order."""

    number: int
    results: list[RewardResult]


class RewardServer:
    """Serves ``rewards`` at ``path``, to processes of this user."""

    def __init__(self, rewards: Rewards, *, path: Path) -> None:
        self._rewards = rewards
        self._path = path
        self._greeting = Greeting()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the functions, then listen. One that cannot be loaded is reported to every client."""
        try:
            await self._rewards.start()
            self._greeting = Greeting(by_group=self._rewards.by_group)
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
        """Hang up, and end what scores."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)
        await self._rewards.close()

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
        results = await self._rewards.score(asked.examples)
        writer.write(frame(ScoreReply(number=asked.number, results=results)))


class RewardClient:
    """Scores at a server, as ``WeightedRewards`` does here.

    path: the server's socket; start_timeout_s: how long the server may take until it listens; silence_s: how long it
    may say nothing while samples are open.
    """

    def __init__(self, path: Path, *, start_timeout_s: float, silence_s: float) -> None:
        self._path = path
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._by_group = False
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    @property
    def by_group(self) -> bool:
        """True where the server says so; known once started."""
        return self._by_group

    async def start(self) -> None:
        """Connect. Raises ManifestError where the server cannot load its functions, DeadlineExceeded, PeerLost."""
        await self._connected()

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Score samples; never raises for what the functions or the server do."""
        why = ""
        for _ in range(_TRIES):
            try:
                return await (await self._connected()).ask(examples)
            except ValueError as error:
                return [RewardResult(value=0.0, failure="raised", detail=str(error))] * len(examples)
            except (PeerLost, DeadlineExceeded, ManifestError) as error:
                why = str(error)
        return [RewardResult(value=0.0, failure="died", detail=why)] * len(examples)

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
            self._by_group = greeting.by_group
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
        self._open: dict[int, asyncio.Future[list[RewardResult]]] = {}
        self._heard = 0.0
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Score examples. Raises PeerLost, ValueError where they cannot be sent."""
        number = next(self._numbers)
        message = frame(ScoreRequest(number=number, examples=list(examples)))
        if not self._open:
            self._heard = time.monotonic()
        answer: asyncio.Future[list[RewardResult]] = asyncio.get_running_loop().create_future()
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
                    answer.set_result(told.results)
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


def serve(scorers: Mapping[Path, Rewards]) -> None:
    """Have each of ``scorers`` score at the Unix socket that is its key, until SIGTERM or SIGINT."""
    setup_logging("rewards", 0)
    asyncio.run(_serve([RewardServer(rewards, path=path) for path, rewards in scorers.items()]))


async def _serve(servers: Sequence[RewardServer]) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_callback(server.close)
            await server.start()
        await stopping.wait()
