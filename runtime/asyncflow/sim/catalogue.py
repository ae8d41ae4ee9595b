"""The versions of a simulated run that can be had: the newest, and those that unfinished work needs.

Invariant: as ``weights.catalogue`` with a trainer that never loses a version: what is required or among the newest
``keep`` can be had, everything else is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncflow.identity import Version


class VersionList:
    """A ``flow.versions.VersionOffer``. required: steps; available: oldest first; newest: None before the first."""

    def __init__(self, *, keep: int) -> None:
        self.required: Collection[int] = frozenset()
        self.available: list[Version] = []
        self.newest: Version | None = None
        self._keep = keep
        self._by_step: dict[int, Version] = {}
        self._pulls: dict[Version, int] = {}

    def publish(self, version: Version) -> None:
        """Make a version known."""
        self.newest = version if self.newest is None else max(self.newest, version)
        self.available = sorted([*self.available, version])
        self._forget()

    def require(self, steps: Collection[int]) -> bool:
        """Set the steps that unfinished work needs; return whether they are others than before."""
        if steps == self.required:
            return False
        self.required = frozenset(steps)
        self._forget()
        return True

    def find(self, step: int) -> Version | None:
        """Return the version of ``step`` that can be had, that of the newest attempt, or None."""
        return self._by_step.get(step)

    def holds(self, version: Version) -> bool:
        """Return whether a version can be had."""
        return self._by_step.get(version.step) == version

    def place(self, version: Version) -> int:
        """Return how many have asked for a version before."""
        place = self._pulls.get(version, 0)
        self._pulls[version] = place + 1
        return place

    def _forget(self) -> None:
        kept = {*self.available[-self._keep :]}
        self.available = [each for each in self.available if each in kept or each.step in self.required]
        self._by_step = {version.step: version for version in self.available}
