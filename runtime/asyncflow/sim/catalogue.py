"""The available versions of a simulated run: the newest, and those that unfinished work needs.

Invariant: it acts like ``weights.catalogue`` with a trainer that never loses a version: the required versions and the
newest ``keep`` are available, all others are forgotten.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncflow.identity import Version


class VersionList:
    """A ``flow.versions.VersionOffer``. required: steps; available: versions, oldest first; newest: None at first."""

    def __init__(self, *, keep: int) -> None:
        self.required: Collection[int] = frozenset()
        self.available: list[Version] = []
        self.newest: Version | None = None
        self._keep = keep
        self._by_step: dict[int, Version] = {}
        self._pulls: dict[Version, int] = {}

    def publish(self, version: Version) -> None:
        """Add a version."""
        self.newest = version if self.newest is None else max(self.newest, version)
        self.available = sorted([*self.available, version])
        self._forget()

    def require(self, steps: Collection[int]) -> bool:
        """Set the steps that unfinished work needs; return whether they changed."""
        if steps == self.required:
            return False
        self.required = frozenset(steps)
        self._forget()
        return True

    def find(self, step: int) -> Version | None:
        """Return the available version of ``step`` from the newest attempt, or None."""
        return self._by_step.get(step)

    def holds(self, version: Version) -> bool:
        """Return whether a version is available."""
        return self._by_step.get(version.step) == version

    def count_pull(self, version: Version) -> int:
        """Return the number of previous pulls of a version, and count one more."""
        place = self._pulls.get(version, 0)
        self._pulls[version] = place + 1
        return place

    def _forget(self) -> None:
        kept = {*self.available[-self._keep :]}
        self.available = [each for each in self.available if each in kept or each.step in self.required]
        self._by_step = {version.step: version for version in self.available}
