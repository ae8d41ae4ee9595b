"""Observation: builds the state that ``decide`` reads from the store.

Invariants: an observation only reads data that the operator already has and sends no request to the server. Pods and
objects that remain of a deleted resource of the same name are shown as being deleted: their names are not free yet, and
their ends are not those of the new resource.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from asyncflow.api.job import RLJob
from asyncflow.api.names import RoleName
from asyncflow.api.weights import JobWeightsSpec, WeightsSpec
from asyncflow_operator.cluster.kinds import CUSTOM_KINDS, POD, QUEUE, RLJOB
from asyncflow_operator.cluster.owners import CustomResource
from asyncflow_operator.cluster.store import Entry, ObjectGroup, ObjectStore
from asyncflow_operator.decide.naming import NO_SYNC, NamedSync, weights_for
from asyncflow_operator.decide.progress import FINISHED
from asyncflow_operator.desired.blueprint import requested_by_job, requested_by_queue, requested_by_sync
from asyncflow_operator.desired.gang import refers_to
from asyncflow_operator.desired.objects import digest
from asyncflow_operator.drivers import LEADERS
from asyncflow_operator.observed import (
    LEFT_BEHIND,
    Denial,
    DriverProbe,
    JobState,
    NodeFree,
    ObjectView,
    Owner,
    PodView,
    Ref,
    ReferredObject,
    SyncState,
    TransferQueueState,
)
from asyncflow_operator.references import Key, References, named_by
from asyncflow_operator.worklist import backoff

ENDING_S: Final = 30.0
_CUSTOM: Final = frozenset(kind.name for kind in CUSTOM_KINDS)


@dataclass(slots=True)
class _Denied:
    """Refusals for a custom resource at one generation.

    times: the number of refused plans; until: the monotonic time in seconds of the next attempt.
    """

    generation: int
    denials: dict[Ref, Denial]
    times: int = 1
    until: float = 0.0


class RefusalRecord:
    """Record of the server's refusals: refused objects, and namespaces that are being deleted.

    A refused object is retried after a pause that grows with each refusal, or immediately when the spec changes. A
    namespace may be created again, so a record that it is being deleted expires after ``ENDING_S`` seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rng = random.Random()
        self._denied: dict[Key, _Denied] = {}
        self._ending: dict[str, float] = {}

    def note(
        self, key: Key, generation: int, denials: Collection[Denial], *, tried: Collection[Ref], ends: bool
    ) -> None:
        """Record a plan's outcome. tried: objects that it tried to write; ends: the namespace is being deleted."""
        if ends:
            self._ending[key.namespace] = self._clock() + ENDING_S
        known = self._denied.get(key)
        if known is None or known.generation != generation:
            known = _Denied(generation, {})
        elif denials and self._clock() >= known.until:
            known.times += 1
        kept = {ref: denial for ref, denial in known.denials.items() if ref not in tried}
        known.denials = kept | {denial.ref: denial for denial in denials}
        if denials and self._clock() >= known.until:
            known.until = self._clock() + backoff(known.times, uniform=self._rng.uniform)
        if known.denials:
            self._denied[key] = known
        else:
            self._denied.pop(key, None)

    def keep(self, key: Key, wanted: Collection[Ref]) -> bool:
        """Drop the refusals of objects that are no longer ``wanted``, and return whether there were any."""
        known = self._denied.get(key)
        if known is None or known.denials.keys() <= set(wanted):
            return False
        known.denials = {ref: denial for ref, denial in known.denials.items() if ref in wanted}
        if not known.denials:
            del self._denied[key]
        return True

    def denied(self, key: Key) -> tuple[Denial, ...]:
        """Return the recorded refusals for a custom resource."""
        known = self._denied.get(key)
        return tuple(known.denials.values()) if known is not None else ()

    def paused(self, key: Key, generation: int) -> tuple[frozenset[Ref], float | None]:
        """Return the objects of an owner that are not retried yet, and the seconds until they are."""
        known = self._denied.get(key)
        if known is None or known.generation != generation or self._clock() >= known.until:
            return frozenset(), None
        return frozenset(known.denials), known.until - self._clock()

    def ends(self, namespace: str) -> bool:
        """Return whether a namespace is being deleted, so that nothing can be created in it."""
        until = self._ending.get(namespace)
        if until is not None and self._clock() >= until:
            del self._ending[namespace]
            until = None
        return until is not None

    def forget(self, key: Key) -> None:
        """Drop the refusals for a custom resource that was deleted."""
        self._denied.pop(key, None)


class Observer:
    """Reader of the store.

    probe: returns the last answer of a driver, by the job's UID; nodes: returns the free resources of the nodes, None
    if they have not been read; find: returns a cluster-scoped object that a job refers to, None if it was not read yet.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        probe: Callable[[str], DriverProbe],
        nodes: Callable[[], tuple[NodeFree, ...] | None],
        refused: RefusalRecord,
        find: Callable[[Ref, Key], ReferredObject | None] = lambda *_: None,
        references: References | None = None,
    ) -> None:
        self._store = store
        self._probe = probe
        self._nodes = nodes
        self._refused = refused
        self._find = find
        self._references = references or References()
        self._resolved: dict[Key, _Resolved] = {}

    def resource(self, key: Key) -> CustomResource | None:
        """Return a custom resource, None if it does not exist."""
        entry = self._store.get(*key)
        if entry is None:
            self._resolved.pop(key, None)
        return None if entry is None else entry.view

    def job(self, resource: CustomResource) -> JobState:
        """Return the state of a job."""
        owner = resource.owner
        entries = self._store.of(ObjectGroup(owner.namespace, owner.kind, owner.name))
        queues = {entry.uid: entry.view for entry in entries if entry.kind == QUEUE.name and entry.owner == owner.uid}
        pods, objects = _members(entries, {owner.uid} | queues.keys())
        job, problem, problem_reason = self._with_weights(resource)
        if job is not None:
            pods = _compared(pods, partial(requested_by_job, job))
        return JobState(
            owner=owner,
            job=job,
            problem=problem,
            problem_reason=problem_reason,
            status=resource.status,
            queue=next((queue.status for queue in queues.values()), None),
            pods=pods,
            objects=objects,
            probe=_of_leader(self._probe(owner.uid), pods),
            scaled_by=resource.scaled_by,
            namespace_ending=self._refused.ends(owner.namespace),
            denied=tuple(
                denial for each in (resource, *queues.values()) for denial in self._refused.denied(_key(each))
            ),
            nodes=self._nodes_for(pods),
            found=self._found(resource, job, objects),
        )

    def queue(self, resource: CustomResource) -> TransferQueueState:
        """Return the state of a queue."""
        owner, job = self._with_job(resource)
        group = ObjectGroup(
            owner.namespace, *(resource.controller if resource.controller[0] in _CUSTOM else (owner.kind, owner.name))
        )
        pods, objects = _members(self._store.of(group), {owner.uid})
        if job is not None and job.job is not None:
            pods = _compared(pods, partial(requested_by_job, job.job))
        elif job is None and resource.model is not None:
            pods = _compared(pods, lambda _: requested_by_queue(resource.model))
        return TransferQueueState(
            owner=owner,
            queue=resource.model,
            problem=resource.problem,
            problem_reason=resource.problem_reason,
            status=resource.status,
            job=job,
            pods=pods,
            objects=objects,
            namespace_ending=self._refused.ends(owner.namespace),
            denied=self._refused.denied(_key(resource)),
            nodes=None if job else self._nodes_for(pods),
        )

    def sync(self, resource: CustomResource) -> SyncState:
        """Return the state of a WeightSync, of a job or of a published model."""
        owner, job = self._with_job(resource)
        if resource.controller[0] != RLJOB.name and resource.model is not None:
            job = self._served(resource)
        pods, objects = _members(self._store.of(ObjectGroup(owner.namespace, owner.kind, owner.name)), {owner.uid})
        if resource.model is not None and resource.model.spec.publishes is not None:
            pods = _compared(pods, lambda _: requested_by_sync(resource.model))
        return SyncState(
            owner=owner,
            sync=resource.model,
            problem=resource.problem,
            problem_reason=resource.problem_reason,
            status=resource.status,
            job=job,
            pods=pods,
            objects=objects,
            probe=_of_leader(self._probe(owner.uid), pods),
            namespace_ending=self._refused.ends(owner.namespace),
            denied=self._refused.denied(_key(resource)),
            nodes=self._nodes_for(pods),
        )

    def _nodes_for(self, pods: Collection[PodView]) -> tuple[NodeFree, ...] | None:
        """Return the free resources of the nodes if one of ``pods`` is unschedulable, None otherwise."""
        return self._nodes() if any(pod.unschedulable for pod in pods) else None

    def _with_weights(self, resource: CustomResource) -> tuple[RLJob | None, str, str]:
        """Return the spec in force with the fields of its WeightSync, and the problem and reason if a spec is refused.

        If the WeightSync that the job names is not available, a job that has started keeps the fields that it had.
        """
        job, status = resource.model, resource.status
        named = None if job is None else named_by(job, resource.owner.namespace)
        if named is None:
            return job, resource.problem, resource.problem_reason
        weights, refusal = weights_for(
            resource.owner.name,
            self._sync(named),
            staggered=job.spec.schedule.update == "staggered",
            current=status.weights if status.begun else None,
        )
        if weights is None:
            return None, refusal, NO_SYNC
        key = _key(resource)
        known = self._resolved.get(key)
        if known is None or known.job is not job or known.weights != weights:
            known = self._resolved[key] = _Resolved(job, weights, _resolved(job, weights))
        if resource.problem or not refusal:
            return known.resolved, resource.problem, resource.problem_reason
        return known.resolved, refusal, NO_SYNC

    def _sync(self, named: Key) -> NamedSync:
        """Return the observed state of a WeightSync that a job names."""
        entry, user = self._store.get(*named), self._user(named)
        if entry is None:
            return NamedSync(name=named.name)
        sync: CustomResource = entry.view
        return NamedSync(
            name=named.name,
            exists=True,
            spec=None if sync.owner.deleting or sync.model is None else sync.model.spec,
            owned=sync.controller[0] == RLJOB.name,
            user="" if user is None else user.owner.name,
        )

    def _user(self, named: Key) -> CustomResource | None:
        """Return the job that uses a WeightSync: of the unfinished jobs that name it one that has its fields, otherwise
        the oldest one. Creation times are whole seconds, so a job that comes later may count as older.
        """
        entries = (self._store.get(*key) for key in self._references.by(named))
        jobs = [entry.view for entry in entries if entry is not None and entry.view.status.phase not in FINISHED]
        return min(jobs, key=lambda job: (not job.status.weights, job.owner.created, job.owner.name), default=None)

    def _served(self, resource: CustomResource) -> JobState | None:
        """Return the job whose versions a WeightSync without an owner shows: its source, or the job that uses it."""
        source, job = named_by(resource.model, resource.owner.namespace), None
        if source is None:
            job = self._user(_key(resource))
        elif (entry := self._store.get(*source)) is not None:
            job = entry.view
        return None if job is None else self.job(job)

    def _found(
        self, resource: CustomResource, job: RLJob | None, objects: Mapping[Ref, ObjectView]
    ) -> dict[Ref, ReferredObject]:
        """Return the cluster-scoped objects that a job refers to and that have been read."""
        refs = refers_to(job, resource.owner, objects) if job is not None else ()
        read = {ref: self._find(ref, _key(resource)) for ref in refs}
        return {ref: found for ref, found in read.items() if found is not None}

    def _with_job(self, resource: CustomResource) -> tuple[Owner, JobState | None]:
        """Return the owner and its job. If that job was deleted, the owner is marked as being deleted too."""
        owner, (kind, name) = resource.owner, resource.controller
        if kind != RLJOB.name:
            return owner, None
        entry = self._store.get(owner.kind, owner.namespace, owner.name)
        job = self._store.get(kind, owner.namespace, name)
        if entry is None or job is None or entry.owner != job.uid:
            return replace(owner, deleting=True), None
        return owner, self.job(job.view)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A job with the fields of the WeightSync that it names; the same object as long as both stay unchanged."""

    job: RLJob
    weights: WeightsSpec
    resolved: RLJob


def _resolved(job: RLJob, weights: WeightsSpec) -> RLJob:
    return job.with_weights(JobWeightsSpec.of(weights, name=job.spec.weight_sync.name))


def _key(resource: CustomResource) -> Key:
    return Key(resource.owner.kind, resource.owner.namespace, resource.owner.name)


def _of_leader(probe: DriverProbe, pods: Collection[PodView]) -> DriverProbe:
    """Return the answer if it is from the present driver or publisher pod; the answer of an earlier pod is dropped."""
    others = [pod.uid for pod in pods if pod.role in LEADERS and pod.uid != probe.pod]
    return DriverProbe() if probe.pod and others else probe


def _compared(pods: tuple[PodView, ...], requested: Callable[[RoleName], Mapping[str, object]]) -> tuple[PodView, ...]:
    """Return the pods, with ``outdated`` set for each that has not started and would be built differently now.

    requested: returns the parts of the spec from which a pod of a role is built.
    """
    wanted = {role: digest(requested(role)) for role in {pod.role for pod in pods if _is_unstarted(pod)}}
    return tuple(
        replace(pod, outdated=True) if _is_unstarted(pod) and wanted[pod.role] != pod.digest else pod for pod in pods
    )


def _is_unstarted(pod: PodView) -> bool:
    return bool(pod.digest) and pod.phase == "Pending" and pod.started is None and not pod.deleting


def _members(entries: Collection[Entry[Any]], owners: set[str]) -> tuple[tuple[PodView, ...], dict[Ref, ObjectView]]:
    """Return the pods, ordered by name, and the other objects of ``owners`` or of an owner that no longer exists.

    An object that no custom resource owns is left out, whatever its labels say.
    """
    others = {entry.uid for entry in entries if entry.kind in _CUSTOM} - owners
    pods: list[PodView] = []
    objects: dict[Ref, ObjectView] = {}
    for entry in entries:
        if entry.kind == RLJOB.name or not entry.owner or entry.owner in others:
            continue
        left_behind = entry.owner not in owners
        if entry.kind == POD.name:
            pod: PodView = entry.view
            pods.append(replace(pod, deleting=True, attempt=LEFT_BEHIND) if left_behind else pod)
        else:
            view = _as_object(entry.view) if entry.kind in _CUSTOM else entry.view
            objects[view.ref] = replace(view, deleting=True) if left_behind else view
    return tuple(sorted(pods, key=lambda pod: pod.name)), objects


def _as_object(resource: CustomResource) -> ObjectView:
    owner = resource.owner
    ref = Ref(owner.kind, owner.name)
    return ObjectView(
        ref=ref, uid=owner.uid, digest=resource.digest, held=resource.held, phase="", deleting=owner.deleting
    )
