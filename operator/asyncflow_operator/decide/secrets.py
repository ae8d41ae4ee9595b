"""Upkeep of Secrets: which are written now, and which a pod needs before it is made.

A Secret is never read. The status says which were written, once they were: with how many certificates, of which period.
One is written where that record lacks it, where a process has an index beyond it, when the next period begins, and
where a pod that should mount it does not begin, since somebody may have deleted it.

Certificates are renewed at most a day after their period has begun, which is four days before they expire; which part
of the day follows from the owner's UID, so that not all jobs are renewed at once.

Invariant: a Secret is on record only after the API server has taken it, and no pod is made whose certificate was never
written or expires within the period.
"""

from __future__ import annotations

import zlib
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
"""Seconds after which a pod that has a node and does not begin may lack what it mounts."""
_AGAIN_S: Final = 60.0
"""Least seconds between two writes of one Secret that pods may lack."""
_SPREAD_S: Final = PERIOD_S // 2
_MOUNTING: Final = frozenset(("", "ContainerCreating", "PodInitializing"))
_HAVE_KEYS: Final = frozenset(("driver", *STORE_ROLES))


class DesiredSecrets(Protocol):
    """Secrets of jobs and queues."""

    def secret(self, owner: Owner, part: SecretPart) -> Manifest:
        """Return a Secret."""

    def secrets(self, owner: Owner) -> OwnerSecrets:
        """Return the secrets of an owner, which know the names of Secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretUpkeep:
    """Writes that Secrets need.

    write: Secrets to write; needed: those without which no pod that mounts them is made; kept: the records that hold
    already; written: those that hold as soon as the Secret is written, each with the name of its part.
    """

    write: tuple[Apply, ...]
    needed: Mapping[Ref, Manifest]
    kept: Mapping[str, SecretRecord]
    written: Mapping[Ref, tuple[str, SecretRecord]]


def secret_upkeep(
    owner: Owner,
    roles: Sequence[Role],
    *,
    people: Sequence[str],
    pods: Collection[PodView],
    made: Iterable[PodReplica] = (),
    records: Mapping[str, SecretRecord],
    desired: DesiredSecrets,
    alarm: Alarm,
) -> SecretUpkeep:
    """Compare the Secrets of a job or a queue with what is on record.

    people: roles of people, each of which gets a certificate; pods, made: those that are there, and those that are made
    now.
    """
    names, write = desired.secrets(owner), []
    needed: dict[Ref, Manifest] = {}
    kept: dict[str, SecretRecord] = {}
    written: dict[Ref, tuple[str, SecretRecord]] = {}
    highest: dict[str, int] = {role.name: -1 for role in roles}
    for role, index in ((each.role, each.index) for several in (pods, made) for each in several):
        highest[role] = max(highest.get(role, -1), index)
    period = _period(owner, alarm.now)
    alarm.until((period + 1) * PERIOD_S + _late(owner))
    for part in _parts(roles, people, highest, period=period):
        record, name, usable = records.get(part.name), names.name(part.name), False
        if record is not None:
            kept[part.name] = record
            same = record.name == name and record.leaves >= part.leaves
            usable = same and _lasts(record, part.period)
            if same and record.period == part.period and not _is_lacked(part, record, pods, alarm):
                continue
        action = Apply(manifest=desired.secret(owner, part))
        write.append(action)
        if not usable:
            needed[action.ref] = action.manifest
        time = to_rfc3339(alarm.now)
        written[action.ref] = part.name, SecretRecord(name=name, leaves=part.leaves, period=part.period, time=time)
    return SecretUpkeep(write=tuple(write), needed=needed, kept=kept, written=written)


def has_certificate(owner: Owner, role: str, index: int, *, records: Mapping[str, SecretRecord], now: float) -> bool:
    """Return whether a certificate of process ``index`` of ``role`` is on record that does not expire yet."""
    record = records.get(part_name(role, index))
    return record is not None and index % LEAVES < record.leaves and _lasts(record, _period(owner, now))


def _lasts(record: SecretRecord, period: int) -> bool:
    return record.period >= period - 1


def _parts(
    roles: Sequence[Role], people: Sequence[str], highest: Mapping[str, int], *, period: int
) -> Iterator[SecretPart]:
    """Yield what is to be written: of a role all that it may have, but of later parts only those that are begun.

    highest: by role, the highest index of a pod.
    """
    yield SecretPart(role=KEYS)
    for person in people:
        yield SecretPart(role=person, leaves=1, period=period)
    for role in roles:
        last = max(role.replicas - 1, highest[role.name], 0)
        count = max(role.most, last + 1)
        for first in range(0, last + 1, LEAVES):
            yield SecretPart(role=role.name, first=first, leaves=min(LEAVES, count - first), period=period)


def _period(owner: Owner, now: float) -> int:
    """Return the period of the certificates that ``owner`` should have now."""
    return period_of(now - _late(owner))


def _late(owner: Owner) -> int:
    """Return the seconds after the begin of a period at which certificates of ``owner`` are renewed."""
    return zlib.crc32(owner.uid.encode()) % _SPREAD_S


def _is_lacked(part: SecretPart, record: SecretRecord, pods: Iterable[PodView], alarm: Alarm) -> bool:
    """Return whether a pod may wait for a Secret that was written: a kubelet does not report all that it cannot mount.

    Where it was written since the pod should have begun, it is not that, unless the kubelet says so.
    """
    since = from_rfc3339(record.time) or 0.0
    lacking = False
    for pod in pods:
        if not (pod.scheduled and pod.phase == "Pending" and not pod.deleting and _mounts(pod, part)):
            continue
        begins = pod.created + UNBEGUN_S
        silent = pod.waiting in _MOUNTING and since < begins and not alarm.until(begins)
        lacking = lacking or silent or record.name in pod.waiting_message
    return lacking and not alarm.until(since + _AGAIN_S)


def _mounts(pod: PodView, part: SecretPart) -> bool:
    return pod.role in _HAVE_KEYS if part.role == KEYS else part_name(pod.role, pod.index) == part.name
