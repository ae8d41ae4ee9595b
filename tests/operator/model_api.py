"""An API server in memory, which remembers what was done to it.

What the real one would refuse, and what an operator must never do, raises AssertionError here. ``seen_*`` is what the
operator has been told: it may be late, but always has the answers to its own writes, as ``cluster.store`` promises.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from model_samples import JOB, QUEUE, START, failed

from asyncflow.api.job import RLJob
from asyncflow.api.names import DIGEST, LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE
from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.api.status import JobStatus
from asyncflow.api.weights import WeightsStatus, WeightSync
from asyncflow_operator.observed import NodeFree, ObjectView, Owner, PodView, Ref

MODELS: dict[str, tuple[Any, Any]] = {
    "RLJob": (RLJob, JobStatus),
    "TransferQueue": (TransferQueue, QueueStatus),
    "WeightSync": (WeightSync, WeightsStatus),
}

GRACE_S = 20.0


class Refusal(Exception):
    """The API server says no."""


@dataclass(frozen=True)
class CustomResource:
    """Custom resource of the model: owner, spec in force (with a problem, the last accepted), and status."""

    owner: Owner
    model: Any
    status: Any
    problem: str = ""
    problem_reason: str = ""


@dataclass
class ApiServer:
    """The objects of one job. order: shuffles what has no order; quota: whether no pod can be made; refuses: kinds of
    which no object can be made or changed.
    """

    job: RLJob
    order: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = START
    resources: dict[Ref, CustomResource] = field(default_factory=dict)
    pods: dict[str, PodView] = field(default_factory=dict)
    objects: dict[Ref, ObjectView] = field(default_factory=dict)
    nodes: tuple[NodeFree, ...] | None = None
    quota: bool = False
    refuses: set[str] = field(default_factory=set)
    writes: int = 0

    def __post_init__(self) -> None:
        self._uids = iter(range(1, 1_000_000))
        owner = Owner(kind="RLJob", namespace="team", name=JOB.name, uid="uid-job", generation=1, created=self.now)
        self.resources[JOB] = CustomResource(owner, self.job, JobStatus())
        self.seen_resources: dict[Ref, CustomResource] = dict(self.resources)
        self.seen_pods: dict[str, PodView] = {}
        self.seen_objects: dict[Ref, ObjectView] = {}
        self.made: dict[str, list[PodView]] = defaultdict(list)
        self.counted: set[str] = set()
        self.due: Counter[str] = Counter()
        self.secrets: set[tuple[str, str]] = set()

    @property
    def status(self) -> Any:
        """The job's status as it is written."""
        return self.resources[JOB].status

    @property
    def spec(self) -> Any:
        """The job's spec as a person wrote it."""
        return self.resources[JOB].model.spec

    # The API server.

    def apply(self, manifest: dict[str, Any]) -> None:
        """Server-side apply of one object."""
        self.writes += 1
        kind, meta = manifest["kind"], manifest["metadata"]
        ref = Ref(kind, meta["name"])
        if kind in self.refuses:
            raise Refusal(f"{kind} is refused")
        if kind == "Pod":
            self._make(meta)
        elif kind in MODELS:
            self._child(ref, manifest)
        else:
            uid = self.objects[ref].uid if ref in self.objects else self._uid()
            self.objects[ref] = ObjectView(ref=ref, uid=uid, digest=meta["annotations"][DIGEST])
            if kind != "Secret":
                self.seen_objects[ref] = self.objects[ref]
            else:
                self.secrets |= {(ref.name, key) for key in manifest["data"]}

    def check_certificate(self, manifest: dict[str, Any]) -> None:
        """No pod is made before what it mounts of Secrets was written."""
        if manifest["kind"] == "Pod":
            sources = manifest["spec"]["volumes"][0]["projected"]["sources"]
            mounted = [source["secret"] for source in sources if "secret" in source]
            named = {(each["name"], item["key"]) for each in mounted for item in each["items"]}
            assert named <= self.secrets, f"{manifest['metadata']['name']} mounts {named - self.secrets}"

    def delete(self, ref: Ref, uid: str, grace_s: int | None) -> None:
        """Delete an object if it still is the one with this UID."""
        self.writes += 1
        if ref.kind == "RLJob":
            assert self.resources[ref].owner.uid == uid
            self.resources.clear()
            self.pods.clear()
            self.objects.clear()
            return
        if ref.kind != "Pod":
            assert self.objects.pop(ref).uid == uid
            del self.seen_objects[ref]
            return
        pod, seen = self.pods.get(ref.name), self.seen_pods.get(ref.name)
        assert seen is not None, f"{ref.name} was not known to be there"
        assert seen.deleting == (grace_s == 0), f"{ref.name} was deleted twice, or without a grace period"
        if grace_s == 0:
            assert seen.unreachable or self.now > (seen.ends_by or 0.0), f"{ref.name} was still within its grace period"
        if pod is not None and pod.uid == uid:
            self._check_removal(pod)
            self.take(pod, grace_s=GRACE_S if grace_s is None else grace_s)
        self.see(ref.name)

    def take(self, pod: PodView, *, grace_s: float = GRACE_S) -> None:
        """Begin the deletion of a pod, whoever wants it: at once where nothing runs, or where nobody is asked."""
        if pod.node == "" or pod.phase in ("Succeeded", "Failed") or grace_s == 0:
            del self.pods[pod.name]
        else:
            self.pods[pod.name] = replace(pod, deleting=True, ends_by=self.now + grace_s)

    def write_status(self, ref: Ref, status: dict[str, Any]) -> None:
        """Write the status of a custom resource; the schema is the models'."""
        self.writes += 1
        known = self.resources[ref]
        written = MODELS[ref.kind][1].model_validate(status, by_name=False)
        self._check_status(known, written)
        self.resources[ref] = replace(known, status=written)
        self.seen_resources[ref] = self.resources[ref]

    def _make(self, meta: dict[str, Any]) -> None:
        name, labels = meta["name"], meta["labels"]
        assert name not in self.pods, f"{name} is there already"
        if self.quota:
            raise Refusal(f"pods {name!r} is forbidden: exceeded quota: pods")
        pod = PodView(
            name=name,
            uid=self._uid(),
            role=labels[LABEL_ROLE],
            index=int(labels[LABEL_INDEX]),
            attempt=int(labels[LABEL_ATTEMPT]),
            digest=meta["annotations"][DIGEST],
            created=self.now,
        )
        before = self.made[name]
        if before:
            assert pod.attempt >= before[-1].attempt + (before[-1].uid in self.counted), f"{name}: {pod.attempt} again"
        if pod.role == "trainer":
            again = bool(before) and before[-1].attempt == pod.attempt and self.now - before[-1].created >= 11.0
            assert not again or not self._trained(pod.attempt), f"{name}: {pod.attempt} again after it trained"
            others = [each for each in self.pods.values() if each.role == "trainer"]
            assert all(each.attempt == pod.attempt for each in others), "two attempts of the gang at once"
        before.append(pod)
        self.pods[name] = self.seen_pods[name] = pod

    def _trained(self, attempt: int) -> bool:
        """Return whether all ranks of an attempt have existed, so that it may have trained."""
        return all(
            any(pod.attempt == attempt for pod in self.made[f"{JOB.name}-trainer-{index}"])
            for index in range(self.spec.trainer.replicas)
        )

    def _child(self, ref: Ref, manifest: dict[str, Any]) -> None:
        model, status = MODELS[ref.kind]
        known = self.resources.get(ref)
        owner = Owner(kind=ref.kind, namespace="team", name=ref.name, uid=self._uid(), generation=1)  # type: ignore[arg-type]
        spec = model.model_validate({"metadata": {"name": ref.name, "namespace": "team"}, "spec": manifest["spec"]})
        self.resources[ref] = replace(known, model=spec) if known is not None else CustomResource(owner, spec, status())
        self.seen_resources[ref] = self.resources[ref]
        digest = manifest["metadata"]["annotations"][DIGEST]
        self.objects[ref] = self.seen_objects[ref] = ObjectView(
            ref=ref, uid=self.resources[ref].owner.uid, digest=digest
        )

    def _uid(self) -> str:
        return f"uid-{next(self._uids)}"

    def _check_status(self, known: CustomResource, written: Any) -> None:
        times = {each.type: (each.status, each.last_transition_time) for each in known.status.conditions}
        for each in written.conditions:
            assert each.observed_generation <= known.owner.generation
            if times.get(each.type, ("",))[0] == each.status:
                assert times[each.type][1] == each.last_transition_time, f"the time of {each.type} lies"
        for name, record in getattr(written, "failures", {}).items():
            before = known.status.failures.get(name)
            assert before is None or record.attempt >= before.attempt, f"the attempt of {name} went back"
            self._note_counted(name, set(record.counted) - set(before.counted if before is not None else ()))
        if isinstance(written, JobStatus):
            self._check_victims(known, written)
            assert written.attempt >= known.status.attempt
            if known.status.phase in ("Succeeded", "Failed"):
                assert written.phase == known.status.phase

    def _check_victims(self, known: CustomResource, written: JobStatus) -> None:
        """Nobody is chosen to leave but who is too much."""
        chosen = {each.uid for each in known.status.draining}
        new = [each for each in written.draining if each.uid not in chosen]
        rollouts = [pod for pod in self.seen_pods.values() if pod.role == "rollout" and pod.uid not in chosen]
        assert len({each.uid for each in written.draining}) == len(written.draining)
        assert not new or len(new) <= len(rollouts) - known.model.spec.rollout.replicas, "too many are sent away"

    def _note_counted(self, role: str, uids: set[str]) -> None:
        """Take that ends were entered into a record: each once, and those that were failures use budget."""
        for uid in uids:
            assert uid not in self.counted, f"{uid} was counted before"
            self.counted.add(uid)
            pod = next(pod for pod in self.seen_pods.values() if pod.uid == uid)
            self.due[role] += failed(pod)

    def _check_removal(self, pod: PodView) -> None:
        """No pod that runs is deleted without a reason that is on record; what failed is deleted once it is counted."""
        if self.status.phase not in ("Pending", "Starting", "Running"):
            return
        leaving = pod.uid in {each.uid for each in self.status.draining}
        beyond = pod.role == "storage" and pod.index >= self.seen_resources[JOB].model.spec.transfer_queue.storage_units
        if pod.role == "trainer":
            assert pod.attempt < self.status.attempt
        elif not (leaving or beyond):
            assert pod.uid in self.record(pod.role).counted, f"{pod.name} was deleted for no reason on record"

    def record(self, role: str) -> Any:
        holder = self.resources[QUEUE] if role in ("controller", "storage") else self.resources[JOB]
        return holder.status.failures[role]

    def see(self, name: str) -> None:
        """Bring the operator's view of one pod up to date."""
        if name in self.pods:
            self.seen_pods[name] = self.pods[name]
        else:
            self.seen_pods.pop(name, None)
