"""Tree along which one version spreads: who pulls it from whom. Pure: no clock, no socket.

Receivers that need the same boxes (one **layout**) form a tree below those that published the version. A receiver
streams what its parent has, as the parent gets it; so each receiver that comes adds room for others, and where the
first few have the version, newcomers find it there.

Invariants: nobody is, over any number of parents, its own source; the publishers are the source of at most ``ROOTS``
receivers of a layout, not counting those that left unfinished, as long as another receiver has room, is not doubted and
not below the one which asks; a receiver is the source of at most ``FANOUT`` that are not finished; one of which a child
has complained gets no other child before it was heard again. A placement takes time by the depth of the
tree, more for a receiver that moves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

ROOTS = 2
FANOUT = 2


@dataclass(kw_only=True)
class _Node:
    """A receiver. pulls: whether it has a source; parent: that source, None for the publishers, "" once it has left."""

    layout: str
    parent: str | None = None
    pulls: bool = False
    whole: bool = False
    doubted: bool = False
    children: set[str] = field(default_factory=set)


class Spread:
    """Receivers that have one version or are getting it, and the source of each."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._rooted: Counter[str] = Counter()
        self._open: dict[tuple[str, bool], OrderedDict[str, None]] = {}

    def place(self, receiver: str, *, layout: str, failed: Collection[str] = ()) -> str | None:
        """Return whom ``receiver`` is to pull from now, None for the publishers.

        failed: whom it could not get anything from. Asked again, the answer changes only where one of those is its
        source, its source has left, or another has got the whole version while its source has not.
        """
        for worker in failed:
            if worker in self._nodes:
                self._nodes[worker].doubted = True
                self._list(worker)
        node = self._nodes.get(receiver)
        if node is None or node.layout != layout:
            self.leave(receiver)
            node = self._nodes[receiver] = _Node(layout=layout)
        moves = node.pulls
        if moves and self._keeps(receiver, node, failed):
            return node.parent
        self._detach(receiver, node)
        node.doubted = node.whole = False
        node.parent = self._choose(receiver, layout, moves=moves)
        node.pulls = True
        if node.parent is None:
            self._rooted[layout] += 1
        else:
            self._nodes[node.parent].children.add(receiver)
            self._list(node.parent)
        self._list(receiver)
        return node.parent

    def finish(self, worker: str, *, layout: str) -> None:
        """Note that ``worker`` has all that its layout needs, and was heard."""
        node = self._nodes.get(worker)
        if node is None or node.layout != layout:
            self.leave(worker)
            node = self._nodes[worker] = _Node(layout=layout)
        if node.parent is not None:
            self._detach(worker, node)
        node.pulls, node.whole, node.doubted = False, True, False
        self._list(worker)

    def leave(self, worker: str) -> None:
        """Note that ``worker`` serves the version no longer."""
        node = self._nodes.get(worker)
        if node is not None:
            self._detach(worker, node)
            self._unlist(worker, node)
            for child in node.children:
                self._nodes[child].parent = ""
            del self._nodes[worker]

    def _keeps(self, receiver: str, node: _Node, failed: Collection[str]) -> bool:
        """Return whether a receiver that has a source is to go on with it."""
        if node.parent is None:
            return not failed
        parent = self._nodes.get(node.parent)
        if parent is None or parent.doubted or parent.layout != node.layout:
            return False
        return parent.whole or self._first(receiver, node.layout, whole=True) is None

    def _choose(self, receiver: str, layout: str, *, moves: bool) -> str | None:
        found = self._first(receiver, layout, whole=True)
        if found is None and (moves or self._rooted[layout] >= ROOTS):
            found = self._first(receiver, layout, whole=False)
        return found

    def _first(self, receiver: str, layout: str, *, whole: bool) -> str | None:
        """Return the first receiver with room that is not ``receiver`` nor below it."""
        open_ = self._open.get((layout, whole), ())
        return next((candidate for candidate in open_ if not self._is_below(candidate, receiver)), None)

    def _is_below(self, candidate: str, receiver: str) -> bool:
        at: str | None = candidate
        while at is not None and at != receiver:
            node = self._nodes.get(at)
            at = node.parent if node is not None and node.pulls else None
        return at == receiver

    def _detach(self, receiver: str, node: _Node) -> None:
        """Take a receiver off its source, which has room again."""
        if not node.pulls:
            return
        node.pulls = False
        if node.parent is None:
            self._rooted[node.layout] -= 1
        elif node.parent in self._nodes:
            self._nodes[node.parent].children.discard(receiver)
            self._list(node.parent)
        node.parent = None

    def _list(self, worker: str) -> None:
        """List a receiver among those that have room, or no longer."""
        node = self._nodes[worker]
        if node.doubted or len(node.children) >= FANOUT:
            self._unlist(worker, node)
            return
        self._open.get((node.layout, not node.whole), OrderedDict()).pop(worker, None)
        self._open.setdefault((node.layout, node.whole), OrderedDict()).setdefault(worker)

    def _unlist(self, worker: str, node: _Node) -> None:
        for whole in (True, False):
            self._open.get((node.layout, whole), OrderedDict()).pop(worker, None)
