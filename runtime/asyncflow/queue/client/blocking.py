"""What talks to the queue from threads: the verbs of ``QueueClient``, each of which blocks until it is done.

A ``BlockingQueue`` may be used by any number of threads at once, and by a process that was forked: a call takes a lane
(connections of its own) that nobody uses, or makes one, and leaves it for the next call.

Invariants: no thread waits for another; no event loop is needed; a process that was forked puts, writes and claims
under names of its own.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from asyncflow.errors import PeerLost
from asyncflow.net.keys import Keys
from asyncflow.queue.client.lane import Lane
from asyncflow.queue.client.open_verbs import OpenVerbs
from asyncflow.queue.client.verbs import Peer, Verb

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(verb: Callable[Concatenate[OpenVerbs, P], Verb[T]]) -> Callable[Concatenate[BlockingQueue, P], T]:
    @wraps(verb)
    def run(queue: BlockingQueue, /, *args: P.args, **options: P.kwargs) -> T:
        return queue.run(verb(queue.verbs, *args, **options))

    return run


_living: weakref.WeakSet[BlockingQueue] = weakref.WeakSet()


def _begin_anew() -> None:
    for queue in _living:
        queue.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


class BlockingQueue:
    """One process's client; see ``QueueClient`` for the arguments. Its functions may be called from any thread.

    renamed: called in a process that was forked; returns the name of the ``worker`` there.
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
        renamed: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.verbs = OpenVerbs(units=units, worker=worker, attempt=attempt)
        self._renamed = renamed
        self._controller = controller if callable(controller) else lambda: controller
        self._unit = unit
        self._shard = shard
        self._keys = keys
        self._idle: list[Lane] = []
        self._closed = False
        _living.add(self)

    def begin_anew(self) -> None:
        """Take connections and names of its own, in a process that was forked."""
        self._idle = []
        self.verbs = OpenVerbs(units=self.verbs.units, worker=self._renamed(), attempt=self.verbs.attempt)

    def close(self) -> None:
        """Close all connections: of calls under way when they are done. Later calls raise PeerLost."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def run(self, verb: Verb[T]) -> T:
        """Do what a verb of ``verbs`` says; give its result."""
        if self._closed:
            raise PeerLost("this client was closed", where="queue client")
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = Lane(resolve=self._resolve, keys=self._keys)
        try:
            return lane.run(verb)
        finally:
            self._leave(lane)

    def _leave(self, lane: Lane) -> None:
        if self._closed:
            lane.close()
        else:
            self._idle.append(lane)

    def _resolve(self, peer: Peer) -> str | None:
        if peer is None:
            return self._controller()
        return self._unit(peer) if peer >= 0 else self._shard(-peer)

    put = _blocking(OpenVerbs.put)
    create = _blocking(OpenVerbs.create)
    claim = _blocking(OpenVerbs.claim)
    withdraw = _blocking(OpenVerbs.withdraw)
    claim_or_end = _blocking(OpenVerbs.claim_or_end)
    claim_lot = _blocking(OpenVerbs.claim_lot)
    acknowledge = _blocking(OpenVerbs.acknowledge)
    fetch = _blocking(OpenVerbs.fetch)
    complete = _blocking(OpenVerbs.complete)
    give_back = _blocking(OpenVerbs.give_back)
    drop = _blocking(OpenVerbs.drop)
    renew = _blocking(OpenVerbs.renew)
    declare = _blocking(OpenVerbs.declare)
    open_step = _blocking(OpenVerbs.open_step)
    begin = _blocking(OpenVerbs.begin)
    slot = _blocking(OpenVerbs.slot)
    step_done = _blocking(OpenVerbs.step_done)
    commit = _blocking(OpenVerbs.commit)
    sync = _blocking(OpenVerbs.sync)
    wanted = _blocking(OpenVerbs.wanted)
    expire = _blocking(OpenVerbs.expire)
    stats = _blocking(OpenVerbs.stats)
    units_there = _blocking(OpenVerbs.units_there)
    drain_unit = _blocking(OpenVerbs.drain_unit)
    take_over = _blocking(OpenVerbs.take_over)
    snapshot = _blocking(OpenVerbs.snapshot)
    audit = _blocking(OpenVerbs.audit)
    clear_partition = _blocking(OpenVerbs.clear_partition)
    close_partition = _blocking(OpenVerbs.close_partition)
    write = _blocking(OpenVerbs.write)
    tag = _blocking(OpenVerbs.tag)
    put_keyed = _blocking(OpenVerbs.put_keyed)
    list_rows = _blocking(OpenVerbs.list_rows)
    list_all = _blocking(OpenVerbs.list_all)
    find = _blocking(OpenVerbs.find)
    rows_of = _blocking(OpenVerbs.rows_of)
    peek = _blocking(OpenVerbs.peek)
    reset = _blocking(OpenVerbs.reset)
    expect = _blocking(OpenVerbs.expect)
    produced = _blocking(OpenVerbs.produced)
    consumed = _blocking(OpenVerbs.consumed)
    clear_rows = _blocking(OpenVerbs.clear_rows)
    partitions = _blocking(OpenVerbs.partitions)
    show = _blocking(OpenVerbs.show)
