"""Runs verbs in a thread that blocks: one link to each controller and unit, opened when first needed.

A verb is a strand; what it does together becomes strands of its own. A strand waits for an answer, for a moment (a
pause, or a peer without an address), or for its children; the lane sleeps in the links until one of them can go on.

Invariants: a lane runs one verb at a time; every strand of a verb has ended when ``run`` returns or raises; an answer
for which nobody waits any more is dropped.
"""

from __future__ import annotations

import itertools
import logging
import select
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.net import wire
from asyncflow.net.keys import Keys
from asyncflow.net.stream_link import LOOK_S, StreamLink
from asyncflow.queue.client.verbs import Ask, Effect, Pause, Together, Verb

log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_MESSAGE = 1 << 30


class _Strand:
    """A verb under way. ask: what it waits for, None in a pause; due: when its wait is over; link: once it was sent."""

    __slots__ = ("ask", "call", "children", "due", "left", "link", "parent", "place", "results", "verb")

    def __init__(self, verb: Verb[Any], *, call: int, parent: _Strand | None = None, place: int = 0) -> None:
        self.verb = verb
        self.call = call
        self.parent = parent
        self.place = place
        self.due = 0.0
        self.ask: Ask | None = None
        self.link: StreamLink | None = None
        self.children: list[_Strand] = []
        self.results: list[Any] = []
        self.left = 0


class Lane:
    """What one thread needs to run verbs. resolve: gives the address of a ``Peer`` now."""

    def __init__(self, *, resolve: Callable[[int | None], str | None], keys: Keys | None) -> None:
        self._resolve = resolve
        self._keys = keys
        self._links: dict[int | None, StreamLink] = {}
        self._calls = itertools.count()
        self._waiting: dict[int, _Strand] = {}
        self._farewell: Ask | None = None
        self._outcome: list[Any] = []

    def run(self, verb: Verb[T]) -> T:
        """Do what ``verb`` yields; give its result."""
        root = _Strand(verb, call=next(self._calls))
        self._outcome, self._farewell = [], None
        try:
            self._advance(root, None, None)
            while not self._outcome:
                self._wait()
        except BaseException as error:
            self._end(root)
            if not isinstance(error, Exception):
                self._say_farewell()
            raise
        result: T = self._outcome[0]
        return result

    def close(self) -> None:
        """Close all links."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _advance(self, strand: _Strand, answer: Any, error: AsyncFlowError | None) -> None:
        """Let ``strand`` go on until it waits for something or has ended."""
        waits = False
        while not waits:
            try:
                effect = strand.verb.send(answer) if error is None else strand.verb.throw(error)
            except StopIteration as ended:
                self._ended(strand, ended.value)
                return
            except AsyncFlowError as failed:
                self._failed(strand, failed)
                return
            answer, error = None, None
            try:
                waits = self._begin(strand, effect)
            except AsyncFlowError as failed:
                error = failed

    def _begin(self, strand: _Strand, effect: Effect) -> bool:
        """Begin what ``strand`` asks for, and say whether it must wait for it."""
        if isinstance(effect, Ask):
            strand.ask, strand.due = effect, time.monotonic() + effect.timeout
            self._send(strand)
            self._waiting[strand.call] = strand
        elif isinstance(effect, Pause):
            strand.ask, strand.due = None, time.monotonic() + effect.seconds
            self._waiting[strand.call] = strand
        elif isinstance(effect, Together):
            self._split(strand, effect)
        else:
            self._farewell = effect.ask
            return False
        return True

    def _split(self, strand: _Strand, effect: Together) -> None:
        strand.left, strand.results = len(effect.verbs), [None] * len(effect.verbs)
        strand.children = children = [
            _Strand(verb, call=next(self._calls), parent=strand, place=place) for place, verb in enumerate(effect.verbs)
        ]
        for child in children:
            if strand.children is children:  # else one has failed already, and they have ended
                self._advance(child, None, None)

    def _ended(self, strand: _Strand, result: Any) -> None:
        parent = strand.parent
        if parent is None:
            self._outcome.append(result)
            return
        parent.results[strand.place] = result
        parent.left -= 1
        if not parent.left:
            parent.children = []
            self._advance(parent, parent.results, None)

    def _failed(self, strand: _Strand, error: AsyncFlowError) -> None:
        parent = strand.parent
        if parent is None:
            raise error
        siblings, parent.children = parent.children, []
        for sibling in siblings:
            self._end(sibling)
        self._advance(parent, None, error)

    def _end(self, strand: _Strand) -> None:
        """End a strand and its children, wherever they are."""
        for child in strand.children:
            self._end(child)
        if self._waiting.pop(strand.call, None) is not None and strand.link is not None:
            strand.link.forget(strand.call)
        strand.verb.close()

    def _send(self, strand: _Strand) -> None:
        """Send what ``strand`` asks, under a new number; leave it without a link while the peer has no address."""
        ask = strand.ask
        assert ask is not None
        strand.call, strand.link = next(self._calls), None
        if (link := self._link(ask.unit)) is not None:
            try:
                link.send(strand.call, ask.method, ask.request, ask.frames, deadline=strand.due)
            except (PeerLost, DeadlineExceeded) as error:
                self._give_up(ask.unit, error)
                raise
            strand.link = link

    def _link(self, unit: int | None) -> StreamLink | None:
        """Give the link to the address that holds now."""
        address, link = self._resolve(unit), self._links.get(unit)
        if link is not None and link.address != address:
            self._give_up(unit, PeerLost(f"the peer moved to {address}", where=link.address))
            link = None
        if link is None and address is not None:
            link = self._links[unit] = StreamLink(address, keys=self._keys, max_message=_MAX_MESSAGE)
        return link

    def _give_up(self, unit: int | None, error: AsyncFlowError) -> None:
        """Use the link to a peer no more; whoever waits on it will find ``error`` there."""
        link = self._links.pop(unit, None)
        if link is not None:
            link.gone = error

    def _wait(self) -> None:
        """Sleep until something came or is due, and let those go on whom it concerns."""
        strands, now = list(self._waiting.values()), time.monotonic()
        links: dict[StreamLink, int | None] = {}
        sleep = LOOK_S
        for strand in strands:
            sleep = min(sleep, max(0.0, strand.due - now))
            if strand.link is not None and strand.ask is not None:
                links[strand.link] = strand.ask.unit
        if not links:
            time.sleep(sleep)
        elif len(links) > 1:
            _poll(links, sleep)
            sleep = 0.0
        came = 0
        for link, unit in links.items():
            try:
                if parts := link.receive(sleep):
                    came += 1
                    self._answer(link, parts)
            except (PeerLost, DeadlineExceeded) as error:
                if self._links.get(unit) is link:
                    del self._links[unit]
                self._lost(link, error)
        if came < len(strands) and not self._outcome:
            self._look(strands)

    def _answer(self, link: StreamLink, parts: Sequence[memoryview]) -> None:
        call, error = wire.read_answer(parts, where=link.address)
        strand = self._waiting.get(call)
        if strand is None or strand.link is not link or strand.ask is None:
            return
        answer = None
        if error is None:
            ask = strand.ask
            try:
                answer = wire.decoder_of(ask.reply).decode(parts[1]), parts[2:]
            except wire.MALFORMED as wrong:
                what = f"{ask.method}: the answer is no {ask.reply.__name__}: {wrong}"
                error = ProtocolError(what, where=link.address)
        self._wake(strand, answer, error)

    def _lost(self, link: StreamLink, error: AsyncFlowError) -> None:
        link.close()
        for strand in [strand for strand in self._waiting.values() if strand.link is link]:
            self._wake(strand, None, error)

    def _wake(self, strand: _Strand, answer: Any, error: AsyncFlowError | None) -> None:
        if self._waiting.pop(strand.call, None) is not None:
            strand.link = None
            self._advance(strand, answer, error)

    def _look(self, strands: list[_Strand]) -> None:
        """See which of ``strands`` are due, and whether peers have moved or have got an address."""
        now = time.monotonic()
        for strand in strands:
            ask = strand.ask
            if self._waiting.get(strand.call) is not strand:
                continue
            if ask is None:
                if strand.due <= now:
                    self._wake(strand, None, None)
            elif strand.due <= now:
                error = _late(ask, strand.link)
                if strand.link is not None:
                    self._give_up(ask.unit, error)
                self._wake(strand, None, error)
            elif strand.link is not None:
                self._link(ask.unit)
            elif self._resolve(ask.unit) is not None:
                del self._waiting[strand.call]
                try:
                    self._send(strand)
                    self._waiting[strand.call] = strand
                except AsyncFlowError as failed:
                    self._advance(strand, None, failed)

    def _say_farewell(self) -> None:
        farewell = self._farewell
        link = self._links.get(farewell.unit) if farewell is not None else None
        if farewell is None or link is None:
            return
        call, deadline = next(self._calls), time.monotonic() + LOOK_S
        try:
            link.send(call, farewell.method, farewell.request, farewell.frames, deadline=deadline)
        except AsyncFlowError as error:
            log.info("%s was not heard: %s", farewell.method, error)


def _late(ask: Ask, link: StreamLink | None) -> DeadlineExceeded:
    if link is None:
        what = f"{ask.method} was not begun within {ask.timeout:g} s: the peer has no address yet"
        return DeadlineExceeded(what, where="queue client", hint="See whether that role runs and has registered")
    what = f"{ask.method} was not answered by {link.address} within {ask.timeout:g} s: {link.state}"
    return DeadlineExceeded(what, where="queue client")


def _poll(links: Iterable[StreamLink], seconds: float) -> None:
    poller = select.poll()
    for link in links:
        if link.ready:
            return
        if link.socket is not None:
            poller.register(link.socket, select.POLLIN)
    poller.poll(seconds * 1e3)
