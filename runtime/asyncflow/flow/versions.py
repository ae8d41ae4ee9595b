"""Choice of the version of the weights that an instance fetches next.

Invariants: a version that a caller waits for comes first; a version older than all held ones is fetched only if a
caller waits for it or unfinished work needs it; an unfinished transfer is abandoned for a newer version only if no
unfinished step needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from asyncflow.identity import Version


class VersionOffer(Protocol):
    """The versions that are available."""

    @property
    def required(self) -> Collection[int]:
        """The steps of the versions that unfinished work needs."""

    def find(self, step: int) -> Version | None:
        """Return the available version of ``step`` from the newest attempt, or None."""


def next_version(
    offer: VersionOffer,
    *,
    held: Collection[Version],
    unfinished: Version | None,
    asked: Iterable[int],
    wanted: int | None,
) -> Version | None:
    """Return the version to fetch now, which may be the unfinished one; None: keep the transfer that runs, if any.

    asked: steps that callers wait for, in that order; wanted: the step that the worker's policy names. A version
    older than all held ones is fetched only if its step is asked for or required.
    """
    for step in asked:
        version = offer.find(step)
        if version is not None and all(other.step != step for other in held):
            return version
    version = offer.find(wanted) if wanted is not None else None
    if version is None or version in held:
        return None
    if held and version < max(held) and version.step not in offer.required:
        return None
    if unfinished is not None and unfinished < version and unfinished.step in offer.required:
        return unfinished if offer.find(unfinished.step) == unfinished else version
    return version
