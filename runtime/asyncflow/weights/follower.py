"""Following a job, or a publisher, from outside: a member that receives every new version and has no other part.

    async with follow("tcp://...", tls=folder) as versions:
        async for version, tensors in versions:
            ...  # tensors: by name, read-only: load them here

Versions come in the order in which they were published, the newest each time: one that was not taken before the next
had come is left out. A trainer that is started again publishes again from its checkpoint on, as a newer attempt.

Invariant: the job waits for no follower and pulls from none. What a follower is given was checked against the digests
of the trainer. One of a fleet that is staggered is given a version, but for its first one, only in its turn, which ends
when it asks for the next one, or is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final, Self

from asyncflow.api.load import load_sync
from asyncflow.api.names import FLEET, FOLLOWER
from asyncflow.api.weights import WeightSync
from asyncflow.errors import DeadlineExceeded
from asyncflow.identity import Version
from asyncflow.rpc.access import worker_name
from asyncflow.rpc.membership import Directives, Member, Membership, Scalar, Status
from asyncflow.rpc.tls import Credentials
from asyncflow.weights.holder import node_name
from asyncflow.weights.permits import SwapPermits
from asyncflow.weights.probe import split_probe
from asyncflow.weights.receiver import Layout, WeightReceiver, whole
from asyncflow.weights.slices import AnyArray
from asyncflow.weights.transfer import TransferRecord
from asyncflow.weights.transport import Transport, open_transport

JOIN_S: Final = 60.0
"""Seconds for which a driver that does not answer is waited for."""
_PLACES: Final = 1 << 29
"""Followers take a place at random, so that any number of them need not know each other."""
_WATCH_S: Final = 3600.0


class Follower:
    """A follower of the driver, or of the publisher, at ``driver``; an asynchronous iterator of versions and tensors.

    transport: made for this follower alone; http: where it serves metrics, "" where it serves none; node: where it
    runs, "" if unknown; status: what heartbeats report, by default what the receiver does; layout: what is needed of
    each tensor; on_transfer: called with the record of every finished transfer; sync: the WeightSync of the fleet that
    this one belongs to, None for none. receiver: that which holds the versions. permits: by which this one changes
    weights as one of the fleet, None where it does so when it can.
    """

    def __init__(
        self,
        *,
        driver: str,
        transport: Transport,
        credentials: Credentials | None = None,
        node: str = "",
        http: str = "",
        status: Callable[[], Status] | None = None,
        layout: Layout = whole,
        on_transfer: Callable[[TransferRecord], None] | None = None,
        sync: WeightSync | None = None,
    ) -> None:
        place = secrets.randbelow(_PLACES)
        self.worker = worker_name(FOLLOWER, place, uuid.uuid4().hex)
        info: dict[str, Scalar] = {FLEET: sync.metadata.name} if sync is not None else {}
        member = Member(role=FOLLOWER, index=place, incarnation=self.worker, http=http, info=info)
        self._credentials = credentials
        self._job = None if credentials is None else credentials.process.job
        self._stopped = False
        self._membership = Membership(
            driver=driver, member=member, credentials=credentials, status=status or self._status
        )
        self._membership.on_directives.append(self._obey)
        self.receiver = WeightReceiver(
            membership=self._membership,
            worker=self.worker,
            transport=transport,
            node=node,
            layout=layout,
            on_transfer=on_transfer,
        )
        self.permits: SwapPermits | None = None
        if sync is not None and sync.spec.update == "staggered":
            self.permits = SwapPermits(
                membership=self._membership,
                worker=self.worker,
                fleet=sync.metadata.name,
                stagger=sync.spec.stagger,
            )
        self._in_turn = False

    async def start(self, *, within_s: float) -> None:
        """Join the job and begin to receive. Raises DeadlineExceeded where its driver does not answer."""
        try:
            await self._membership.join(within_s)
            await self.receiver.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave. Tensors that were given stay valid for as long as they are referenced."""
        await self.receiver.close()
        await self._membership.close()

    @property
    def ended(self) -> bool:
        """True once the driver has said that the job ends, or that another process has this place, or ``replaced``."""
        return self._stopped or self.replaced

    @property
    def replaced(self) -> bool:
        """True once the certificate here is one of another job: that which has taken the place of the one followed."""
        return self._credentials is not None and self._credentials.process.job != self._job

    async def newer(self) -> Version | None:
        """Wait until a version is here that is newer than the one taken last; None where the job ends instead."""
        while (staged := self.receiver.staged) is None and not self.ended:
            with contextlib.suppress(DeadlineExceeded):
                await self.receiver.wait_for(self._changed, what="a version to follow", timeout=_WATCH_S)
        return None if self.replaced else staged

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Version, Mapping[str, AnyArray]]:
        if self.permits is not None and self._in_turn:
            await self.permits.give_back()
            self._in_turn = False
        version, loaded = await self.newer(), self.receiver.current
        if version is None:
            raise StopAsyncIteration
        if self.permits is not None and loaded is not None:
            await self.permits.take(loaded)
            self._in_turn = True
        newest = self.receiver.staged or version
        taken, tensors = self.receiver.take(newest.step)
        return taken, split_probe(tensors)[0]

    def _status(self) -> Status:
        return {**self.receiver.status(), "waits_permit": self.permits is not None and self.permits.waiting}

    def _changed(self) -> bool:
        return self.receiver.staged is not None or self.ended

    def _obey(self, directives: Directives) -> None:
        if directives.stop:
            self._stopped = True
            self.receiver.notify()


@contextlib.asynccontextmanager
async def follow(
    driver: str,
    *,
    tls: Path | str | None = None,
    transport: str = "host",
    host: str = "127.0.0.1",
    layout: Layout = whole,
    sync: Path | str | None = None,
    join_s: float = JOIN_S,
) -> AsyncIterator[Follower]:
    """Follow the job whose driver, or the publisher that, is at the address ``driver``: iterate over what this yields.

    tls: folder with a certificate of its role ``follower``, as ``ASYNCFLOW_TLS`` names one; host: the address at which
    this process is reached by other followers; transport: that of the job's ``spec.weightSync``;
    layout: which box of each tensor is needed (name, shape), all of it by default; sync: file of a WeightSync for
    followers, with whose fleet this one changes weights: where that is staggered, a version comes when it is this one's
    turn to load it, and the turn lasts until the next one is asked for. Tensors are read-only numpy arrays, bfloat16 as
    its bits in uint16; those of a job with LoRA are its adapters.

    The event loop must stay free: load what is given in a thread. A process that does not run for some seconds counts
    as lost, and joins again by itself. Raises ManifestError for a certificate or a file that cannot be used,
    DeadlineExceeded where the driver does not answer within ``join_s`` seconds, Refused where it lets no follower in;
    the loop raises an error of ``layout``, ValueError where a box does not lie inside its tensor.
    """
    fleet = None if sync is None else load_sync(sync)
    credentials = Credentials.of_environment() if tls is None else Credentials(Path(tls))
    opened = open_transport(transport, name=FOLLOWER, bind=f"tcp://{host}:*", credentials=credentials)
    follower = Follower(
        driver=driver, transport=opened, credentials=credentials, node=node_name(), layout=layout, sync=fleet
    )
    await follower.start(within_s=join_s)
    try:
        yield follower
    finally:
        await follower.close()
