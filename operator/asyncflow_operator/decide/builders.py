"""What a decision needs of the builders of objects; ``asyncflow_operator.desired`` is the real one.

Invariant: an object is written only where the digest that was observed differs from the digest that is wanted. A Secret
is never read, so it goes along with the first pod that mounts it, and again when a pod says that it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from asyncflow.api.job import RLJob
from asyncflow.api.names import DIGEST, RoleName
from asyncflow_operator.actions import Apply
from asyncflow_operator.observed import JobState, Manifest, ObjectView, PodView, QueueState, Ref


class DesiredJob(Protocol):
    """Objects of a job."""

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Give everything but pods and children."""

    def children(self, state: JobState) -> tuple[Manifest, ...]:
        """Give the job's own TransferQueue and WeightSync."""

    def pod(self, state: JobState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Give one pod."""

    def images(self, job: RLJob) -> dict[str, str]:
        """Give the image of each role, as this operator would have it now."""


class DesiredQueue(Protocol):
    """Objects of a TransferQueue."""

    def queue_supporting(self, state: QueueState) -> tuple[Manifest, ...]:
        """Give everything but pods."""

    def queue_pod(self, state: QueueState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Give one pod."""


def stale(
    manifests: Sequence[Manifest], *, seen: Mapping[Ref, ObjectView], pods: Sequence[PodView], begins: bool
) -> tuple[Apply, ...]:
    """Give what must be written of ``manifests``. begins: whether the first pod that mounts the Secret is made now."""
    return tuple(
        Apply(manifest=manifest) for manifest in manifests if _differs(manifest, seen=seen, pods=pods, begins=begins)
    )


def _differs(manifest: Manifest, *, seen: Mapping[Ref, ObjectView], pods: Sequence[PodView], begins: bool) -> bool:
    kind, meta = manifest["kind"], manifest["metadata"]
    view = seen.get(Ref(kind, meta["name"]))
    if view is not None:
        wanted: str = meta["annotations"][DIGEST]
        return view.digest != wanted
    if kind == "Secret":
        return begins or any(meta["name"] in pod.waiting_message for pod in pods)
    return True
