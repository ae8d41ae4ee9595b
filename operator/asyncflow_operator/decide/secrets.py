"""Upkeep of Secrets: which ones to write now, and which ones a pod needs before it is created.

A Secret is never read. After it has been written, the status records its number of certificates and their period. A
Secret is written if the status does not record it, if a process has an index beyond its certificates, when the next
period starts, and if a pod that should mount it does not start, since the Secret may have been deleted.

Certificates are renewed within a day after the start of their period, which is four days before they expire. The time
of the day depends on the owner's UID, so that the renewals of all jobs are spread.

Invariants: a Secret is recorded only after the API server has accepted it. No pod is created whose certificate was
never written or expires within the period.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from asyncflow.api.names import STORE_ROLES
from asyncflow.api.records import SecretRecord
from asyncflow.plan.certificates import PERIOD_S, period_of
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Apply
from asyncflow_operator.decide.replicas import PodReplica
from asyncflow_operator.decide.times import Alarm, from_rfc3339, to_rfc3339
from asyncflow_operator.desired.secrets import KEYS, LEAVES, OwnerSecrets, SecretPart, part_name
from asyncflow_operator.observed import Manifest, Owner, PodView, Ref

UNBEGUN_S: Final = 20.0
"""Seconds after which a pod that has a node but has not started may lack a Secret that it mounts."""
_AGAIN_S: Final = 60.0
"""Least seconds between two writes of a Secret that pods may lack."""
_SPREAD_S: Final = PERIOD_S // 2
_AT_ONCE: Final = 4 * LEAVES
"""Most certificates of a role to make in one decision. Each takes 0.3 ms, in which the operator does nothing else."""
_MOUNTING: Final = frozenset(("", "ContainerCreating", "PodInitializing"))
_HAVE_KEYS: Final = frozenset(("driver", *STORE_ROLES))


class DesiredSecrets(Protocol):
    """Interface for the Secrets of jobs and queues."""

    def secret(self, owner: Owner, part: SecretPart) -> Manifest:
        """Return a Secret."""

    def secrets(self, owner: Owner) -> OwnerSecrets:
        """Return the secrets of an owner, which give the names of its Secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretUpkeep:
    """Required writes of Secrets.

    write: the Secrets to write; needed: those of them that must exist before a pod that mounts them is created; kept:
    the present records; written: the records to store once a Secret has been written, with the name of its part.
    """

    write: tuple[Apply, ...]
    needed: Mapping[Ref, Manifest]
    kept: Mapping[str, SecretRecord]
    written: Mapping[Ref, tuple[str, SecretRecord]]

    @property
    def records(self) -> Mapping[str, SecretRecord]:
        """The records once all Secrets have been written."""
        return {**self.kept, **dict(self.written.values())}


def secret_upkeep(
    owner: Owner,
    roles: Sequence[Role],
    *,
    external_roles: Sequence[str],
    pods: Collection[PodView],
    made: Iterable[PodReplica] = (),
    records: Mapping[str, SecretRecord],
    desired: DesiredSecrets,
    alarm: Alarm,
) -> SecretUpkeep:
    """Compare the required Secrets of a job or a queue with the recorded ones.

    Of many missing certificates only the first are written; the decision that follows their record writes the next.

    external_roles: roles outside the pods, each of which gets a certificate; pods: the existing pods; made: the
    replicas to create now.
    """
    names, write = desired.secrets(owner), []
    needed: dict[Ref, Manifest] = {}
    kept: dict[str, SecretRecord] = {}
    written: dict[Ref, tuple[str, SecretRecord]] = {}
    leaves: Counter[str] = Counter()
    highest: dict[str, int] = {role.name: -1 for role in roles}
    for role, index in ((each.role, each.index) for group in (pods, made) for each in group):
        highest[role] = max(highest.get(role, -1), index)
    period = _period(owner, alarm.now)
    alarm.until((period + 1) * PERIOD_S + _renewal_offset_s(owner))
    for part in _parts(roles, external_roles, highest, period=period):
        record, name, usable = records.get(part.name), names.name(part.name), False
        if record is not None:
            kept[part.name] = record
            same = record.name == name and record.leaves >= part.leaves
            usable = same and _lasts(record, part.period)
            if same and record.period == part.period and not _may_be_missing(part, record, pods, alarm):
                continue
        if leaves[part.role] >= _AT_ONCE:
            continue
        leaves[part.role] += part.leaves
        action = Apply(manifest=desired.secret(owner, part))
        write.append(action)
        if not usable:
            needed[action.ref] = action.manifest
        time = to_rfc3339(alarm.now)
        written[action.ref] = part.name, SecretRecord(name=name, leaves=part.leaves, period=part.period, time=time)
    return SecretUpkeep(write=tuple(write), needed=needed, kept=kept, written=written)


def certified(
    owner: Owner, made: Iterable[PodReplica], *, records: Mapping[str, SecretRecord], now: float
) -> Iterator[PodReplica]:
    """Yield the replicas of which an unexpired certificate is recorded."""
    period = _period(owner, now)
    for each in made:
        record = records.get(part_name(each.role, each.index))
        if record is not None and each.index % LEAVES < record.leaves and _lasts(record, period):
            yield each


def _lasts(record: SecretRecord, period: int) -> bool:
    return record.period >= period - 1


def _parts(
    roles: Sequence[Role], external_roles: Sequence[str], highest: Mapping[str, int], *, period: int
) -> Iterator[SecretPart]:
    """Yield the required parts: whole parts, up to the highest index in use. highest: highest pod index, by role."""
    yield SecretPart(role=KEYS)
    for external in external_roles:
        yield SecretPart(role=external, leaves=1, period=period)
    for role in roles:
        last = max(role.replicas - 1, highest[role.name], 0)
        count = max(role.most, last + 1)
        for first in range(0, last + 1, LEAVES):
            yield SecretPart(role=role.name, first=first, leaves=min(LEAVES, count - first), period=period)


def _period(owner: Owner, now: float) -> int:
    """Return the period of the certificates that ``owner`` should have now."""
    return period_of(now - _renewal_offset_s(owner))


def _renewal_offset_s(owner: Owner) -> int:
    """Return the seconds from the start of a period to the renewal of the certificates of ``owner``."""
    return zlib.crc32(owner.uid.encode()) % _SPREAD_S


def _may_be_missing(part: SecretPart, record: SecretRecord, pods: Iterable[PodView], alarm: Alarm) -> bool:
    """Return whether a pod may wait for a recorded Secret: the kubelet names it, or the pod has not started, for which
    the kubelet may give no reason, and the Secret was not written since the pod should have started.
    """
    since = from_rfc3339(record.time) or 0.0
    lacking = False
    for pod in pods:
        if not (pod.scheduled and pod.phase == "Pending" and not pod.deleting and _mounts(pod, part)):
            continue
        start_by = pod.created + UNBEGUN_S
        silent = pod.waiting in _MOUNTING and since < start_by and not alarm.until(start_by)
        lacking = lacking or silent or record.name in pod.waiting_message
    return lacking and not alarm.until(since + _AGAIN_S)


def _mounts(pod: PodView, part: SecretPart) -> bool:
    return pod.role in _HAVE_KEYS if part.role == KEYS else part_name(pod.role, pod.index) == part.name
