"""Runs what a client does without sockets: calls are answered by hand, and waiting takes no time."""

import asyncio
import selectors
from typing import Any, NamedTuple

from asyncflow.queue.peers import Peer, Peers


class Call(NamedTuple):
    peer: Peer
    method: str
    request: Any
    timeout: float
    frames: Any


class ByHand(Peers):
    """Peers whose calls ``answer`` is given, and returns reply and frames, or raises. units: those that are there."""

    def __init__(self, answer, units=lambda: [0]):
        super().__init__(find=lambda *_: None, units=units)
        self._answer = answer

    async def call(self, peer, method, request, _reply, *, timeout, frames=()):
        await asyncio.sleep(0)
        return self._answer(Call(peer, method, request, timeout, frames))


class _Clock(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


def carry_out(job):
    """Return what ``job`` returns."""

    def new_loop():
        clock = _Clock()
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = lambda: clock.now
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(job)
