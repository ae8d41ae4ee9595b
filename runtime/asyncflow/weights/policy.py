"""Choice of the version that a receiver fetches next, and of the holders to fetch it from. Pure.

Invariants: what a caller waits for comes before what the worker wants; an unfinished transfer is given up for a newer
version only if no unfinished step needs it; receivers of one version spread over its holders, and a holder that failed
comes after those that failed less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b

from asyncflow.identity import Version
from asyncflow.weights.messages import CatalogueView


def next_version(
    view: CatalogueView,
    *,
    held: Collection[Version],
    unfinished: Version | None,
    asked: Iterable[int],
    wanted: int | None,
) -> Version | None:
    """Return the version to fetch now, which may be the unfinished one; None: nothing new, an unfinished one goes on.

    asked: steps that somebody waits for, in that order; wanted: the step that the worker's policy names. A version
    older than all that is held is fetched only when its step is asked for or required.
    """
    for step in asked:
        version = view.find(step)
        if version is not None and all(other.step != step for other in held):
            return version
    version = view.find(wanted) if wanted is not None else None
    if version is None or version in held:
        return None
    if held and version < max(held) and version.step not in view.required:
        return None
    if unfinished is not None and unfinished < version and unfinished.step in view.required:
        return unfinished if view.find(unfinished.step) == unfinished else version
    return version


def preference(workers: Iterable[str], *, version: Version, receiver: str, faults: Mapping[str, int]) -> list[str]:
    """Order the holders of ``version`` for ``receiver``: fewest faults first, else by a hash of the three names."""

    def key(worker: str) -> tuple[int, bytes]:
        return faults.get(worker, 0), blake2b(f"{receiver} {worker} {version.packed}".encode(), digest_size=8).digest()

    return sorted(workers, key=key)
