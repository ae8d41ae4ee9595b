"""Builders of objects as a decision needs them, and the choice of objects beside pods that are to be written;
``asyncflow_operator.desired`` is the real builder.

Invariant: an object is written where the digest that was observed differs from the digest that is wanted, or where
somebody else has changed what was written (``upkeep``). A Secret is never read, so it goes along with the first pod
that mounts it, and again when a pod that has a node does not begin for ``UNBEGUN_S`` seconds.
"""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from asyncflow.api.job import RLJob
from asyncflow.api.names import DIGEST, RoleName
from asyncflow_operator.actions import Apply, Note
from asyncflow_operator.decide.moments import Alarm
from asyncflow_operator.decide.upkeep import intact
from asyncflow_operator.observed import Denial, JobState, Manifest, ObjectView, PodView, QueueState, Ref

UNBEGUN_S: Final = 20.0
_PROJECTED: Final = {"configMap": "ConfigMap", "secret": "Secret"}
_MOUNTING: Final = frozenset(("", "ContainerCreating", "PodInitializing"))


class DesiredJob(Protocol):
    """Objects of a job."""

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Return every object of the job, except its pods and custom resources."""

    def children(self, state: JobState) -> tuple[Manifest, ...]:
        """Return the job's own TransferQueue and WeightSync."""

    def pod(self, state: JobState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return one pod."""

    def images(self, job: RLJob) -> dict[str, str]:
        """Return the image of each role, as this operator would have it now."""


class DesiredQueue(Protocol):
    """Objects of a TransferQueue."""

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Return every object of the job that a queue belongs to, except its pods and custom resources."""

    def queue_supporting(self, state: QueueState) -> tuple[Manifest, ...]:
        """Return every object of the queue, except its pods."""

    def queue_pod(self, state: QueueState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return one pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """The writes that objects other than pods need.

    write: objects to create or change; absent: objects that do not exist; going: those of them that are still being
    deleted; changed: objects that somebody else has changed.
    """

    write: tuple[Apply, ...]
    absent: Mapping[Ref, Manifest]
    going: Mapping[Ref, Manifest]
    changed: tuple[Ref, ...]

    def with_needs(self, pods: Iterable[Manifest]) -> Iterator[Apply]:
        """Return pods to be made, each with those of the absent objects that it needs."""
        for pod in pods:
            yield Apply(manifest=pod, needs=needs(pod, self.absent))


def upkeep(
    manifests: Sequence[Manifest],
    *,
    seen: Mapping[Ref, ObjectView],
    pods: Collection[PodView] = (),
    begins: bool = False,
    alarm: Alarm,
) -> Upkeep:
    """Compare what is wanted with what was seen. begins: whether the first pod that mounts the Secret is made now."""
    absent: dict[Ref, Manifest] = {}
    going: dict[Ref, Manifest] = {}
    write, changed = [], []
    for manifest in manifests:
        action = Apply(manifest=manifest)
        view = seen.get(action.ref)
        if action.ref.kind == "Secret" and not (begins or _missed(action.ref.name, pods, alarm)):
            continue
        if view is None or view.deleting:
            absent[action.ref] = manifest
        if view is not None and view.deleting:
            going[action.ref] = manifest
        elif view is None or view.digest != manifest["metadata"]["annotations"][DIGEST]:
            write.append(action)
        elif not intact(view.held, manifest):
            write.append(action)
            changed.append(action.ref)
    return Upkeep(write=tuple(write), absent=absent, going=going, changed=tuple(changed))


def put_back(changed: Iterable[Ref], denied: Collection[Denial], *, owner: str) -> Iterator[Note]:
    """Yield a warning for each changed object that is put back, which says where the change belongs."""
    refused = {denial.ref for denial in denied}
    for ref in (ref for ref in changed if ref not in refused):
        words = f"Somebody changed {ref.kind}/{ref.name}; it is put back, because it follows {owner}"
        yield Note(type="Warning", reason="PutBack", message=f"{words}: change that instead")


def needs(pod: Manifest, objects: Mapping[Ref, Manifest]) -> frozenset[Ref]:
    """Return those of ``objects`` that ``pod`` refers to, and its policies, which must be there before it runs."""
    spec = pod["spec"]
    named = {Ref("ServiceAccount", spec.get("serviceAccountName", ""))}
    for volume in spec.get("volumes", ()):
        if "persistentVolumeClaim" in volume:
            named.add(Ref("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for source in volume.get("projected", {}).get("sources", ()):
            named |= {Ref(kind, source[key]["name"]) for key, kind in _PROJECTED.items() if key in source}
    labels = pod["metadata"]["labels"].items()
    return frozenset(ref for ref, manifest in objects.items() if ref in named or _selects(manifest, labels))


def _selects(manifest: Manifest, labels: ItemsView[str, str]) -> bool:
    """Return whether ``manifest`` is a policy of the pods that have these labels."""
    if manifest["kind"] != "NetworkPolicy":
        return False
    selected: Mapping[str, str] = manifest["spec"]["podSelector"]["matchLabels"]
    return selected.items() <= labels


def _missed(secret: str, pods: Iterable[PodView], alarm: Alarm) -> bool:
    """Return whether a pod may be waiting for the Secret: a kubelet does not report all that it cannot mount."""
    waiting = [pod for pod in pods if pod.scheduled and pod.phase == "Pending" and not pod.deleting]
    silent = [pod for pod in waiting if pod.waiting in _MOUNTING and not alarm.until(pod.created + UNBEGUN_S)]
    return bool(silent) or any(secret in pod.waiting_message for pod in waiting)
