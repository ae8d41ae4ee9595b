"""Follower of a job, or of a publisher: a member outside the job that receives every new version.

    async with follow("tcp://...", tls=folder) as versions:
        async for version, tensors in versions:
            ...  # tensors: by name, read-only: load them here

Versions arrive in the order of their publication, always the newest one: a version that was not taken before the next
one arrived is skipped. A restarted trainer publishes again from its checkpoint on, as a newer attempt.

Invariants: the job neither waits for a follower nor pulls from one. Every version was checked against the digests of
the trainer. In a staggered fleet a follower gets a version, except its first one, only in its turn. The turn ends when
it requests the next version, or leaves.
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
"""Seconds to wait for a driver that does not reply."""
_PLACES: Final = 1 << 29
"""Number of indices from which a follower draws one at random, so that followers need not know each other."""
_WATCH_S: Final = 3600.0


class Follower:
    """A follower of the driver or publisher at ``driver``; an asynchronous iterator of versions and tensors.

    transport: owned by this follower; http: address of its metrics, "" for none; node: its node, "" if unknown.
    status: returns the report for heartbeats, by default the receiver's; layout: the needed box of each tensor.
    on_transfer: called with the record of every finished transfer; sync: the WeightSync of its fleet, None for none.
    receiver: holds the versions; permits: permits of its fleet, None if it changes weights without permits.
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
        index = secrets.randbelow(_PLACES)
        self.worker = worker_name(FOLLOWER, index, uuid.uuid4().hex)
        info: dict[str, Scalar] = {FLEET: sync.metadata.name} if sync is not None else {}
        member = Member(role=FOLLOWER, index=index, incarnation=self.worker, http=http, info=info)
        self._credentials = credentials
        self._job = None if credentials is None else credentials.process.job
        self._stopped = False
        self._membership = Membership(
            driver=driver, member=member, credentials=credentials, status=status or self._status
        )
        self._membership.on_directives.append(self._on_directives)
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
        """Join the job and start to receive. Raises DeadlineExceeded if the driver does not reply."""
        try:
            await self._membership.join(within_s)
            await self.receiver.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave. Tensors already returned stay valid as long as they are referenced."""
        await self.receiver.close()
        await self._membership.close()

    @property
    def ended(self) -> bool:
        """True once the driver has reported the end of the job or another process with this index, or ``replaced``."""
        return self._stopped or self.replaced

    @property
    def replaced(self) -> bool:
        """True once the certificate here belongs to another job, which has replaced the followed one."""
        return self._credentials is not None and self._credentials.process.job != self._job

    async def newer(self) -> Version | None:
        """Wait for a version newer than the one taken last. Return None if the job ends instead."""
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

    def _on_directives(self, directives: Directives) -> None:
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
    """Follow the job or the publisher whose address is ``driver``; yields a ``Follower`` to iterate over.

    tls: folder with a certificate of its role ``follower``, default ``ASYNCFLOW_TLS``; host: the address at which other
    followers reach this process; transport: the one of the job's ``spec.weightSync``.
    layout: the needed box of each tensor (name, shape), all of it by default.
    sync: file of a WeightSync for followers, whose fleet this follower joins. If it is staggered, a version is returned
    when it is this follower's turn to load it, and the turn lasts until it requests the next version.
    Tensors are read-only numpy arrays, bfloat16 as its bits in uint16. For a job with LoRA they are its adapters.

    The event loop must stay free: load tensors in a thread. A process that does not run for some seconds is considered
    lost, and joins again automatically. Raises ManifestError for an unusable certificate or file, DeadlineExceeded if
    the driver does not reply within ``join_s`` seconds, Refused if it accepts no followers. The iteration raises errors
    of ``layout``, and ValueError if a box does not lie inside its tensor.
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
