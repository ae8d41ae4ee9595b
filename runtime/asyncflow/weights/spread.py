"""Tree along which versions spread: the source of each receiver. Pure: no clock, no socket.

Receivers that need the same boxes (one **layout**) form a tree below the publishers. The tree stays the same from
version to version: a receiver pulls each version from its current source without a request to the catalogue, and
streams each part as soon as the source has it. A receiver is placed when it arrives, and again when its source fails,
leaves, or is slower than other sources.

A source on the receiver's own node is preferred, so a version crosses the network about once per node: the first
receiver of a node has a source on another node, and the other receivers are placed below the first. Each node therefore
reserves its last room for its own receivers, and serves at most ``FANOUT`` receivers of other nodes, unless this would
make the tree deeper by more than ``_DETOUR``.

Invariants:
* No receiver is its own source, over any number of parents.
* The publishers are the source of at most ``ROOTS`` receivers of a layout, as long as some other receiver has room, is
  not doubted and is not below the receiver that is being placed.
* A receiver is the source of at most ``FANOUT`` others, including those that kept it while it was absent.
* A receiver of which a child has complained gets no other child before it makes progress again, or before the next
  version is requested.

The time of a placement depends on the depth of the tree and the number of nodes. Moving a receiver takes longer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

ROOTS = 2
FANOUT = 2
_DETOUR = 2
MOST_OVERTAKEN = 3
"""Number of times that a receiver's source on its own node is found slower before the receiver leaves it."""


@dataclass(kw_only=True)
class _Receiver:
    """A receiver.

    placed: whether it has a source.
    parent: its source, None for the publishers; stays set after the source has left.
    order: number of receivers that were placed before it.
    overtaken: how often, for this version, its source was found slower than sources that were placed later.
    room: number of further receivers that it may serve.
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
    """Receivers of one layout on one node.

    kept: room reserved for new receivers of this node; far: number of receivers of other nodes that it serves; open:
    receivers that have room.
    """

    kept: int
    receivers: int = 0
    room: int = 0
    far: int = 0
    open: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def spare(self) -> bool:
        """Return whether the node can serve one more receiver of another node."""
        return self.room > self.kept and self.far < FANOUT


class Spread:
    """Receivers of versions, and the source of each."""

    def __init__(self) -> None:
        self._receivers: dict[str, _Receiver] = {}
        self._root_counts: Counter[str] = Counter()
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
        """Return the worker from which ``receiver`` must pull now, None for the publishers.

        node: the receiver's node, "" if no other worker is known to run there; failed: workers from which it could not
        pull; version: the version that it pulls now; whole: workers that have all of this version.

        A repeated request returns the same source, unless that source is in ``failed`` or has left, or another worker
        has the whole version and the source does not. In the last case a better source is used immediately, but a
        source on the receiver's own node is replaced by one on another node only after ``MOST_OVERTAKEN`` findings.
        """
        for worker in [worker for worker, doubted in self._doubted.items() if doubted != version]:
            self.clear_doubt(worker)
        for worker in failed:
            if worker in self._receivers:
                self._doubted[worker] = version
                self._update_listing(worker)
        known = self._join(receiver, layout=layout, node=node)
        if known.version != version:
            known.version, known.overtaken = version, 0
        moves = known.placed
        if moves and self._keeps_source(receiver, known, failed, whole):
            return known.parent
        if not moves:
            self._placed += 1
            known.order = self._placed
        self._detach(receiver, known)
        self.clear_doubt(receiver)
        known.overtaken = 0
        known.parent = self._choose(receiver, known, whole, moves=moves)
        known.placed = True
        if known.parent is None:
            self._root_counts[layout] += 1
        else:
            self._attach(known, receiver, known.parent)
        self._update_listing(receiver)
        return known.parent

    def clear_doubt(self, worker: str) -> None:
        """Record that ``worker`` has received data: it is no longer doubted."""
        if worker in self._doubted:
            del self._doubted[worker]
            self._update_listing(worker)

    def leave(self, worker: str) -> None:
        """Remove ``worker``, which has ended."""
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
        """Record that ``worker``, which may never have been placed here, has versions that other workers may pull."""
        self._join(worker, layout=layout, node=node)
        self._update_listing(worker)

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

    def _keeps_source(self, receiver: str, known: _Receiver, failed: Collection[str], whole: Collection[str]) -> bool:
        """Return whether a receiver keeps the source that it has."""
        if known.parent is None:
            return not failed
        parent = self._receivers.get(known.parent)
        if parent is None or known.parent in self._doubted or parent.layout != known.layout:
            return False
        if known.parent in whole or not whole:
            return True
        if self._on_same_node(receiver, known, whole) is not None:
            return False
        better = self._on_other_node(receiver, known, whole)
        if better is None:
            return True
        if parent.order < self._receivers[better].order:
            known.overtaken += 1
        return parent.node == known.node and known.overtaken < MOST_OVERTAKEN

    def _choose(self, receiver: str, known: _Receiver, whole: Collection[str], *, moves: bool) -> str | None:
        """Return a source. A new receiver prefers its own node; a moving one prefers a source that has the version."""
        near, far = self._on_same_node, self._on_other_node
        first = [(near, whole), (far, whole)] if moves else [(near, whole), (near, None), (far, whole)]
        rest = [(near, None), (far, None)] if self._root_counts[known.layout] >= ROOTS else []
        return next(filter(None, (find(receiver, known, among) for find, among in first + rest)), None)

    def _on_same_node(self, receiver: str, known: _Receiver, among: Collection[str] | None) -> str | None:
        """Return the first of ``among`` (None: any) with room on the same node that is not at or below ``receiver``."""
        return self._first(receiver, known.layout, known.node, among)

    def _on_other_node(self, receiver: str, known: _Receiver, among: Collection[str] | None) -> str | None:
        """Return a source on another node: one with spare room, unless others are much higher in the tree."""
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
        return receiver in self._ancestors(candidate)

    def _depth(self, receiver: str) -> int:
        return sum(1 for _ in self._ancestors(receiver))

    def _ancestors(self, receiver: str) -> Iterator[str]:
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
        self._update_listing(parent)

    def _detach(self, receiver: str, known: _Receiver) -> None:
        """Remove a receiver from its source, which then has room again."""
        if not known.placed:
            return
        known.placed = False
        if known.parent is None:
            self._root_counts[known.layout] -= 1
        elif (source := self._receivers.get(known.parent)) is not None:
            source.children.discard(receiver)
            self._nodes[source.layout, source.node].far -= source.node != known.node
            self._update_listing(known.parent)
        known.parent = None

    def _update_listing(self, worker: str) -> None:
        """Update whether a receiver, and thus its node, is listed as having room."""
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
