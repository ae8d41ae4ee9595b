"""Verbs that go on together in one thread, each a strand; what one does together becomes strands of its own.

A strand waits for an answer, for a moment (a pause, or a peer without an address), or for its children; the thread
sleeps in the links until one of them can go on.

Invariants: every strand has ended when ``run`` returns or raises; an answer for which nobody waits any more is dropped.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Sequence
from typing import Any

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.blocking_link import LOOK_S, BlockingLink
from asyncflow.queue.client.links import Links, answer_to
from asyncflow.queue.client.verbs import Ask, Effect, Pause, Peer, Together, Verb


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
        self.link: BlockingLink | None = None
        self.children: list[_Strand] = []
        self.results: list[Any] = []
        self.left = 0


class Strands:
    """One ``Together`` of a lane. farewells: takes those of the verbs."""

    def __init__(self, links: Links, farewells: list[Ask]) -> None:
        self._links = links
        self._farewells = farewells
        self._waiting: dict[int, _Strand] = {}
        self._outcome: list[Any] = []

    def run(self, verbs: Sequence[Verb[Any]]) -> list[Any]:
        """Do ``verbs`` at once; give their results in their order."""
        root = _Strand(_all(verbs), call=next(self._links.numbers))
        try:
            self._advance(root, None, None)
            while not self._outcome:
                self._wait()
        except BaseException:
            self._end(root)
            raise
        results: list[Any] = self._outcome[0]
        return results

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
            self._send(strand, effect)
        elif isinstance(effect, Pause):
            strand.ask, strand.due = None, time.monotonic() + effect.seconds
            self._waiting[strand.call] = strand
        elif isinstance(effect, Together):
            self._split(strand, effect)
        else:
            self._farewells.append(effect.ask)
            return False
        return True

    def _split(self, strand: _Strand, effect: Together) -> None:
        strand.left, strand.results = len(effect.verbs), [None] * len(effect.verbs)
        strand.children = children = [
            _Strand(verb, call=next(self._links.numbers), parent=strand, place=place)
            for place, verb in enumerate(effect.verbs)
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

    def _send(self, strand: _Strand, ask: Ask) -> None:
        """Send what ``strand`` asks, under a new number; leave it without a link while the peer has no address."""
        strand.call, strand.link = next(self._links.numbers), None
        strand.link = self._links.send(strand.call, ask, strand.due)
        self._waiting[strand.call] = strand

    def _wait(self) -> None:
        """Sleep until something came or is due, and let those go on whom it concerns."""
        strands, now = list(self._waiting.values()), time.monotonic()
        links: dict[BlockingLink, Peer] = {}
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
        for link, peer in links.items():
            try:
                if parts := self._links.receive(link, peer, sleep):
                    came += 1
                    self._answer(link, parts)
            except (PeerLost, DeadlineExceeded) as error:
                self._lost(link, error)
        if came < len(strands) and not self._outcome:
            self._look(strands)

    def _answer(self, link: BlockingLink, parts: Sequence[memoryview]) -> None:
        call, error = wire.read_answer(parts, where=link.address)
        strand = self._waiting.get(call)
        if strand is None or strand.link is not link or strand.ask is None:
            return
        answer = None
        if error is None:
            try:
                answer = answer_to(strand.ask, parts, where=link.address)
            except ProtocolError as wrong:
                error = wrong
        self._wake(strand, answer, error)

    def _lost(self, link: BlockingLink, error: AsyncFlowError) -> None:
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
                self._wake(strand, None, self._links.late(ask, strand.link))
            elif self._links.to(ask.unit) is not None and strand.link is None:
                del self._waiting[strand.call]
                try:
                    self._send(strand, ask)
                except AsyncFlowError as failed:
                    self._advance(strand, None, failed)


def _all(verbs: Sequence[Verb[Any]]) -> Verb[list[Any]]:
    results: list[Any] = yield Together(list(verbs))
    return results


def _poll(links: Iterable[BlockingLink], seconds: float) -> None:
    poller = select.poll()
    for link in links:
        if link.ready or link.gone is not None:
            return
        if link.socket is not None:
            poller.register(link.socket, select.POLLIN)
    poller.poll(seconds * 1e3)
