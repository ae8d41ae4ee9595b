"""The gang of one trainer: R processes that hold the same weights and act in lockstep.

Apart from gradients, ranks communicate by one operation, ``gather``: every rank contributes an array and receives the
arrays of all ranks. Sums, agreement on the step to resume at, joint errors (``jointly``) and the rendezvous of torch's
process group are built on it. A single rank needs no socket; several ranks meet at the RpcServer of rank 0, whose
address is in the directory.

Invariants: round n of attempt a combines exactly the n-th ``gather`` of every rank of attempt a. An array of another
round, attempt, shape or dtype is refused, and a repeated call gets the same answer. Rank 0's table alone decides
whether a round is complete: after one rank has left, an incomplete round stays incomplete for all ranks. So all ranks
end after the same round, and no rank enters torch's collectives without the others. Checkpoints are written in the
background of training, even after a rank has left, so they use separate rounds (``background``), numbered below 0. A
rank waits for the others as long as rank 0 makes progress (a disk may be slow).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from copy import copy
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, PeerLost, ProtocolError, from_wire
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import retry
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

_KEEP_ROUNDS = 2
_LEAVE_S = 2.0
_PROGRESS_S = 10.0
_PROGRESS_LEAVING_S = 0.5
_ANSWER_S = 3 * _PROGRESS_S
_LEAST_S = 1.0


class GroupLeft(Exception):
    """This rank, or another of its gang, was asked to leave: there are no more rounds."""


async def unless_leaving(work: Coroutine[Any, Any, None], leaving: asyncio.Event, *, grace_s: float = 2.0) -> None:
    """Await ``work``; once ``leaving`` is set, only for ``grace_s`` more seconds, then raise GroupLeft."""
    leaves = asyncio.create_task(leaving.wait())
    trying = asyncio.create_task(work)
    try:
        await asyncio.wait([leaves, trying], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([trying], timeout=grace_s)
        if not trying.done():
            raise GroupLeft
        trying.result()
    finally:
        leaves.cancel()
        trying.cancel()


class ProcessGroup(Protocol):
    """The gang as one rank sees it; ``rank`` counts from 0 to ``world`` - 1."""

    rank: int
    world: int

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:
        """Return the ``array`` of all ranks (of the same shape and dtype) as [world, ...]; what: for error messages.

        Blocks: call it from the compute thread, never from the event loop. Raises DeadlineExceeded if a rank is missing
        for too long, GroupLeft if a rank leaves before all have contributed.
        """
        ...

    def leave(self) -> None:
        """Start no more rounds, and notify the other ranks; called from the event loop, any number of times."""
        ...

    async def left(self) -> bool:
        """Return whether a rank has left, so that there are no more rounds; for ranks that wait for something else."""
        ...

    def background(self) -> ProcessGroup:
        """Return the same ranks with separate rounds, for another thread; leaving does not end these rounds."""
        ...

    def limit_patience(self, *, patience_s: float) -> None:
        """From now on wait only ``patience_s`` for the slowest rank; for the result of ``background``."""
        ...

    async def close(self) -> None:
        """Close the connection after the other ranks have been notified or cannot be reached."""
        ...


def gather_bytes(group: ProcessGroup, content: bytes, *, what: str) -> list[bytes]:
    """Return the ``content`` of all ranks, which may differ in length, in the order of ranks."""
    lengths = group.gather(np.array([len(content)]), what=f"the size of {what}")[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = group.gather(padded, what=what)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def gather_rows(group: ProcessGroup, table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the concatenated rows of the ``table`` of all ranks, [m, columns]; m may differ between ranks."""
    parts = gather_bytes(group, np.ascontiguousarray(table).tobytes(), what="rows of a step")
    return np.concatenate([np.frombuffer(part, np.float64) for part in parts]).reshape(-1, table.shape[1])


@contextlib.contextmanager
def jointly(group: ProcessGroup, *, what: str) -> Iterator[None]:
    """Raise on every rank the AsyncFlowError of any rank in this block; if there are several, the lowest rank's.

    All ranks enter the block at the same point. The block must not contain collectives.
    """
    found: AsyncFlowError | None = None
    try:
        yield
    except AsyncFlowError as error:
        found = error
    outcome = msgspec.json.encode(found.to_wire()) if found else b""
    for rank, content in enumerate(gather_bytes(group, outcome, what=f"the outcome of {what}")):
        if content and rank == group.rank and found is not None:
            raise found
        if content:
            raise from_wire(msgspec.json.decode(content, type=dict[str, str]))


class SingleProcess:
    """A gang of one."""

    rank = 0
    world = 1

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:  # noqa: ARG002
        """Return ``array`` as [1, ...]."""
        return array[None]

    def leave(self) -> None:
        """Do nothing: there is no other rank."""

    async def left(self) -> bool:
        """Return False: there is no other rank."""
        return False

    def background(self) -> SingleProcess:
        """Return this group: with one rank the order of rounds does not matter."""
        return self

    def limit_patience(self, *, patience_s: float) -> None:
        """Do nothing: there is no rank to wait for."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""


class GatherCall(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's array for one round; the bytes are the only frame."""

    attempt: int
    round: int
    rank: int
    dtype: str
    shape: list[int]


class GatherReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``GatherCall``: one frame for each rank, in the order of ranks; none if the round is incomplete.

    left: whether a rank has left, so that the round stays incomplete; progress, missing: otherwise, rank 0's progress
    and the ranks that have not contributed yet.
    """

    round: int
    left: bool = False
    progress: int | None = None
    missing: list[int] = []


class LeaveGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Notice that a rank contributes no more arrays."""

    attempt: int
    rank: int


class LeftQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query whether a rank has left."""

    attempt: int


class LeftReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``LeftQuery``."""

    left: bool


class LeaveReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``LeaveGroup``."""


class GatherService:
    """Rank 0's table of rounds; call ``attach`` before the server starts.

    progress: returns a number that changes while rank 0 makes progress in a long operation, called in a thread;
    progress_s: interval at which waiting ranks receive it.
    """

    def __init__(
        self, *, attempt: int, world: int, progress: Callable[[], int] = lambda: 0, progress_s: float = _PROGRESS_S
    ) -> None:
        self._attempt = attempt
        self._world = world
        self._progress = progress
        self._progress_s = progress_s
        self._left = False
        self._rounds: dict[int, dict[int, tuple[GatherCall, bytes]]] = {}
        self._changed = asyncio.Condition()

    def attach(self, server: RpcServer) -> None:
        """Register ``trainer.gather``, ``trainer.leave`` and ``trainer.left`` with ``server``."""
        server.route("trainer.gather", GatherCall, self._on_gather)
        server.route("trainer.leave", LeaveGroup, self._on_leave)
        server.route("trainer.left", LeftQuery, self._on_left)

    async def _on_gather(self, share: GatherCall, frames: Sequence[memoryview]) -> tuple[GatherReply, Sequence[bytes]]:
        self._check(share.attempt)
        if len(frames) != 1 or not 0 <= share.rank < self._world:
            raise ProtocolError(
                f"{share} came with {len(frames)} frames in a world of {self._world}", where="trainer.gather"
            )
        arrays = self._rounds.setdefault(share.round, {})
        for other, _ in arrays.values():
            if (other.dtype, other.shape) != (share.dtype, share.shape):
                raise ProtocolError(f"{share} does not fit {other}", where="trainer.gather")
        background, leaving = share.round < 0, self._left
        if background or not leaving:
            arrays[share.rank] = (share, bytes(frames[0]))
        with contextlib.suppress(TimeoutError):
            timeout_s = min(self._progress_s, _PROGRESS_LEAVING_S) if leaving else self._progress_s
            async with asyncio.timeout(timeout_s), self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(
                    lambda: len(arrays) == self._world or (self._left and not (background and leaving))
                )
        if len(arrays) < self._world:
            left = self._left and not background
            progress = None if left else await asyncio.to_thread(self._progress)
            missing = [rank for rank in range(self._world) if rank not in arrays]
            return GatherReply(round=share.round, left=left, progress=progress, missing=missing), []
        over = share.round + _KEEP_ROUNDS * (1 if background else -1)
        if (over < 0) == background:
            self._rounds.pop(over, None)
        return GatherReply(round=share.round), [arrays[rank][1] for rank in range(self._world)]

    async def _on_leave(self, leave: LeaveGroup, _frames: Sequence[memoryview]) -> LeaveReply:
        self._check(leave.attempt)
        async with self._changed:
            self._left = True
            self._changed.notify_all()
        return LeaveReply()

    async def _on_left(self, query: LeftQuery, _frames: Sequence[memoryview]) -> LeftReply:
        self._check(query.attempt)
        return LeftReply(left=self._left)

    def _check(self, attempt: int) -> None:
        if attempt != self._attempt:
            raise Fenced(f"attempt {attempt} of the trainer met attempt {self._attempt}", where="trainer.gather")


class HostProcessGroup:
    """A gang of several processes that meet at rank 0 over the host network.

    leader: returns the address of rank 0 *of this attempt*, or None while it is unknown; loop: the event loop that runs
    the calls while ``gather`` blocks the compute thread; patience_s: time that a gather waits for the slowest rank
    while rank 0 makes no progress.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        attempt: int,
        leader: Callable[[], str | None],
        loop: asyncio.AbstractEventLoop,
        credentials: Credentials | None = None,
        patience_s: float = 600.0,
    ) -> None:
        self.rank = rank
        self.world = world
        self._attempt = attempt
        self._client = RpcClient(name=f"trainer-{rank}", resolve=leader, credentials=credentials, expects=("trainer",))
        self._loop = loop
        self._patience_s = patience_s
        self._round = 0
        self._direction = 1
        self._leaving: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:
        """Return the ``array`` of all ranks as [world, ...]; called from the compute thread."""
        array = np.ascontiguousarray(array)
        self._round += self._direction
        share = GatherCall(
            attempt=self._attempt,
            round=self._round,
            rank=self.rank,
            dtype=array.dtype.str,
            shape=list(array.shape),
        )
        frames = asyncio.run_coroutine_threadsafe(self._call(share, array.tobytes(), what), self._loop).result()
        if len(frames) != self.world or any(len(frame) != array.nbytes for frame in frames):
            raise ProtocolError(f"{len(frames)} arrays came from a world of {self.world}", where="trainer.gather")
        return np.stack([np.frombuffer(frame, array.dtype).reshape(array.shape) for frame in frames])

    def leave(self) -> None:
        """Notify rank 0 that this rank leaves; a round that rank 0 does not answer within two seconds ends."""
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._notify_leave(), name="leaving the gang")
            if self._limit is not None:
                self._limit.reschedule(self._loop.time() + _LEAVE_S)

    async def left(self) -> bool:
        """Return whether rank 0 knows of a rank that has left; False if it does not answer."""
        try:
            return (
                await self._client.call("trainer.left", LeftQuery(attempt=self._attempt), LeftReply, timeout=_LEAVE_S)
            ).left
        except (DeadlineExceeded, PeerLost):
            return False

    def background(self) -> HostProcessGroup:
        """Return the same ranks with rounds from -1 downwards over this connection; do not use ``left`` there."""
        ranks = copy(self)
        ranks._round, ranks._direction = 0, -1  # noqa: SLF001  an object of the same class
        return ranks

    def limit_patience(self, *, patience_s: float) -> None:
        """See ``ProcessGroup``; the wait for the current round restarts. Called from the event loop."""
        if patience_s < self._patience_s:
            self._patience_s = patience_s
            if self._limit is not None:
                self._limit.reschedule(self._loop.time())

    async def close(self) -> None:
        """Close the connection, after rank 0 has received a ``leave`` or cannot be reached."""
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        await self._client.close()

    async def _notify_leave(self) -> None:
        leave = LeaveGroup(attempt=self._attempt, rank=self.rank)
        try:
            await self._client.call("trainer.leave", leave, LeaveReply, timeout=_LEAVE_S)
        except AsyncFlowError as error:
            log.info("rank 0 was not notified that rank %d leaves: %s", self.rank, error)

    async def _call(self, share: GatherCall, content: bytes, what: str) -> list[memoryview]:
        whole = f"gathering {what} of {self.world} ranks"
        while share.round < 0:
            try:
                async with asyncio.timeout(None) as self._limit:
                    return (await self._gathered(share, content, whole))[1]
            except TimeoutError:
                log.info("%s: this rank leaves and waits for %g s", whole, self._patience_s)
            finally:
                self._limit = None
        if self._leaving is not None:
            raise GroupLeft
        try:
            async with asyncio.timeout(None) as self._limit:
                shares, frames = await self._gathered(share, content, whole)
        except TimeoutError:
            raise GroupLeft from None
        finally:
            self._limit = None
        if shares.left:
            log.info("a rank of the gang leaves, so %s will not be gathered", what)
            raise GroupLeft
        return frames

    async def _gathered(self, share: GatherCall, content: bytes, what: str) -> tuple[GatherReply, list[memoryview]]:
        """Call until the round is complete or cannot be; the patience restarts whenever rank 0 has made progress."""

        async def attempt() -> tuple[GatherReply, list[memoryview]]:
            return await self._client.call_frames(
                "trainer.gather", share, GatherReply, timeout=_ANSWER_S, frames=[content]
            )

        seen, missing, failure = None, list[int](), None
        until = self._loop.time() + self._patience_s
        while not missing or self._loop.time() <= until:
            try:
                shares, frames = await retry(attempt, what=what, timeout=max(_LEAST_S, until - self._loop.time()))
            except DeadlineExceeded as error:
                if not missing:
                    raise
                failure = error
                break
            if frames or shares.left:
                return shares, frames
            missing = shares.missing
            if shares.progress != seen:
                seen, until = shares.progress, self._loop.time() + self._patience_s
        raise DeadlineExceeded(
            f"{what}: nothing came from rank {', '.join(map(str, missing))} for {self._patience_s:g} s, and rank 0 has "
            "made no progress",
            where="trainer",
            hint="The rank hangs, or its process or machine is stopped: see its log",
        ) from failure
