"""What all roles use to talk to the queue from an event loop. ``blocking`` has the same verbs for threads.

Every verb has a deadline and survives the restart of whomever it talks to; ``verbs_rows`` and ``verbs_control`` say
what each does.

Invariant: a client gives up its leases as soon as nobody waits for them: a claim that is cancelled says so.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.queue.client.connections import Connections
from asyncflow.queue.client.open_verbs import OpenVerbs
from asyncflow.queue.client.placement import Taking
from asyncflow.queue.client.verbs import Verb

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    verb: Callable[Concatenate[OpenVerbs, P], Verb[T]],
) -> Callable[Concatenate[QueueClient, P], Coroutine[Any, Any, T]]:
    @wraps(verb)
    async def run(client: QueueClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await client.run(verb(client.verbs, *args, **options))

    return run


class QueueClient:
    """One process's client.

    controller: the controller's address, or a function that gives it; unit: gives the address of the unit with an
    index; units: the indices of the units that are there; worker: who holds the leases (its incarnation); attempt: of
    the role, which creations carry (see ``take_over``); keys: the job's key; shard: gives the address of a further
    controller, where there are several. Timeouts are in seconds and for the whole of a method; DeadlineExceeded where
    they were not enough.
    """

    def __init__(
        self,
        *,
        controller: str | Callable[[], str | None],
        unit: Callable[[int], str | None],
        units: Callable[[], Sequence[int]],
        worker: str,
        attempt: int = 0,
        keys: Keys | None = None,
        shard: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.verbs = OpenVerbs(units=units, worker=worker, attempt=attempt)
        self._connections = Connections(controller=controller, unit=unit, shard=shard, keys=keys)

    @classmethod
    def of(cls, membership: Membership, *, keys: Keys | None = None) -> QueueClient:
        """Make the client of a member of the job, which finds controller and units by its directory."""
        return cls(
            controller=lambda: membership.address("controller"),
            unit=lambda index: membership.address("storage", index),
            units=Taking(membership),
            worker=membership.member.incarnation,
            attempt=membership.member.attempt,
            keys=keys,
            shard=lambda index: membership.address("controller", index),
        )

    @property
    def worker(self) -> str:
        """Who holds the leases."""
        return self.verbs.worker

    @property
    def attempt(self) -> int:
        """The role's attempt."""
        return self.verbs.attempt

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()

    async def run(self, verb: Verb[T]) -> T:
        """Do what a verb of ``verbs`` says; give its result."""
        return await self._connections.run(verb)

    put = _awaited(OpenVerbs.put)
    create = _awaited(OpenVerbs.create)
    claim = _awaited(OpenVerbs.claim)
    withdraw = _awaited(OpenVerbs.withdraw)
    claim_or_end = _awaited(OpenVerbs.claim_or_end)
    claim_lot = _awaited(OpenVerbs.claim_lot)
    acknowledge = _awaited(OpenVerbs.acknowledge)
    fetch = _awaited(OpenVerbs.fetch)
    complete = _awaited(OpenVerbs.complete)
    give_back = _awaited(OpenVerbs.give_back)
    drop = _awaited(OpenVerbs.drop)
    renew = _awaited(OpenVerbs.renew)
    declare = _awaited(OpenVerbs.declare)
    open_step = _awaited(OpenVerbs.open_step)
    begin = _awaited(OpenVerbs.begin)
    slot = _awaited(OpenVerbs.slot)
    step_done = _awaited(OpenVerbs.step_done)
    commit = _awaited(OpenVerbs.commit)
    sync = _awaited(OpenVerbs.sync)
    wanted = _awaited(OpenVerbs.wanted)
    expire = _awaited(OpenVerbs.expire)
    stats = _awaited(OpenVerbs.stats)
    units_there = _awaited(OpenVerbs.units_there)
    drain_unit = _awaited(OpenVerbs.drain_unit)
    take_over = _awaited(OpenVerbs.take_over)
    snapshot = _awaited(OpenVerbs.snapshot)
    audit = _awaited(OpenVerbs.audit)
    clear_partition = _awaited(OpenVerbs.clear_partition)
    close_partition = _awaited(OpenVerbs.close_partition)
    write = _awaited(OpenVerbs.write)
    tag = _awaited(OpenVerbs.tag)
    put_keyed = _awaited(OpenVerbs.put_keyed)
    list_rows = _awaited(OpenVerbs.list_rows)
    list_all = _awaited(OpenVerbs.list_all)
    find = _awaited(OpenVerbs.find)
    rows_of = _awaited(OpenVerbs.rows_of)
    peek = _awaited(OpenVerbs.peek)
    reset = _awaited(OpenVerbs.reset)
    expect = _awaited(OpenVerbs.expect)
    produced = _awaited(OpenVerbs.produced)
    consumed = _awaited(OpenVerbs.consumed)
    clear_rows = _awaited(OpenVerbs.clear_rows)
    partitions = _awaited(OpenVerbs.partitions)
    show = _awaited(OpenVerbs.show)
