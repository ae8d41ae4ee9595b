"""From the store to the state that ``decide`` reads.

Invariant: pure reading of what is known now; nothing is asked of the server. What an object of ours of the same name
left behind is seen as ending: its seat is not free, and it is nobody's failure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from asyncflow_operator.cluster.kinds import OURS, POD, QUEUE, RLJOB
from asyncflow_operator.cluster.owners import Mine
from asyncflow_operator.cluster.store import Entry, Group, Store
from asyncflow_operator.desired.gang import refers_to
from asyncflow_operator.observed import (
    Denial,
    Found,
    JobState,
    NodeFree,
    ObjectView,
    Owner,
    PodView,
    Probe,
    QueueState,
    Ref,
    SyncState,
)
from asyncflow_operator.worklist import backoff

ENDING_S: Final = 30.0
_OURS: Final = frozenset(kind.name for kind in OURS)


class Key(NamedTuple):
    """One object of ours."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return "/".join(self)


@dataclass(slots=True)
class _Denied:
    """The refusals that concern one of our objects at one generation.

    until: when it is tried again (seconds, monotonic); times: how often it was refused.
    """

    generation: int
    denials: dict[Ref, Denial]
    times: int = 1
    until: float = 0.0


class Refused:
    """Record of what the server refused: objects, and namespaces in which nothing can be made any more.

    What was refused is left alone for a while, longer each time, and everything else goes on; when the spec changes it
    is tried at once. A namespace may be made again under its name, so that it ends is believed for ``ENDING_S`` only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rng = random.Random()
        self._denied: dict[Key, _Denied] = {}
        self._ending: dict[str, float] = {}

    def note(
        self, key: Key, generation: int, denials: Collection[Denial], *, tried: Collection[Ref], ends: bool
    ) -> None:
        """Take how a plan for an object ended that ``tried`` to write these objects."""
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
        """Forget refusals of what is not ``wanted`` any more; say whether there were any."""
        known = self._denied.get(key)
        if known is None or known.denials.keys() <= set(wanted):
            return False
        known.denials = {ref: denial for ref, denial in known.denials.items() if ref in wanted}
        if not known.denials:
            del self._denied[key]
        return True

    def denied(self, key: Key) -> tuple[Denial, ...]:
        """Return what is refused of an object."""
        known = self._denied.get(key)
        return tuple(known.denials.values()) if known is not None else ()

    def resting(self, key: Key, generation: int) -> tuple[frozenset[Ref], float | None]:
        """Return what is left alone now of an object, and the seconds until it is tried again."""
        known = self._denied.get(key)
        if known is None or known.generation != generation or self._clock() >= known.until:
            return frozenset(), None
        return frozenset(known.denials), known.until - self._clock()

    def ends(self, namespace: str) -> bool:
        """Return whether nothing can be made in a namespace."""
        until = self._ending.get(namespace)
        if until is not None and self._clock() >= until:
            del self._ending[namespace]
            until = None
        return until is not None

    def forget(self, key: Key) -> None:
        """Drop what is known of an object that is gone."""
        self._denied.pop(key, None)


class Observer:
    """Reads the store.

    probe: gives a driver's last answer by the job's UID; nodes: what the nodes have left; find: gives what was read of
    an object of the cluster that a job refers to, None where it has yet to be.
    """

    def __init__(
        self,
        store: Store,
        *,
        probe: Callable[[str], Probe],
        nodes: Callable[[], tuple[NodeFree, ...] | None],
        refused: Refused,
        find: Callable[[Ref, Key], Found | None] = lambda *_: None,
    ) -> None:
        self._store = store
        self._probe = probe
        self._nodes = nodes
        self._refused = refused
        self._find = find

    def mine(self, key: Key) -> Mine | None:
        """Return an object of ours, None where there is none."""
        entry = self._store.get(*key)
        return None if entry is None else entry.view

    def job(self, mine: Mine) -> JobState:
        """Return the state of a job."""
        owner = mine.owner
        entries = self._store.of(Group(owner.namespace, owner.kind, owner.name))
        queues = {entry.uid: entry.view for entry in entries if entry.kind == QUEUE.name and entry.owner == owner.uid}
        pods, objects = _members(entries, {owner.uid} | queues.keys())
        return JobState(
            owner=owner,
            job=mine.model,
            problem=mine.problem,
            problem_reason=mine.problem_reason,
            status=mine.status,
            queue=next((queue.status for queue in queues.values()), None),
            pods=pods,
            objects=objects,
            probe=_of_driver(self._probe(owner.uid), pods),
            scaled_by=mine.scaled_by,
            namespace_ending=self._refused.ends(owner.namespace),
            denied=tuple(denial for each in (mine, *queues.values()) for denial in self._refused.denied(_key(each))),
            nodes=self._nodes() if any(pod.unschedulable for pod in pods) else None,
            found=self._found(mine, objects),
        )

    def queue(self, mine: Mine) -> QueueState:
        """Return the state of a queue."""
        owner, job = self._standing(mine)
        group = Group(owner.namespace, *(mine.controller if mine.controller[0] in _OURS else (owner.kind, owner.name)))
        pods, objects = _members(self._store.of(group), {owner.uid})
        return QueueState(
            owner=owner,
            queue=mine.model,
            problem=mine.problem,
            problem_reason=mine.problem_reason,
            status=mine.status,
            job=job,
            pods=pods,
            objects=objects,
            namespace_ending=self._refused.ends(owner.namespace),
            denied=self._refused.denied(_key(mine)),
        )

    def sync(self, mine: Mine) -> SyncState:
        """Return the state of the weight versions of a job."""
        owner, job = self._standing(mine)
        return SyncState(
            owner=owner,
            sync=mine.model,
            problem=mine.problem,
            problem_reason=mine.problem_reason,
            status=mine.status,
            job=job,
        )

    def _found(self, mine: Mine, objects: Mapping[Ref, ObjectView]) -> dict[Ref, Found]:
        """Return what has been read of the cluster's objects that a job refers to."""
        refs = refers_to(mine.model, mine.owner, objects) if mine.model is not None else ()
        read = {ref: self._find(ref, _key(mine)) for ref in refs}
        return {ref: found for ref, found in read.items() if found is not None}

    def _standing(self, mine: Mine) -> tuple[Owner, JobState | None]:
        """Return an object as it stands, and its job; what belongs to a job that is gone goes, too."""
        owner, (kind, name) = mine.owner, mine.controller
        if kind != RLJOB.name:
            return owner, None
        entry = self._store.get(owner.kind, owner.namespace, owner.name)
        job = self._store.get(kind, owner.namespace, name)
        if entry is None or job is None or entry.owner != job.uid:
            return replace(owner, deleting=True), None
        return owner, self.job(job.view)


def _key(mine: Mine) -> Key:
    return Key(mine.owner.kind, mine.owner.namespace, mine.owner.name)


def _of_driver(probe: Probe, pods: Collection[PodView]) -> Probe:
    """Return what the driver said that the job has now; what an earlier one said holds no more."""
    others = [pod.uid for pod in pods if pod.role == "driver" and pod.uid != probe.pod]
    return Probe() if probe.pod and others else probe


def _members(entries: Collection[Entry[Any]], owners: set[str]) -> tuple[tuple[PodView, ...], dict[Ref, ObjectView]]:
    """Return the pods, ordered by name, and the other objects of ``owners`` or of an owner that exists no more.

    What nobody of ours owns is somebody else's, whatever its labels say.
    """
    others = {entry.uid for entry in entries if entry.kind in _OURS} - owners
    pods: list[PodView] = []
    objects: dict[Ref, ObjectView] = {}
    for entry in entries:
        if entry.kind == RLJOB.name or not entry.owner or entry.owner in others:
            continue
        left_behind = entry.owner not in owners
        if entry.kind == POD.name:
            pod: PodView = entry.view
            pods.append(replace(pod, deleting=True) if left_behind else pod)
        else:
            view = _as_object(entry.view) if entry.kind in _OURS else entry.view
            objects[view.ref] = replace(view, deleting=True) if left_behind else view
    return tuple(sorted(pods, key=lambda pod: pod.name)), objects


def _as_object(mine: Mine) -> ObjectView:
    owner = mine.owner
    ref = Ref(owner.kind, owner.name)
    return ObjectView(ref=ref, uid=owner.uid, digest=mine.digest, held=mine.held, phase="", deleting=owner.deleting)
