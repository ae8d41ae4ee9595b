"""Cells in Mooncake Store.

Its calls block, so they run in a few threads of their own, each with a registered buffer; no call waits for room or for
a lease, which is what the unit's event loop does.

Invariants: the keys of a unit begin with its owner, index and incarnation, and no other living process writes or
removes them; a unit first removes what earlier incarnations of it have left.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from asyncflow.errors import PeerLost
from asyncflow.net.batches import batches
from asyncflow.queue.backends.base import Site
from asyncflow.queue.backends.packed import PackedBackend
from asyncflow.queue.backends.store import Fill, Outcome, Store, Take, answer_of
from asyncflow.stores.mooncake import BUFFER_BYTES, MOST_KEYS, NO_ANSWER, NO_ROOM, NOT_THERE, Mooncake
from asyncflow.stores.programs import LEASE_MS, find_mooncake_master

log = logging.getLogger(__name__)

T = TypeVar("T")
_THREADS = 4


class MooncakeBackend(PackedBackend):
    """Samples as values in Mooncake Store."""

    @classmethod
    def check(cls, *, servers: bool) -> None:  # noqa: ARG003
        """See that Mooncake is installed, whose package has client and master."""
        find_mooncake_master()

    @classmethod
    def made(cls, site: Site) -> Self:
        """Make one that finds the master by the role of that name."""
        client = Mooncake(host=site.host, master=functools.partial(_master, site))
        stale = f"^{re.escape(site.place)}(?!{site.incarnation}-)"
        return cls(MooncakeStore(client, stale=stale), prefix=site.prefix, lasting=site.lasting)


def _master(site: Site) -> str | None:
    address = site.find("master", 0)
    return address.removeprefix("tcp://") if address is not None else None


class MooncakeStore(Store):
    """Calls of ``client`` in threads. stale: a regular expression of the keys that other incarnations have left."""

    most_keys = MOST_KEYS
    most_bytes = BUFFER_BYTES

    def __init__(self, client: Mooncake, *, stale: str) -> None:
        self._client = client
        self._stale = stale
        self._sweeping: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mooncake")

    async def open(self) -> None:
        """Wait for the master, and remove what is left; once more when leases on it have ended."""
        await answer_of(self._sweep)
        self._sweeping = asyncio.create_task(self._sweep_later())

    async def write(self, keys: Sequence[str], sizes: Sequence[int], fill: Fill) -> Sequence[Outcome]:
        """Put them."""
        codes = await self._run(lambda: self._client.put(keys, sizes, fill))
        return _outcomes(codes, keys)

    async def read(self, keys: Sequence[str], sizes: Sequence[int], take: Take) -> Sequence[Outcome]:
        """Get them."""
        codes = await self._run(lambda: self._client.get(keys, sizes, take))
        return _outcomes(codes, keys)

    async def gone(self, unmoved: Sequence[str], others: Sequence[str]) -> list[str]:
        """Ask the master where they lie, which it believes for a while of a holder that is dead."""
        lies: dict[str, str] = {}
        for part in batches([*unmoved, *others], MOST_KEYS):
            told = await self._run(lambda part=part: self._client.holders(part))  # type: ignore[misc]
            lies |= dict(zip(part, told or (), strict=False))
        dead = {"", *(lies.get(key, "") for key in unmoved)}
        return [key for key in others if lies.get(key, "?") in dead]

    async def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """Remove them, which the store refuses while somebody reads them."""
        codes = await self._run(lambda: self._client.remove(keys))
        return [Outcome.HELD if outcome is Outcome.FAILED else outcome for outcome in _outcomes(codes, keys)]

    async def close(self) -> None:
        """Close the client; calls that hang are left to their threads."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._client.close)

    async def _sweep(self) -> int | None:
        removed = await self._run(lambda: self._client.remove_matching(self._stale))
        if removed:
            log.info("%d values of an earlier incarnation were removed", removed)
        return removed

    async def _sweep_later(self) -> None:
        await asyncio.sleep(1.5 * LEASE_MS / 1000)
        await answer_of(self._sweep)

    async def _run(self, call: Callable[[], T]) -> T | None:
        """Run ``call`` in a thread; None where the store does not answer."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except PeerLost as lost:
            log.info("Mooncake is away: %s", lost)
            return None


def _outcomes(codes: Sequence[int] | None, keys: Sequence[str]) -> list[Outcome]:
    return [Outcome.AWAY] * len(keys) if codes is None else [_outcome(code) for code in codes]


def _outcome(code: int) -> Outcome:
    """Say what a code of ``Mooncake`` means: 0 or a size where it went well."""
    if code >= 0:
        return Outcome.DONE
    if code in NO_ANSWER:
        return Outcome.AWAY
    return {NO_ROOM: Outcome.FULL, NOT_THERE: Outcome.LOST}.get(code, Outcome.FAILED)
