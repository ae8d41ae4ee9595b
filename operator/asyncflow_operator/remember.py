"""``Desired``, with a memory: what a job needs beside its pods is built once, not at every look.

Invariant: what is remembered is what would be built. It depends on the parsed job, which is one object as long as spec
and labels stay, on the pinned images, and on what was found that the job refers to; when one is another, it is built
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from asyncflow.api.job import RLJob
from asyncflow_operator.desired import Desired
from asyncflow_operator.observed import Found, JobState, Manifest, Ref

MOST: Final = 1024
"""Jobs whose objects are remembered, the latest looked at; some 12 KiB each."""

Manifests = tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class _Built:
    job: RLJob | None
    images: dict[str, str]
    found: Mapping[Ref, Found]
    manifests: Manifests


class Remembered:
    """Cache of what ``desired`` builds."""

    def __init__(self, desired: Desired) -> None:
        self._desired = desired
        self._known: OrderedDict[tuple[str, str], _Built] = OrderedDict()
        self.pod = desired.pod
        self.images = desired.images
        self.queue_supporting = desired.queue_supporting
        self.queue_pod = desired.queue_pod

    def supporting(self, state: JobState) -> Manifests:
        """Return every object of the job, except its pods and custom resources."""
        return self._built("supporting", state, self._desired.supporting)

    def children(self, state: JobState) -> Manifests:
        """Return the job's own TransferQueue and WeightSync."""
        return self._built("children", state, self._desired.children)

    def _built(self, what: str, state: JobState, build: Callable[[JobState], Manifests]) -> Manifests:
        key, images, found = (state.owner.uid, what), state.status.images, state.found
        known = self._known.get(key)
        if known is None or known.job is not state.job or (known.images, known.found) != (images, found):
            known = self._known[key] = _Built(state.job, images, found, build(state))
            if len(self._known) > 2 * MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known.manifests
