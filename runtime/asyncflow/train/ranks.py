"""The gang of one trainer: R processes that hold the same weights and act in lockstep.

All that ranks say to one another beside gradients is one operation, ``gather``: every rank gives an array, and every
rank gets all of them. Sums, agreement on where to resume, errors that all ranks raise (``jointly``) and the meeting of
torch's process group are made of it. One rank alone needs no socket; several meet at the RpcServer of rank 0, whom they
find in the directory.

Invariants: round n of attempt a pairs the n-th ``gather`` of every rank of attempt a and nothing else: an array for
another round, of another attempt, shape or dtype is refused, and a repeated one gets the same answer again. Rank 0's
table alone decides whether a round came about: once one rank leaves, a round that lacks an array lacks it for all. So
all ranks end after the same round, and none enters torch's collectives without the others. Checkpoints, which are
written beside the training and after a rank has left too, have rounds of their own (``beside``), with negative numbers.
A rank waits for the others as long as rank 0 gets on (a disk may be slow).
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
from asyncflow.net.keys import Keys
from asyncflow.net.retry import retry
from asyncflow.net.rpc import RpcClient, RpcServer

log = logging.getLogger(__name__)

_KEEP_ROUNDS = 2
_LEAVE_S = 2.0
_TELL_S = 10.0
_TELL_LEAVING_S = 0.5
_ANSWER_S = 3 * _TELL_S
_LEAST_S = 1.0


class Left(Exception):
    """This rank, or another of its gang, was told to leave: there are no more rounds."""


async def unless_leaving(work: Coroutine[Any, Any, None], leaving: asyncio.Event, *, moment_s: float = 2.0) -> None:
    """Await ``work``; once ``leaving`` is set, only for ``moment_s`` seconds longer (then Left)."""
    told = asyncio.create_task(leaving.wait())
    trying = asyncio.create_task(work)
    try:
        await asyncio.wait([told, trying], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([trying], timeout=moment_s)
        if not trying.done():
            raise Left
        trying.result()
    finally:
        told.cancel()
        trying.cancel()


class Group(Protocol):
    """The gang as one rank sees it; ``rank`` counts from 0 to ``world`` - 1."""

    rank: int
    world: int

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:
        """Return every rank's ``array`` (same shape and dtype everywhere) as [world, ...]; ``what`` is for the errors.

        Blocks: call it from the compute thread, never from the event loop. Raises DeadlineExceeded when a rank is
        missing for too long, Left when one leaves before all have given theirs.
        """
        ...

    def leave(self) -> None:
        """Begin no more rounds, and let the other ranks know; called from the event loop, any number of times."""
        ...

    async def left(self) -> bool:
        """Return whether a rank has left, and there are no more rounds; for a rank that waits for something else."""
        ...

    def beside(self) -> Group:
        """Return the same ranks with rounds of their own, for another thread; leaving does not end these."""
        ...

    def hurry(self, *, patience_s: float) -> None:
        """Wait only ``patience_s`` for the slowest rank from now on; for ranks that ``beside`` returned."""
        ...

    async def close(self) -> None:
        """Hang up, when the other ranks have been told or cannot be reached."""
        ...


def gather_bytes(group: Group, content: bytes, *, what: str) -> list[bytes]:
    """Return every rank's ``content``, of any length, in the order of ranks."""
    lengths = group.gather(np.array([len(content)]), what=f"the size of {what}")[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = group.gather(padded, what=what)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


@contextlib.contextmanager
def jointly(group: Group, *, what: str) -> Iterator[None]:
    """Raise on every rank the AsyncFlowError of any rank in this block: that of the lowest rank that has one.

    All ranks enter the block at the same point; collectives do not belong into it.
    """
    found: AsyncFlowError | None = None
    try:
        yield
    except AsyncFlowError as error:
        found = error
    told = gather_bytes(group, msgspec.json.encode(found.to_wire()) if found else b"", what=f"the outcome of {what}")
    for rank, content in enumerate(told):
        if content and rank == group.rank and found is not None:
            raise found
        if content:
            raise from_wire(msgspec.json.decode(content, type=dict[str, str]))


class Alone:
    """A gang of one."""

    rank = 0
    world = 1

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:  # noqa: ARG002
        """Return ``array`` as [1, ...]."""
        return array[None]

    def leave(self) -> None:
        """There is nobody to tell."""

    async def left(self) -> bool:
        """There is nobody else."""
        return False

    def beside(self) -> Alone:
        """Return this rank: its rounds need no order."""
        return self

    def hurry(self, *, patience_s: float) -> None:
        """There is nobody to wait for."""

    async def close(self) -> None:
        """There is nobody to hang up on."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's array for one round; the bytes are the only frame."""

    attempt: int
    round: int
    rank: int
    dtype: str
    shape: list[int]


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``Share``: one frame for each rank, in the order of ranks; none where the round is not complete.

    left: a rank has left, so it never will be; progress: else, how far rank 0 has come with what it is doing.
    """

    round: int
    left: bool = False
    progress: int | None = None


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """A rank gives no more arrays."""

    attempt: int
    rank: int


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a rank has left."""

    attempt: int


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an ``Ask``."""

    left: bool


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``Leave``."""


class GatherService:
    """Rank 0's table of rounds; call ``attach`` before the server starts.

    progress: gives a number that changes while rank 0 gets on with what takes long, asked in a thread; tell_s: how
    often a rank that waits is told of it.
    """

    def __init__(
        self, *, attempt: int, world: int, progress: Callable[[], int] = lambda: 0, tell_s: float = _TELL_S
    ) -> None:
        self._attempt = attempt
        self._world = world
        self._progress = progress
        self._tell_s = tell_s
        self._left = False
        self._rounds: dict[int, dict[int, tuple[Share, bytes]]] = {}
        self._changed = asyncio.Condition()

    def attach(self, server: RpcServer) -> None:
        """Answer ``trainer.gather``, ``trainer.leave`` and ``trainer.left`` there."""
        server.route("trainer.gather", Share, self._on_share)
        server.route("trainer.leave", Leave, self._on_leave)
        server.route("trainer.left", Ask, self._on_ask)

    async def _on_share(self, share: Share, frames: Sequence[memoryview]) -> tuple[Shares, Sequence[bytes]]:
        self._check(share.attempt)
        if len(frames) != 1 or not 0 <= share.rank < self._world:
            raise ProtocolError(
                f"{share} came with {len(frames)} frames in a world of {self._world}", where="trainer.gather"
            )
        arrays = self._rounds.setdefault(share.round, {})
        for other, _ in arrays.values():
            if (other.dtype, other.shape) != (share.dtype, share.shape):
                raise ProtocolError(f"{share} does not fit {other}", where="trainer.gather")
        beside, leaving = share.round < 0, self._left
        if beside or not leaving:
            arrays[share.rank] = (share, bytes(frames[0]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._tell_s, _TELL_LEAVING_S) if leaving else self._tell_s), self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(
                    lambda: len(arrays) == self._world or (self._left and not (beside and leaving))
                )
        if len(arrays) < self._world:
            left = self._left and not beside
            progress = None if left else await asyncio.to_thread(self._progress)
            return Shares(round=share.round, left=left, progress=progress), []
        self._rounds.pop(share.round + _KEEP_ROUNDS * (1 if beside else -1), None)
        return Shares(round=share.round), [arrays[rank][1] for rank in range(self._world)]

    async def _on_leave(self, leave: Leave, _frames: Sequence[memoryview]) -> Gone:
        self._check(leave.attempt)
        async with self._changed:
            self._left = True
            self._changed.notify_all()
        return Gone()

    async def _on_ask(self, ask: Ask, _frames: Sequence[memoryview]) -> Asked:
        self._check(ask.attempt)
        return Asked(left=self._left)

    def _check(self, attempt: int) -> None:
        if attempt != self._attempt:
            raise Fenced(f"attempt {attempt} of the trainer met attempt {self._attempt}", where="trainer.gather")


class HostGroup:
    """A gang of several processes that meet at rank 0 over the host network.

    leader: gives the address of rank 0 *of this attempt*, or None while it is not known; loop: the event loop that runs
    the calls, while ``gather`` blocks the compute thread; patience_s: how long a gather waits for the slowest rank
    while rank 0 does not get on.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        attempt: int,
        leader: Callable[[], str | None],
        loop: asyncio.AbstractEventLoop,
        keys: Keys | None = None,
        patience_s: float = 600.0,
    ) -> None:
        self.rank = rank
        self.world = world
        self._attempt = attempt
        self._client = RpcClient(name=f"trainer-{rank}", resolve=leader, keys=keys)
        self._loop = loop
        self._patience_s = patience_s
        self._round = 0
        self._onwards = 1
        self._leaving: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:
        """Return every rank's ``array`` as [world, ...], from the compute thread."""
        array = np.ascontiguousarray(array)
        self._round += self._onwards
        share = Share(
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
        """Notify rank 0 that this rank leaves; a round still unanswered after two seconds, as rank 0 is gone, ends."""
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._say_leave(), name="leaving the gang")
            if self._limit is not None:
                self._limit.reschedule(self._loop.time() + _LEAVE_S)

    async def left(self) -> bool:
        """Return whether rank 0 knows of a rank that has left; False where it does not answer."""
        try:
            return (await self._client.call("trainer.left", Ask(attempt=self._attempt), Asked, timeout=_LEAVE_S)).left
        except (DeadlineExceeded, PeerLost):
            return False

    def beside(self) -> HostGroup:
        """Return the same ranks, who count rounds from -1 downwards and use this connection; ``left`` says nothing."""
        ranks = copy(self)
        ranks._round, ranks._onwards = 0, -1  # noqa: SLF001  it is one of its kind
        return ranks

    def hurry(self, *, patience_s: float) -> None:
        """See ``Group``; a round under way is waited for anew. Called from the event loop."""
        if patience_s < self._patience_s:
            self._patience_s = patience_s
            if self._limit is not None:
                self._limit.reschedule(self._loop.time())

    async def close(self) -> None:
        """Hang up, when rank 0 has heard of a ``leave``."""
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        await self._client.close()

    async def _say_leave(self) -> None:
        leave = Leave(attempt=self._attempt, rank=self.rank)
        try:
            await self._client.call("trainer.leave", leave, Gone, timeout=_LEAVE_S)
        except AsyncFlowError as error:
            log.info("rank 0 was not told that rank %d leaves: %s", self.rank, error)

    async def _call(self, share: Share, content: bytes, what: str) -> list[memoryview]:
        whole = f"gathering {what} of {self.world} ranks"
        while share.round < 0:
            try:
                async with asyncio.timeout(None) as self._limit:
                    return (await self._gathered(share, content, whole))[1]
            except TimeoutError:
                log.info("%s: this rank leaves, and waits %g s", whole, self._patience_s)
            finally:
                self._limit = None
        if self._leaving is not None:
            raise Left
        try:
            async with asyncio.timeout(None) as self._limit:
                shares, frames = await self._gathered(share, content, whole)
        except TimeoutError:
            raise Left from None
        finally:
            self._limit = None
        if shares.left:
            log.info("a rank of the gang leaves: %s will not be gathered", what)
            raise Left
        return frames

    async def _gathered(self, share: Share, content: bytes, what: str) -> tuple[Shares, list[memoryview]]:
        """Call until the round is complete or never will be; the patience begins anew whenever rank 0 has got on."""

        async def attempt() -> tuple[Shares, list[memoryview]]:
            return await self._client.call_frames("trainer.gather", share, Shares, timeout=_ANSWER_S, frames=[content])

        seen: int | None = None
        until = self._loop.time() + self._patience_s
        while True:
            shares, frames = await retry(attempt, what=what, timeout=max(_LEAST_S, until - self._loop.time()))
            if frames or shares.left:
                return shares, frames
            if shares.progress != seen:
                seen, until = shares.progress, self._loop.time() + self._patience_s
            elif self._loop.time() > until:
                raise DeadlineExceeded(
                    f"{what}: a rank is missing, and rank 0 has not got on for {self._patience_s:g} s",
                    where="trainer",
                    hint="The logs of the trainer's ranks say which",
                )
