"""Ends of processes: how each end counts, and the restart budget that the ends of a role use.

Each end is entered into the role's record once: a pod of a gang is identified by its attempt, which the entry
increases, and any other pod by its UID. The record is stored before the pod is deleted, so a crash in between does not
enter an end twice.

The failures of a window are removed from the record when the window is over, so a record always shows the used part of
the budget.

Invariants: attempts only increase. No delay or window is longer than its policy says, whatever the clock of an earlier
operator was. An end uses no budget if the cluster or a user ended the pod, or if another process caused it. A window
counts each failure once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from asyncflow.api.names import kind_of_role
from asyncflow.api.records import RoleRecord
from asyncflow.plan.describe import duration
from asyncflow.plan.roles import DISRUPTED, MOST_DISRUPTIONS, REFUSED, RestartPolicy, Role
from asyncflow_operator.actions import Note
from asyncflow_operator.decide.times import Alarm, from_rfc3339, to_rfc3339
from asyncflow_operator.observed import PodView

SETTLED_S: Final = 20.0
"""Seconds after which a process counts as able to run, so that its end starts a new count of ends in a row."""
LONGEST_S: Final = 60.0
"""Longest delay of a restart in seconds."""
COUNTED: Final = 256
"""Most UIDs in a record; further ends are entered after some of these pods have been deleted."""
_MOST_DOUBLINGS: Final = 32
_LAST_WORDS: Final = 600


class PodEnd(StrEnum):
    """Kinds of the end of a pod; the values are used in event messages."""

    FAILED = "failed"
    REFUSED = "refused its input"
    DISRUPTED = "lost its work with another process"
    EVICTED = "was ended by the cluster"
    DELETED = "was deleted"
    DONE = "ended by itself"


_CAUSES: Final = {PodEnd.DISRUPTED: 0, PodEnd.EVICTED: 1, PodEnd.DELETED: 2}
"""Ends that cause the other ends in a gang, in the order in which they are looked for."""


@dataclass(frozen=True, slots=True)
class FailureResult:
    """Reason why a job or a queue cannot continue: one word for programs, and a sentence for users."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class RecordedEnds:
    """A role's record with all ends entered, the failure that follows, and the events to write."""

    record: RoleRecord
    failure: FailureResult | None
    notes: tuple[Note, ...]


def end_of(pod: PodView) -> PodEnd | None:
    """Return the kind of the end of ``pod``, None if it has not ended."""
    if pod.deleting:
        return PodEnd.DELETED
    if pod.phase not in ("Succeeded", "Failed"):
        return None
    if pod.disrupted:
        return PodEnd.EVICTED
    if pod.exit_code == REFUSED:
        return PodEnd.REFUSED
    if pod.exit_code == DISRUPTED:
        return PodEnd.DISRUPTED
    return PodEnd.DONE if pod.phase == "Succeeded" or pod.exit_code == 0 else PodEnd.FAILED


def record_ends(role: Role, pods: Iterable[PodView], record: RoleRecord, alarm: Alarm) -> RecordedEnds:
    """Enter the ends of ``pods``, all of one role, that are not in ``record`` yet.

    For a gang, one end is entered for all ranks: the end of a rank that was disrupted, evicted or deleted, if there is
    one, because the other ranks have failed as a consequence.
    """
    pods = sorted(pods, key=lambda pod: (pod.index, pod.uid))
    existing = {pod.uid for pod in pods}
    record = _without_old_failures(role.restart, _up_to(alarm.now, record), alarm)
    failure: FailureResult | None = None
    notes: list[Note] = []
    ends = sorted(_new_ends(role, pods, record, alarm), key=lambda each: _CAUSES.get(each[1], len(_CAUSES)))
    for pod, end in ends:
        if end is PodEnd.REFUSED:
            failure = failure or FailureResult(
                "Refused", f"{_ended(pod)}, which no restart can fix. {_last_words(pod)}".strip()
            )
        elif not (role.gang and pod.attempt < record.attempt):
            counted = tuple(uid for uid in record.counted if uid in existing)
            if len(counted) < COUNTED:
                record = _recorded(role, record.model_copy(update={"counted": counted}), pod, end, alarm.now)
                notes.append(_note_of(role, pod, end))
    return RecordedEnds(record, failure or _exceeded(role, pods, record), tuple(notes))


def delay(policy: RestartPolicy, ends: int) -> float:
    """Return the seconds to wait after ``ends`` ends in a row, 0 without any."""
    return float(min(policy.backoff_s * 2.0 ** min(ends - 1, _MOST_DOUBLINGS), LONGEST_S)) if ends else 0.0


def starts_at(policy: RestartPolicy, record: RoleRecord) -> float:
    """Return the time at which a gang may start again (unix seconds)."""
    return (from_rfc3339(record.last_failure) or 0.0) + delay(policy, record.in_a_row)


def may_be_replaced(policy: RestartPolicy, record: RoleRecord, pod: PodView, alarm: Alarm) -> bool:
    """Return whether an ended ``pod`` may be deleted and replaced: its end is counted and the backoff is over."""
    if pod.uid not in record.counted:
        return False
    ended = from_rfc3339(record.last_failure) or 0.0
    return not alarm.until(min(ended, pod.finished or ended) + delay(policy, record.in_a_row))


def _up_to(now: float, record: RoleRecord) -> RoleRecord:
    """Return the record with ``now`` for each time in the future, which an operator with a fast clock has written."""
    ahead = [name for name in ("last_failure", "window_start") if (from_rfc3339(getattr(record, name)) or 0.0) > now]
    return record.model_copy(update=dict.fromkeys(ahead, to_rfc3339(now))) if ahead else record


def _without_old_failures(policy: RestartPolicy, record: RoleRecord, alarm: Alarm) -> RoleRecord:
    """Return the record, without its failures if their window is over."""
    since = from_rfc3339(record.window_start)
    if since is None or alarm.until(since + policy.window_s):
        return record
    return record.model_copy(update={"restarts": 0, "disruptions": 0, "window_start": None})


def _new_ends(
    role: Role, pods: Iterable[PodView], record: RoleRecord, alarm: Alarm
) -> Iterator[tuple[PodView, PodEnd]]:
    for pod in pods:
        end = end_of(pod)
        earlier = pod.attempt < (record.attempt if role.gang else 0)
        if end is None or earlier or pod.uid in record.counted:
            continue
        if end is PodEnd.DONE and (role.leader or alarm.until((pod.finished or 0.0) + role.restart.dismissed_s)):
            continue
        yield pod, end


def _recorded(role: Role, record: RoleRecord, pod: PodView, end: PodEnd, now: float) -> RoleRecord:
    entered: dict[str, object] = {"attempt": max(record.attempt, pod.attempt + 1)}
    entered |= {"begun": False, "whole": False} if role.gang else {"counted": (*record.counted, pod.uid)}
    if end is not PodEnd.DELETED:
        entered |= {"in_a_row": _ends_in_a_row(record, pod, now), "last_failure": to_rfc3339(now)}
    if end in (PodEnd.FAILED, PodEnd.DISRUPTED):
        entered |= {"restarts": record.restarts + (end is PodEnd.FAILED)}
        entered |= {"disruptions": record.disruptions + (end is PodEnd.DISRUPTED)}
        entered |= {"window_start": record.window_start or to_rfc3339(now)}
    return record.model_copy(update=entered)


def _ends_in_a_row(record: RoleRecord, pod: PodView, now: float) -> int:
    """Return the number of ends in a row including that of ``pod``; only a pod of the present attempt increases it."""
    lived = pod.finished - pod.started if pod.started is not None and pod.finished is not None else 0.0
    quiet = now - (from_rfc3339(record.last_failure) or 0.0)
    if lived >= SETTLED_S or quiet >= LONGEST_S + SETTLED_S:
        return 1
    return record.in_a_row + 1 if pod.attempt >= record.attempt else max(record.in_a_row, 1)


def _exceeded(role: Role, pods: list[PodView], record: RoleRecord) -> FailureResult | None:
    policy = role.restart
    disrupted = record.disruptions > MOST_DISRUPTIONS
    if not disrupted and record.restarts <= policy.max_restarts:
        return None
    failed = [pod for pod in pods if end_of(pod) in (PodEnd.FAILED, PodEnd.DISRUPTED)]
    last = max(failed, key=lambda pod: (pod.finished or 0.0, pod.name), default=None)
    ended = _ended(last) if last is not None else f"{role.name} failed"
    limit = MOST_DISRUPTIONS if disrupted else policy.max_restarts
    budget = f"{limit} restarts of {role.name} within {duration(policy.window_s)} are used up"
    last_words = f". {_last_words(last)}" if last is not None and last.last_words else ""
    return FailureResult("BudgetExceeded", f"{ended}, and the {budget}{last_words}")


def _note_of(role: Role, pod: PodView, end: PodEnd) -> Note:
    """Return the event about the end of a pod, with its last words if it failed: its log is deleted with the pod."""
    reaction = "the gang starts again from its checkpoint" if role.gang else "it is replaced"
    kind = kind_of_role(role.name).capitalize()
    if end is not PodEnd.FAILED:
        by = f" ({' '.join(pod.disruption.split())[:_LAST_WORDS]})" if pod.disruption else ""
        return Note(type="Normal", reason=f"{kind}Gone", message=f"{pod.name} {end}{by}: {reaction}")
    message = f"{_ended(pod)}: {reaction}. {_last_words(pod)}".removesuffix(". ")
    return Note(type="Warning", reason=f"{kind}Failed", message=message)


def _ended(pod: PodView) -> str:
    code = f"exit code {pod.exit_code}" if pod.exit_code is not None else "no exit code"
    return f"{pod.name} ended with {code}" + (f" ({pod.exit_reason})" if pod.exit_reason else "")


def _last_words(pod: PodView) -> str:
    text = " ".join(pod.last_words.split())
    return f"Its last words: {text[-_LAST_WORDS:]}" if text else ""
