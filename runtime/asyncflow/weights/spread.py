"""Tree along which versions spread: who pulls them from whom. Pure: no clock, no socket.

Receivers that need the same boxes (one **layout**) form a tree below those that publish. It stands from version to
version: a receiver pulls each from the source that it has, asked nobody, and streams what that has, as that gets it. It
is placed when it comes, and again when its source fails, leaves, or is slower than others.

A source on the receiver's own node is preferred, so a version crosses the network about once for each node: the first
receiver of a node is placed at another node, the others below it. For these a node keeps its last room back, and serves
at most ``FANOUT`` receivers of other nodes, unless that would make the tree deeper by more than ``_DETOUR``.

Invariants: nobody is, over any number of parents, its own source; the publishers are the source of at most ``ROOTS``
receivers of a layout, as long as another receiver has room, is not doubted and not below the one which asks; a receiver
is the source of at most ``FANOUT``, counting those that kept it while it was away; one of which a child has complained
gets no other child before it was heard again, or the next version is asked for.
A placement takes time by the depth of the tree and the number of nodes, more for a receiver that moves.
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
    """A receiver. placed: whether it has a source; parent: that source, also once it has left, None for the publishers.

    order: how many were placed before it; overtaken: how often it was found, of one version, that its source is slower
    than others, which were placed later; room: how many more it may serve.
    """

    layout: str
    node: str
    order: int = 0
    parent: str | None = None
    placed: bool = False
    overtaken: int = 0
    version: object = None
    room: int = 0
    children: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class _Node:
    """Receivers of one layout on one node. kept: room that is kept for those that come; far: how many of other nodes
    they serve; open: those that have room.
    """

    kept: int
    receivers: int = 0
    room: int = 0
    far: int = 0
    open: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def spare(self) -> bool:
        """Return whether a receiver of another node is welcome."""
        return self.room > self.kept and self.far < FANOUT


class Spread:
    """Receivers of versions, and the source of each."""

    def __init__(self) -> None:
        self._receivers: dict[str, _Receiver] = {}
        self._rooted: Counter[str] = Counter()
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._open: dict[tuple[str, bool], OrderedDict[str, None]] = {}
        self._doubted: dict[str, object] = {}
        self._placed = 0

    def place(
        self,
        receiver: str,
        *,
        layout: str,
        node: str = "",
        failed: Collection[str] = (),
        version: object = None,
        whole: Collection[str] = (),
    ) -> str | None:
        """Return whom ``receiver`` is to pull from now, None for the publishers.

        node: where it runs, "" if nobody else is known to run there; failed: whom it could not get anything from;
        version: what it pulls now; whole: who has all of that. Asked again, the answer changes only where one of those
        that failed is its source, its source has left, or another has the whole version while its source has not: at
        once if that is a better one, late if only its source is on its node.
        """
        for worker in [worker for worker, of in self._doubted.items() if of != version]:
            self.heard(worker)
        for worker in failed:
            if worker in self._receivers:
                self._doubted[worker] = version
                self._list(worker)
        known = self._join(receiver, layout=layout, node=node)
        if known.version != version:
            known.version, known.overtaken = version, 0
        moves = known.placed
        if moves and self._keeps(receiver, known, failed, whole):
            return known.parent
        if not moves:
            self._placed += 1
            known.order = self._placed
        self._detach(receiver, known)
        self.heard(receiver)
        known.overtaken = 0
        known.parent = self._choose(receiver, known, whole, moves=moves)
        known.placed = True
        if known.parent is None:
            self._rooted[layout] += 1
        else:
            self._attach(known, receiver, known.parent)
        self._list(receiver)
        return known.parent

    def heard(self, worker: str) -> None:
        """Note that ``worker`` got something: nobody doubts it any more."""
        if worker in self._doubted:
            del self._doubted[worker]
            self._list(worker)

    def leave(self, worker: str) -> None:
        """Note that ``worker`` is gone."""
        known = self._receivers.get(worker)
        if known is None:
            return
        self._detach(worker, known)
        node = self._nodes[known.layout, known.node]
        node.far -= sum(self._receivers[child].node != known.node for child in known.children)
        del self._receivers[worker]
        self._doubted.pop(worker, None)
        self._count(worker, known, room=0)
        node.receivers -= 1
        if not node.receivers:
            del self._nodes[known.layout, known.node]

    def join(self, worker: str, *, layout: str, node: str = "") -> None:
        """Note that ``worker``, which may never have been placed here, has versions that others may pull."""
        self._join(worker, layout=layout, node=node)
        self._list(worker)

    def _join(self, worker: str, *, layout: str, node: str) -> _Receiver:
        known = self._receivers.get(worker)
        if known is not None and known.layout == layout:
            return known
        self.leave(worker)
        known = self._receivers[worker] = _Receiver(layout=layout, node=node or f"?{worker}")
        at = self._nodes.setdefault((layout, known.node), _Node(kept=1 if node else 0))
        at.receivers += 1
        known.children = {name for name, other in self._receivers.items() if other.parent == worker}
        at.far += sum(self._receivers[child].node != known.node for child in known.children)
        return known

    def _keeps(self, receiver: str, known: _Receiver, failed: Collection[str], whole: Collection[str]) -> bool:
        """Return whether a receiver that has a source is to go on with it."""
        if known.parent is None:
            return not failed
        parent = self._receivers.get(known.parent)
        if parent is None or known.parent in self._doubted or parent.layout != known.layout:
            return False
        if known.parent in whole or not whole:
            return True
        if self._near(receiver, known, whole) is not None:
            return False
        better = self._far(receiver, known, whole)
        if better is None:
            return True
        if parent.order < self._receivers[better].order:
            known.overtaken += 1
        return parent.node == known.node and known.overtaken < LOYAL

    def _choose(self, receiver: str, known: _Receiver, whole: Collection[str], *, moves: bool) -> str | None:
        """Return a source: one on its node, else one that has the whole version; the other way round if it moves."""
        near, far = self._near, self._far
        first = [(near, whole), (far, whole)] if moves else [(near, whole), (near, None), (far, whole)]
        rest = [(near, None), (far, None)] if self._rooted[known.layout] >= ROOTS else []
        return next(filter(None, (find(receiver, known, among) for find, among in first + rest)), None)

    def _near(self, receiver: str, known: _Receiver, among: Collection[str] | None) -> str | None:
        """Return the first of ``among`` (None: anybody) with room on the same node, not ``receiver`` nor below it."""
        return self._first(receiver, known.layout, known.node, among)

    def _far(self, receiver: str, known: _Receiver, among: Collection[str] | None) -> str | None:
        """Return the same of another node: one that can spare the room, unless others are much higher in the tree."""
        spare, rest = (self._elsewhere(receiver, known, among, spare=spare) for spare in (True, False))
        if spare is None or rest is None:
            return spare or rest
        return rest if self._depth(spare) > self._depth(rest) + _DETOUR else spare

    def _elsewhere(self, receiver: str, known: _Receiver, among: Collection[str] | None, *, spare: bool) -> str | None:
        if among is not None and not among:
            return None
        nodes = self._open.get((known.layout, spare), ())
        found = (self._first(receiver, known.layout, node, among) for node in nodes if node != known.node)
        return next(filter(None, found), None)

    def _first(self, receiver: str, layout: str, node: str, among: Collection[str] | None) -> str | None:
        return next(
            (
                candidate
                for candidate in self._nodes[layout, node].open
                if (among is None or candidate in among) and not self._is_below(candidate, receiver)
            ),
            None,
        )

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
            at = known.parent if known is not None and known.placed else None

    def _attach(self, known: _Receiver, receiver: str, parent: str) -> None:
        source = self._receivers[parent]
        source.children.add(receiver)
        self._nodes[source.layout, source.node].far += source.node != known.node
        self._list(parent)

    def _detach(self, receiver: str, known: _Receiver) -> None:
        """Take a receiver off its source, which has room again."""
        if not known.placed:
            return
        known.placed = False
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
        self._count(worker, known, room=0 if worker in self._doubted else FANOUT - len(known.children))

    def _count(self, worker: str, known: _Receiver, *, room: int) -> None:
        node = self._nodes[known.layout, known.node]
        node.room += room - known.room
        known.room = room
        if room:
            node.open.setdefault(worker)
        else:
            node.open.pop(worker, None)
        for spare in (True, False):
            listed = self._open.setdefault((known.layout, spare), OrderedDict())
            if node.open and node.spare == spare:
                listed.setdefault(known.node)
            else:
                listed.pop(known.node, None)
