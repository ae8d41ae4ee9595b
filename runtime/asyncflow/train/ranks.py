"""The gang of one trainer: R processes that hold the same weights and act in lockstep.

All that ranks say to one another beside gradients is one operation, ``gather``: every rank gives an array, and every
rank gets all of them. Sums, agreement on where to resume and the meeting of torch's process group are made of it. One
rank alone needs no socket; several meet at the RpcServer of rank 0, whom they find in the directory.

Invariant: round n of attempt a pairs the n-th ``gather`` of every rank of attempt a and nothing else: an array for
another round, of another attempt, shape or dtype is refused, and a repeated one gets the same answer again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import Fenced, ProtocolError, Refused
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient, RpcServer, persist

_KEEP_ROUNDS = 2


class Group(Protocol):
    """The gang as one rank sees it; ``rank`` counts from 0 to ``world`` - 1."""

    rank: int
    world: int

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:
        """Give every rank's ``array`` (same shape and dtype everywhere) as [world, ...]; ``what`` is for the errors.

        Blocks: call it from the compute thread, never from the event loop. Raises DeadlineExceeded when a rank is
        missing for too long, Refused once this rank has abandoned the gang.
        """
        ...

    def abandon(self) -> None:
        """Wait for the other ranks no longer, now and from now on; called from the event loop."""
        ...


class Alone:
    """A gang of one."""

    rank = 0
    world = 1

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:  # noqa: ARG002
        """Give ``array`` as [1, ...]."""
        return array[None]

    def abandon(self) -> None:
        """There is nobody to wait for."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's array for one round; the bytes are the only frame."""

    attempt: int
    round: int
    rank: int
    dtype: str
    shape: list[int]


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``Share``: one frame for each rank, in the order of ranks."""

    round: int


class GatherService:
    """Rank 0's table of rounds; call ``attach`` before the server starts."""

    def __init__(self, *, attempt: int, world: int) -> None:
        self._attempt = attempt
        self._world = world
        self._rounds: dict[int, dict[int, tuple[Share, bytes]]] = {}
        self._changed = asyncio.Condition()

    def attach(self, server: RpcServer) -> None:
        """Answer ``trainer.gather`` there."""
        server.route("trainer.gather", Share, self._on_share)

    async def _on_share(self, share: Share, frames: Sequence[memoryview]) -> tuple[Shares, Sequence[bytes]]:
        if share.attempt != self._attempt:
            raise Fenced(f"attempt {share.attempt} of the trainer met attempt {self._attempt}", where="trainer.gather")
        if len(frames) != 1 or not 0 <= share.rank < self._world:
            raise ProtocolError(
                f"{share} came with {len(frames)} frames in a world of {self._world}", where="trainer.gather"
            )
        arrays = self._rounds.setdefault(share.round, {})
        for other, _ in arrays.values():
            if (other.dtype, other.shape) != (share.dtype, share.shape):
                raise ProtocolError(f"{share} does not fit {other}", where="trainer.gather")
        arrays[share.rank] = (share, bytes(frames[0]))
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(arrays) == self._world)
        self._rounds.pop(share.round - _KEEP_ROUNDS, None)
        return Shares(round=share.round), [arrays[rank][1] for rank in range(self._world)]


class HostGroup:
    """A gang of several processes that meet at rank 0 over the host network.

    leader: gives the address of rank 0 *of this attempt*, or None while it is not known; loop: the event loop that runs
    the calls, while ``gather`` blocks the compute thread; patience_s: how long a gather waits for the slowest rank.
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
        self._abandoned = False
        self._waiting: Future[list[memoryview]] | None = None

    def gather(self, array: NDArray[Any], *, what: str) -> NDArray[Any]:
        """Give every rank's ``array`` as [world, ...], from the compute thread."""
        array = np.ascontiguousarray(array)
        self._round += 1
        share = Share(
            attempt=self._attempt,
            round=self._round,
            rank=self.rank,
            dtype=array.dtype.str,
            shape=list(array.shape),
        )
        call = self._call(share, array.tobytes(), what)
        self._waiting = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            frames = self._waiting.result()
        except CancelledError:
            raise Refused(f"rank {self.rank} leaves: it does not wait for {what}", where="trainer.gather") from None
        if len(frames) != self.world or any(len(frame) != array.nbytes for frame in frames):
            raise ProtocolError(f"{len(frames)} arrays came from a world of {self.world}", where="trainer.gather")
        return np.stack([np.frombuffer(frame, array.dtype).reshape(array.shape) for frame in frames])

    def abandon(self) -> None:
        """Make the gather that is waiting, and all later ones, raise Refused."""
        self._abandoned = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _call(self, share: Share, content: bytes, what: str) -> list[memoryview]:
        if self._abandoned:
            raise Refused(f"rank {self.rank} has left the gang", where="trainer.gather")

        async def attempt() -> list[memoryview]:
            _, frames = await self._client.call_frames(
                "trainer.gather", share, Shares, timeout=self._patience_s, frames=[content]
            )
            return frames

        return await persist(attempt, what=f"gathering {what} of {self.world} ranks", timeout=self._patience_s)

    async def close(self) -> None:
        """Hang up."""
        await self._client.close()
