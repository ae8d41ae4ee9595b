"""Rewards from another process, over a Unix socket: on Kubernetes, from a container without any Secret.

The client has the same interface as the pools of a job. The server starts a connection with a greeting, which contains
whether its functions are loaded. The client then sends numbered requests with samples (all samples of one prompt, if
the function takes groups), and the server replies to each number with the results.

Invariants: samples are sent a second time if their connection breaks; if the second connection breaks, too, they fail.
The client gives up a server that does not reply for a bounded time while samples are open. All samples that wait for a
connection share one attempt and its failure. Invalid data from the server is a failure of the samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from asyncflow.api.names import REWARD_SOCKET_ENV
from asyncflow.api.rewards import RewardSpec
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, PeerLost
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.wire import LENGTH, MAX_FRAME, Example, RewardResult, frame
from asyncflow.telemetry.logs import setup_logging

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_RETRY_S: Final = 0.2
_OWNER_ONLY: Final = 0o600
_TRIES: Final = 2
_SILENT_TURNS: Final = 4
"""Deadlines of a call after which a silent server is given up: a call may be repeated, and may wait for another one."""


class Rewards(Protocol):
    """Scorer of samples: pools of this process, or a client of a server with such pools."""

    @property
    def by_group(self) -> bool:
        """True if all samples of a prompt must be scored together; known after the start."""
        ...

    async def start(self) -> None:
        """Start scoring. Raises ManifestError if a function cannot be loaded, DeadlineExceeded, PeerLost."""

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Score samples (all of one prompt if ``by_group``). Errors of the functions are returned as failures."""
        ...

    async def close(self) -> None:
        """Stop scoring; samples that are being scored fail as ``died``."""


def open_rewards(spec: RewardSpec, *, workdir: Path, run: Path | None = None, within_s: float) -> Rewards:
    """Return the scorer for a manifest: a client of the socket that the substrate names, otherwise local processes.

    workdir: the job's folder; run: the folder of the run, which is hidden from the function; within_s: seconds within
    which the server must listen.
    """
    path = os.environ.get(REWARD_SOCKET_ENV)
    if path is None:
        return WeightedRewards.of(spec, workdir=workdir, run=run)
    return RewardClient(
        Path(path), start_timeout_s=within_s, silence_s=silence_limit(spec, timeout_s=spec.timeout_seconds)
    )


def silence_limit(spec: RewardSpec, *, timeout_s: float) -> float:
    """Return the seconds for which a server may be silent if a call takes at most ``timeout_s``."""
    return _SILENT_TURNS * timeout_s + spec.start_seconds


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a connection.

    failure: the reason why the functions could not be loaded, "" if they were; by_group: see ``Rewards``.
    """

    failure: str = ""
    by_group: bool = False


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request with samples to score."""

    number: int
    examples: list[Example]


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply with the results of a request's samples, in order."""

    number: int
    results: list[RewardResult]


class RewardServer:
    """Server of ``rewards`` at the socket ``path``, for processes of the same user."""

    def __init__(self, rewards: Rewards, *, path: Path) -> None:
        self._rewards = rewards
        self._path = path
        self._greeting = Greeting()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the functions, then listen. The greeting reports a function that cannot be loaded to every client."""
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
        """Close all connections, and stop scoring."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)
        await self._rewards.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.TaskGroup() as scoring:
                writer.write(frame(self._greeting))
                while True:
                    request = await _read(reader, ScoreRequest)
                    scoring.create_task(self._score(request, writer))
        except* (asyncio.IncompleteReadError, ConnectionError):
            log.info("the client has closed its connection")
        except* (msgspec.DecodeError, PeerLost) as group:
            log.warning("closing the connection of a client that sent invalid data: %s", group.exceptions[0])
        finally:
            self._connections.discard(task)
            writer.close()

    async def _score(self, request: ScoreRequest, writer: asyncio.StreamWriter) -> None:
        results = await self._rewards.score(request.examples)
        try:
            reply = frame(ScoreReply(number=request.number, results=results))
        except ValueError as error:
            failed = RewardResult(value=0.0, failure="invalid", detail=f"the results of a call: {error}")
            reply = frame(ScoreReply(number=request.number, results=[failed] * len(results)))
        writer.write(reply)


class RewardClient:
    """Scorer that sends samples to a ``RewardServer``.

    path: the server's socket; start_timeout_s: seconds within which the server must listen; silence_s: seconds for
    which the server may be silent while samples are open.
    """

    def __init__(self, path: Path, *, start_timeout_s: float, silence_s: float) -> None:
        self._path = path
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._by_group = False
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._failure: AsyncFlowError | None = None

    @property
    def by_group(self) -> bool:
        """True if the server's functions take groups; known after the start."""
        return self._by_group

    async def start(self) -> None:
        """Connect. Raises ManifestError if the server cannot load its functions, DeadlineExceeded, PeerLost."""
        await self._connected()

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Score samples. Errors of the functions and of the server are returned as failures."""
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
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> _Connection:
        known = self._failure
        async with self._connecting:
            if self._connection is not None and not self._connection.over:
                return self._connection
            if self._failure is not None and self._failure is not known:
                raise self._failure
            try:
                self._connection = await self._connect()
            except AsyncFlowError as error:
                self._failure = error
                raise
            return self._connection

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                greeting, reader, writer = await self._greeted()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no reward server answered within {self._start_timeout_s:g} s",
                where=str(self._path),
                hint="See the log of the container rewards",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise PeerLost("the server closed the connection immediately", where=str(self._path)) from error
        except msgspec.DecodeError as error:
            raise PeerLost(f"the server sent an invalid greeting: {error}", where=str(self._path)) from error
        if greeting.failure:
            writer.close()
            raise ManifestError(greeting.failure)
        self._by_group = greeting.by_group
        return _Connection(reader, writer, silence_s=self._silence_s, where=str(self._path))

    async def _greeted(self) -> tuple[Greeting, asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect and read the server's greeting; if that fails, the connection is closed."""
        reader, writer = await self._dial()
        try:
            return await _read(reader, Greeting), reader, writer
        except BaseException:
            writer.close()
            raise

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(_RETRY_S)


class _Connection:
    """One connection to a server. over: whether it has ended."""

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
        self._last_reply = 0.0
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Score examples. Raises PeerLost, and ValueError if they cannot be sent."""
        number = next(self._numbers)
        message = frame(ScoreRequest(number=number, examples=list(examples)))
        if not self._open:
            self._last_reply = time.monotonic()
        answer: asyncio.Future[list[RewardResult]] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self._writer.write(message)
            while not answer.done():
                await asyncio.wait([answer], timeout=self._silence_s / 4)
                if not answer.done() and time.monotonic() - self._last_reply > self._silence_s:
                    self._end(f"the reward server has not replied for {self._silence_s:g} s")
            results = answer.result()
            if len(results) != len(examples) or not all(math.isfinite(result.value) for result in results):
                raise PeerLost("the reward server sent invalid results", where=self._where)
            return results
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """Close the connection; open requests fail."""
        self._end("the connection was closed")
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                reply = await _read(self._reader, ScoreReply)
                self._last_reply = time.monotonic()
                if (answer := self._open.get(reply.number)) is not None and not answer.done():
                    answer.set_result(reply.results)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._end("the reward server has closed the connection")
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
        raise PeerLost(f"the peer announced a frame of {length} bytes, more than {MAX_FRAME}")
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)


def serve(scorers: Mapping[Path, Rewards]) -> None:
    """Serve each of ``scorers`` at the Unix socket that is its key, until SIGTERM or SIGINT."""
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
