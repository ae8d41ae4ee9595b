"""Tree along which one version spreads: who pulls it from whom. Pure: no clock, no socket.

Receivers that need the same boxes (one **layout**) form a tree below those that published the version. A receiver
streams what its parent has, as the parent gets it; so each receiver that comes adds room for others, and where the
first few have the version, newcomers find it there.

A source on the receiver's own node is preferred, so a version crosses the network about once for each node: the first
receiver of a node is placed at another node, the others below it. For these a node keeps its last room back, and serves
at most ``FANOUT`` receivers of other nodes, unless that would make the tree deeper by more than ``_DETOUR``.

Invariants: nobody is, over any number of parents, its own source; the publishers are the source of at most ``ROOTS``
receivers of a layout, not counting those that left unfinished, as long as another receiver has room, is not doubted and
not below the one which asks; a receiver is the source of at most ``FANOUT`` that are not finished; one of which a child
has complained gets no other child before it was heard again. A placement takes time by the depth of the
tree, more for a receiver that moves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

ROOTS = 2
FANOUT = 2
_DETOUR = 2
LOYAL = 3
"""Times that a receiver finds its source, on its node, slower than one placed later, before it leaves it."""


@dataclass(kw_only=True)
class _Receiver:
    """A receiver. pulls: whether it has a source; parent: that source, None for the publishers, "" once it has left.

    order: how many were placed before it; overtaken: how often it was found that its source is slower
    than others, which were placed later; room: how many more it may serve.
    """

    layout: str
    node: str
    order: int = 0
    parent: str | None = None
    pulls: bool = False
    whole: bool = False
    doubted: bool = False
    overtaken: int = 0
    room: int = 0
    children: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class _Node:
    """Receivers of one layout on one node. kept: room that is kept for those that come; far: how many of other nodes
    they serve; open: those that have room, by whether they have the whole version.
    """

    kept: int
    receivers: int = 0
    room: int = 0
    far: int = 0
    open: dict[bool, OrderedDict[str, None]] = field(
        default_factory=lambda: {True: OrderedDict(), False: OrderedDict()}
    )

    @property
    def spare(self) -> bool:
        """Return whether a receiver of another node is welcome."""
        return self.room > self.kept and self.far < FANOUT


class Spread:
    """Receivers that have one version or are getting it, and the source of each."""

    def __init__(self) -> None:
        self._receivers: dict[str, _Receiver] = {}
        self._rooted: Counter[str] = Counter()
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._open: dict[tuple[str, bool, bool], OrderedDict[str, None]] = {}
        self._placed = 0
        self._newest: Counter[str] = Counter()

    def place(self, receiver: str, *, layout: str, node: str = "", failed: Collection[str] = ()) -> str | None:
        """Return whom ``receiver`` is to pull from now, None for the publishers.

        node: where it runs, "" if nobody else is known to run there; failed: whom it could not get anything from. Asked
        again, the answer changes only where one of those is its source, its source has left, or another has got the
        whole version while its source has not: at once if that is a better one, late if only its source is on its node.
        """
        for worker in failed:
            if worker in self._receivers:
                self._receivers[worker].doubted = True
                self._list(worker)
        known = self._join(receiver, layout=layout, node=node)
        moves = known.pulls
        if moves and self._keeps(receiver, known, failed):
            return known.parent
        if not moves:
            self._placed += 1
            known.order = self._placed
        self._detach(receiver, known)
        known.doubted = known.whole = False
        known.overtaken = 0
        known.parent = self._choose(receiver, known, moves=moves)
        known.pulls = True
        if known.parent is None:
            self._rooted[layout] += 1
        else:
            self._attach(receiver, known, known.parent)
        self._list(receiver)
        return known.parent

    def finish(self, worker: str, *, layout: str, node: str = "") -> None:
        """Note that ``worker`` has all that its layout needs, and was heard."""
        known = self._join(worker, layout=layout, node=node)
        if known.parent is not None:
            self._detach(worker, known)
        known.pulls, known.whole, known.doubted = False, True, False
        self._newest[layout] = max(self._newest[layout], known.order)
        self._list(worker)

    def leave(self, worker: str) -> None:
        """Note that ``worker`` serves the version no longer."""
        known = self._receivers.get(worker)
        if known is None:
            return
        self._detach(worker, known)
        node = self._nodes[known.layout, known.node]
        for child in known.children:
            self._receivers[child].parent = ""
            node.far -= self._receivers[child].node != known.node
        del self._receivers[worker]
        self._count(worker, known, room=0)
        node.receivers -= 1
        if not node.receivers:
            del self._nodes[known.layout, known.node]

    def _join(self, worker: str, *, layout: str, node: str) -> _Receiver:
        known = self._receivers.get(worker)
        if known is not None and known.layout == layout:
            return known
        self.leave(worker)
        known = self._receivers[worker] = _Receiver(layout=layout, node=node or f"?{worker}")
        kept = 1 if node else 0
        self._nodes.setdefault((layout, known.node), _Node(kept=kept)).receivers += 1
        return known

    def _keeps(self, receiver: str, known: _Receiver, failed: Collection[str]) -> bool:
        """Return whether a receiver that has a source is to go on with it."""
        if known.parent is None:
            return not failed
        parent = self._receivers.get(known.parent)
        if parent is None or parent.doubted or parent.layout != known.layout:
            return False
        if parent.whole or self._near(receiver, known, whole=True) is not None:
            return parent.whole
        if self._far(receiver, known, whole=True) is None:
            return True
        if parent.order < self._newest[known.layout]:
            known.overtaken += 1
        return parent.node == known.node and known.overtaken < LOYAL

    def _choose(self, receiver: str, known: _Receiver, *, moves: bool) -> str | None:
        """Return a source: one on its node, else one that has the whole version; the other way round if it moves."""
        near, far = self._near, self._far
        if moves:
            order = [(near, True), (far, True), (near, False), (far, False)]
        else:
            order = [(near, True), (near, False), (far, True)]
            if self._rooted[known.layout] >= ROOTS:
                order.append((far, False))
        return next(filter(None, (find(receiver, known, whole=whole) for find, whole in order)), None)

    def _near(self, receiver: str, known: _Receiver, *, whole: bool) -> str | None:
        """Return the first receiver with room on the same node that is not ``receiver`` nor below it."""
        return self._first(receiver, known.layout, known.node, whole=whole)

    def _far(self, receiver: str, known: _Receiver, *, whole: bool) -> str | None:
        """Return the same of another node: one that can spare the room, unless others are much higher in the tree."""
        spare, rest = (self._elsewhere(receiver, known, whole=whole, spare=spare) for spare in (True, False))
        if spare is None or rest is None:
            return spare or rest
        return rest if self._depth(spare) > self._depth(rest) + _DETOUR else spare

    def _elsewhere(self, receiver: str, known: _Receiver, *, whole: bool, spare: bool) -> str | None:
        nodes = self._open.get((known.layout, whole, spare), ())
        found = (self._first(receiver, known.layout, node, whole=whole) for node in nodes if node != known.node)
        return next(filter(None, found), None)

    def _first(self, receiver: str, layout: str, node: str, *, whole: bool) -> str | None:
        open_ = self._nodes[layout, node].open[whole]
        return next((candidate for candidate in open_ if not self._is_below(candidate, receiver)), None)

    def _is_below(self, candidate: str, receiver: str) -> bool:
        return receiver in self._upwards(candidate)

    def _depth(self, receiver: str) -> int:
        return sum(1 for _ in self._upwards(receiver))

    def _upwards(self, receiver: str) -> Iterator[str]:
        """Yield a receiver, its source, and so on."""
        at: str | None = receiver
        while at is not None:
            yield at
            known = self._receivers.get(at)
            at = known.parent if known is not None and known.pulls else None

    def _attach(self, receiver: str, known: _Receiver, parent: str) -> None:
        source = self._receivers[parent]
        source.children.add(receiver)
        self._nodes[source.layout, source.node].far += source.node != known.node
        self._list(parent)

    def _detach(self, receiver: str, known: _Receiver) -> None:
        """Take a receiver off its source, which has room again."""
        if not known.pulls:
            return
        known.pulls = False
        if known.parent is None:
            self._rooted[known.layout] -= 1
        elif (source := self._receivers.get(known.parent)) is not None:
            source.children.discard(receiver)
            self._nodes[source.layout, source.node].far -= source.node != known.node
            self._list(known.parent)
        known.parent = None

    def _list(self, worker: str) -> None:
        """List a receiver among those that have room, or no longer, and so its node."""
        known = self._receivers[worker]
        self._count(worker, known, room=0 if known.doubted else FANOUT - len(known.children))

    def _count(self, worker: str, known: _Receiver, *, room: int) -> None:
        node = self._nodes[known.layout, known.node]
        node.room += room - known.room
        known.room = room
        node.open[not known.whole].pop(worker, None)
        if room:
            node.open[known.whole].setdefault(worker)
        else:
            node.open[known.whole].pop(worker, None)
        for whole in (True, False):
            for spare in (True, False):
                listed = self._open.setdefault((known.layout, whole, spare), OrderedDict())
                if node.open[whole] and node.spare == spare:
                    listed.setdefault(known.node)
                else:
                    listed.pop(known.node, None)
