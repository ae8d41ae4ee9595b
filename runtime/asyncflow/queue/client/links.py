"""The streams of one thread to its peers: one to each, opened when first needed, to the address that holds now.

Invariant: a link that broke, on which an answer was too late, or whose peer has moved is closed and never used again;
whoever still waits on it finds in ``gone`` why.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.blocking_link import BlockingLink
from asyncflow.queue.client.verbs import Ask, Peer


class Links:
    """The links by peer.

    resolve: gives the address of a peer now, None while it has none; numbers: of the calls.
    """

    def __init__(self, *, resolve: Callable[[Peer], str | None], keys: Keys | None) -> None:
        self.numbers = itertools.count()
        self._resolve = resolve
        self._keys = keys
        self._links: dict[Peer, BlockingLink] = {}

    def to(self, peer: Peer) -> BlockingLink | None:
        """Return the link to where a peer is now, None while that is nowhere."""
        address, link = self._resolve(peer), self._links.get(peer)
        if link is not None and link.address != address:
            self.give_up(peer, PeerLost(f"the peer moved to {address}", where=link.address))
            link = None
        if link is None and address is not None:
            link = self._links[peer] = self._linked(peer, address)
        return link

    def send(self, call: int, ask: Ask, due: float) -> BlockingLink | None:
        """Send a call; give the link, None while its peer is nowhere. Raises what ``BlockingLink.send`` does."""
        link = self.to(ask.unit)
        if link is not None:
            try:
                link.send(call, ask.method, ask.request, ask.frames, deadline=due)
            except (PeerLost, DeadlineExceeded) as error:
                self.give_up(ask.unit, error)
                raise
        return link

    def tell(self, ask: Ask, *, seconds: float) -> None:
        """Make a call whose answer nobody awaits, where its peer has a link. Raises what ``BlockingLink.send`` does."""
        link = self._links.get(ask.unit)
        if link is not None:
            deadline = time.monotonic() + seconds
            link.send(next(self.numbers), ask.method, ask.request, ask.frames, deadline=deadline)

    def receive(self, link: BlockingLink, peer: Peer, seconds: float) -> list[memoryview]:
        """Return the next message on a link; nothing if none came. Raises PeerLost or DeadlineExceeded
        where nothing will.
        """
        try:
            return link.receive(seconds)
        except (PeerLost, DeadlineExceeded) as error:
            if self._links.get(peer) is link:
                self.give_up(peer, error)
            raise

    def give_up(self, peer: Peer, error: AsyncFlowError) -> None:
        """Use the link to a peer no more."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.gone = error
            link.close()

    def late(self, ask: Ask, link: BlockingLink | None) -> DeadlineExceeded:
        """Return the error for an answer that did not come in time; its link, where it has one, is given up."""
        if link is None:
            what = f"{ask.method} was not begun within {ask.timeout:g} s: the peer has no address yet"
            hint = "See whether that role runs and has registered"
            return DeadlineExceeded(what, where="queue client", hint=hint)
        what = f"{ask.method} was not answered by {link.address} within {ask.timeout:g} s: {link.state}"
        error = DeadlineExceeded(what, where="queue client")
        self.give_up(ask.unit, error)
        return error

    def close(self) -> None:
        """Close all."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _linked(self, peer: Peer, address: str) -> BlockingLink:
        return BlockingLink(
            address,
            keys=self._keys,
            max_message=wire.MAX_MESSAGE,
            stays=lambda: self._resolve(peer) == address,
        )


def answer_to(ask: Ask, parts: Sequence[memoryview], *, where: str) -> tuple[Any, Sequence[memoryview]]:
    """Return the reply in a message that answers ``ask``, and its frames. Raises ProtocolError."""
    try:
        return wire.decoder_of(ask.reply).decode(parts[1]), parts[2:]
    except wire.MALFORMED as wrong:
        raise ProtocolError(f"{ask.method}: the answer is no {ask.reply.__name__}: {wrong}", where=where) from None
