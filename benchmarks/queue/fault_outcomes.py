"""The outcome of each fault, derived from the diaries of the clients after the run.

Times are of one monotonic clock, which all processes of a machine share.

Invariant: the evaluation only reads files. The time of an outcome is the time from the fault of a process until another
process, or its successor, has done the same work again.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_clients import CHAIN, LEASE_S, Line, diary

HOLDERS = ("unit", "holder", "master")
"""The kinds of processes that store rows, so that their end loses rows."""
WITHIN_S = LEASE_S + 30.0
"""The longest accepted time to an outcome without another fault meanwhile: a lease, and the delay of a busy machine."""
_BACK_S = 3.0
"""An upper bound of the time until a killed process serves again."""


@dataclass(kw_only=True)
class Fault:
    """A fault of one process.

    attempt: of the member; at: the monotonic time; seconds: the duration of a stop; over: the time of the next fault
    that loses rows.
    """

    kind: str
    action: str
    member: str
    attempt: int
    at: float
    seconds: float = 0.0
    over: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a fault. seconds: the time until it; None if nothing had to happen."""

    fault: Fault
    words: str
    seconds: float | None


def judge(faults: Sequence[Fault], folder: Path) -> list[Outcome]:
    """Return the outcome of each fault."""
    diaries = _Diaries(folder)
    over = math.inf
    for fault in reversed(faults):
        fault.over = over
        if fault.kind in HOLDERS:
            over = fault.at
    return [_outcome(fault, diaries) for fault in faults]


def late_writes(folder: Path) -> list[str]:
    """Return the accepted completions of rows that another consumer had claimed after the one that completed them."""
    diaries = _Diaries(folder)
    claims: dict[tuple[str, int], list[tuple[int, float, str]]] = defaultdict(list)
    for line in diaries.did["claimed"]:
        for row, tries in zip(line["ids"], line["tries"], strict=True):
            claims[line["kind"], row].append((tries, line["t"], line["who"]))
    found = []
    for line in diaries.did["completed"]:
        for row, ok in zip(line["ids"], line["ok"], strict=True):
            holders = claims[line["kind"], row]
            own = max((tries for tries, _, who in holders if who == line["who"]), default=-1)
            later = [who for tries, at, who in holders if tries > own and at < line["t"]]
            if ok and later:
                found.append(f"{line['who']} completed row {row}, which {later[0]} had claimed after it")
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with the number and the times of the outcomes of each kind and action."""
    rows = [("process", "fault", "outcome", "times", "median s", "longest s", "longest s, nothing else hit meanwhile")]
    faults = [outcome.fault for outcome in outcomes]
    groups: defaultdict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.fault.kind, outcome.fault.action, outcome.words].append(outcome)
    for (kind, action, words), group in sorted(groups.items()):
        times = [outcome.seconds for outcome in group if outcome.seconds is not None]
        alone = [outcome.seconds for outcome in group if outcome.seconds is not None and not meanwhile(outcome, faults)]
        spans = (f"{statistics.median(times):.2f}", f"{max(times):.2f}") if times else ("", "")
        rows.append((kind, action, words, str(len(group)), *spans, f"{max(alone):.2f}" if alone else ""))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def slowest(outcomes: Sequence[Outcome], count: int = 5) -> list[str]:
    """Return the slowest outcomes, with the other faults meanwhile."""
    faults = [outcome.fault for outcome in outcomes]
    timed = sorted((outcome for outcome in outcomes if outcome.seconds), key=lambda outcome: -(outcome.seconds or 0))
    return [
        f"{outcome.fault.member} {outcome.fault.action}: {outcome.words} after {outcome.seconds:.2f} s; meanwhile "
        + (", ".join(_in_words(other, outcome.fault) for other in meanwhile(outcome, faults)) or "nothing")
        for outcome in timed[:count]
    ]


def too_late(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the outcomes that took too long although there was no other fault meanwhile."""
    faults = [outcome.fault for outcome in outcomes]
    return [
        f"{outcome.fault.member} {outcome.fault.action}: {outcome.words} only after {outcome.seconds:.1f} s, "
        f"with nothing else hit meanwhile; {WITHIN_S:.1f} s are allowed"
        for outcome in outcomes
        if (outcome.seconds or 0.0) > WITHIN_S and not meanwhile(outcome, faults)
    ]


def meanwhile(outcome: Outcome, faults: Iterable[Fault]) -> list[Fault]:
    """Return the other faults, of servers or of the same kind, during the recovery from this one."""
    fault = outcome.fault
    begins, ends = fault.at, fault.at + fault.seconds + (outcome.seconds or 0.0)
    near = [other for other in faults if other is not fault and other.kind in {"controller", *HOLDERS, fault.kind}]
    return [other for other in near if other.at < ends and other.at + other.seconds + _BACK_S > begins]


def _in_words(other: Fault, fault: Fault) -> str:
    span = f" for {other.seconds:.1f} s" if other.seconds else ""
    return f"{other.member} {other.action}{span} at {other.at - fault.at:+.1f} s"


class _Diaries:
    """The diaries of all clients, by file, and by action in chronological order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.did: defaultdict[str, list[Line]] = defaultdict(list)
        for file in folder.glob("*.jsonl"):
            member, _, attempt = file.stem.rpartition("-")
            for line in diary(folder, member, int(attempt)):
                line |= {"kind": member.rstrip("0123456789"), "member": member, "who": file.stem}
                self.did[line["did"]].append(line)
        for lines in self.did.values():
            lines.sort(key=lambda line: line["t"])

    def of(self, fault: Fault) -> list[Line]:
        return diary(self._folder, fault.member, fault.attempt)

    def next(self, after: float, did: str, kind: str = "") -> float | None:
        """Return the seconds from ``after`` to the next action ``did``, of any client or of one kind."""
        times = (line["t"] for line in self.did[did] if line["t"] > after and kind in ("", line["kind"]))
        found = next(times, None)
        return None if found is None else found - after

    def next_of(self, member: str, after: float) -> float | None:
        """Return the seconds from ``after`` until a producer had no more work."""
        found = next((line["t"] for line in self.did["waited"] if line["t"] > after and line["member"] == member), None)
        return None if found is None else found - after

    def last(self, after: float, did: str, *, before: float) -> float | None:
        """Return the seconds from ``after`` to the last action ``did`` before ``before``."""
        times = [line["t"] for line in self.did[did] if after < line["t"] < before]
        return times[-1] - after if times else None


def _outcome(fault: Fault, diaries: _Diaries) -> Outcome:
    if fault.kind in CHAIN:
        return _of_consumer(fault, diaries)
    resumed = fault.at + fault.seconds
    if fault.kind == "producer":
        words = "went on" if fault.action == "stop" else "its successor creates what is to be created"
        after = diaries.next_of(fault.member, resumed)
    elif fault.kind == "trainer":
        words = "the gang counts on" if fault.action == "stop" else "the gang counts again, from its checkpoint"
        after = diaries.next(resumed, "counted")
    elif fault.action == "kill" and fault.kind in HOLDERS:
        words, after = "its rows are made again", diaries.last(fault.at, "created again", before=fault.over)
        if after is None:
            words = "it held no rows that were wanted"
    else:
        words, after = "rows are claimed again", diaries.next(resumed, "claimed")
    return Outcome(fault=fault, words=words, seconds=after)


def _of_consumer(fault: Fault, diaries: _Diaries) -> Outcome:
    """Return the outcome for the rows that a consumer held at the time of the fault."""
    held: list[int] = []
    for line in diaries.of(fault):
        if line["t"] < fault.at:
            held = line["rows"] if line["did"] == "claimed" else []
    if not held:
        return Outcome(fault=fault, words="held no row", seconds=None)
    claimed_again: dict[int, float] = {}
    made_again = False
    for line in diaries.did["claimed"]:
        if line["kind"] == fault.kind and line["t"] > fault.at:
            for row, tries in zip(line["rows"], line["tries"], strict=True):
                if row in held and tries > 0:
                    claimed_again.setdefault(row, line["t"] - fault.at)
                made_again |= row in held and tries == 0
    results = next((line["ok"] for line in diaries.of(fault) if _answers(line, held, fault)), [False])
    if all(results):
        words = "completed in time"
    elif claimed_again:
        words = "back too late: fenced, another had its rows" if fault.action == "stop" else "another had its rows"
    else:
        words = "its rows were lost with their unit, made again" if made_again else "its rows were complete already"
    seconds = max(claimed_again.values(), default=None) if not all(results) else None
    return Outcome(fault=fault, words=words, seconds=seconds)


def _answers(line: Line, held: list[int], fault: Fault) -> bool:
    return bool(line["did"] == "completed" and line["t"] > fault.at and line["rows"] == held)


def by_kind(faults: Iterable[Fault]) -> dict[str, int]:
    """Return the number of faults of each kind and action."""
    return dict(Counter(f"{fault.kind} {fault.action}" for fault in faults))
