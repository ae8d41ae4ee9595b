"""Causes of idle time, derived from the activity of all processes at that time; and sums of seconds.

A process knows only what it waits for (``Span.waits``); the cause is found in the tracks of the other processes. One
sweep over the boundaries of all spans maintains a ``_State``: which processes generate, train, compute, start or are
lost. Between two boundaries it is constant: all processes of a role that wait for the same thing have the same cause.

Invariants: each idle second gets exactly one cause. An idle span is split only where the cause, or the responsible
process, changes. Other spans are unchanged. The result depends only on the timeline, real or simulated. The seconds of
a process by kind and by cause sum to its time in the window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import msgspec

from asyncflow.timeline.tracks import Cause, Kind, Span, Timeline, Track

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

ROLLOUT: Final = "rollout"
TRAINER: Final = "trainer"
DRIVER: Final = "driver"
SERVERS: Final = frozenset({"controller", "storage", "holder", "master", "publisher", "follower"})
_GENERATES: Final = frozenset[Kind]({"generate", "prefill"})
_WORKS: Final = frozenset[Kind]({"compute", "forward", "backward", "optimizer", "checkpoint", "publish", "reward"})


class Shares(msgspec.Struct, kw_only=True):
    """Seconds of one process in the window of a timeline.

    seconds: for which it existed, or should have existed; kinds: by kind, without idle; idle: by cause; by: for each
    cause, by the responsible process or role, "" if there is none.
    """

    role: str
    index: int
    seconds: float = 0.0
    kinds: dict[Kind, float] = {}
    idle: dict[Cause, float] = {}
    by: dict[Cause, dict[str, float]] = {}

    def add(self, span: Span, seconds: float) -> None:
        """Add ``seconds`` of a span."""
        self.seconds += seconds
        if span.kind == "idle":
            self.idle[span.cause] = self.idle.get(span.cause, 0.0) + seconds
            by = self.by.setdefault(span.cause, {})
            by[span.by] = by.get(span.by, 0.0) + seconds
        else:
            self.kinds[span.kind] = self.kinds.get(span.kind, 0.0) + seconds


class IdleReason(NamedTuple):
    """A cause, and the responsible process or role."""

    cause: Cause
    by: str = ""


def attribute(timeline: Timeline) -> Timeline:
    """Return the timeline with the cause of each idle span; a span is split where its cause changes."""
    reasons = _reasons_of(timeline)
    tracks = [
        msgspec.structs.replace(track, main=list(_attributed(track, reasons=reasons))) for track in timeline.tracks
    ]
    return msgspec.structs.replace(timeline, tracks=tracks)


def shares(timeline: Timeline, *, begin: float | None = None) -> dict[str, Shares]:
    """Return the seconds of each process inside the window, summed over its lives, by its name; trainers first.

    timeline: with causes (``attribute``); begin: replaces the begin of its window.
    """
    begin = timeline.begin if begin is None else begin
    found: dict[str, Shares] = {}
    for track in timeline.tracks:
        for span in track.main:
            seconds = min(span.end, timeline.end) - max(span.begin, begin)
            if seconds > 0:
                known = found.setdefault(track.name, Shares(role=track.role, index=track.index))
                known.add(span, seconds)
    return dict(sorted(found.items(), key=lambda item: (place_of(item[1].role), item[1].index)))


def place_of(role: str) -> tuple[int, str]:
    """Return the sort key of a role: trainer, rollouts, other roles, then driver, controller and storage."""
    first, last = (TRAINER, ROLLOUT), (DRIVER, "controller", "storage")
    if role in first:
        return first.index(role), role
    return (4 + last.index(role) if role in last else 3), role


class _Reasons:
    """Reasons of a role for waiting, as a function of time that is constant between its boundaries."""

    def __init__(self) -> None:
        self._from: list[float] = []
        self._values: list[IdleReason] = []

    def add(self, at: float, why: IdleReason) -> None:
        """Set the reason from ``at`` on."""
        if not self._values or self._values[-1] != why:
            self._from.append(at)
            self._values.append(why)

    def during(self, span: Span) -> Iterator[Span]:
        """Yield the parts of an idle span, each with its cause."""
        place, begin = max(0, bisect_right(self._from, span.begin) - 1), span.begin
        while True:
            last = place + 1 == len(self._from) or self._from[place + 1] >= span.end
            end = span.end if last else self._from[place + 1]
            why = self._values[place]
            yield msgspec.structs.replace(span, begin=begin, end=end, cause=why.cause, by=why.by)
            if last:
                return
            place, begin = place + 1, end


def _attributed(track: Track, *, reasons: Mapping[tuple[str, str], _Reasons]) -> Iterator[Span]:
    for span in track.main:
        if span.kind == "idle":
            yield from reasons[track.role, span.waits].during(span)
        else:
            yield span


class _Change(NamedTuple):
    """Start (1) or end (-1) of a span of a track."""

    at: float
    sign: int
    track: Track
    span: Span
    background: bool


def _reasons_of(timeline: Timeline) -> Mapping[tuple[str, str], _Reasons]:
    changes = [
        _Change(at, sign, track, span, background)
        for track in timeline.tracks
        for spans, background in ((track.main, False), (track.background, True))
        for span in spans
        for at, sign in ((span.begin, 1), (span.end, -1))
    ]
    changes.sort(key=lambda change: change.at)
    reasons: defaultdict[tuple[str, str], _Reasons] = defaultdict(_Reasons)
    state = _State(driven=any(track.role == DRIVER for track in timeline.tracks))
    for place, change in enumerate(changes):
        state.apply(change)
        if place + 1 == len(changes) or changes[place + 1].at > change.at:
            for key in state.idle:
                reasons[key].add(change.at, state.why(*key))
    return reasons


@dataclass
class _State:
    """State of all processes at one time. driven: whether a driver exists, which records why it puts no prompts.

    idle: number of processes by role and by what they wait for; generating, training, evaluating, publishing: the step
    of each active process, by name; computing: role of each other computing process, by name; starting, lost: role of
    each process, by name; background: number of background spans by role and kind.
    """

    driven: bool
    idle: Counter[tuple[str, str]] = field(default_factory=Counter)
    generating: dict[str, int] = field(default_factory=dict)
    training: dict[str, int] = field(default_factory=dict)
    evaluating: dict[str, int] = field(default_factory=dict)
    publishing: dict[str, int] = field(default_factory=dict)
    computing: dict[str, str] = field(default_factory=dict)
    starting: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    background: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    swapping: int = 0

    def apply(self, change: _Change) -> None:
        """Apply a change."""
        track, span, sign = change.track, change.span, change.sign
        if change.background and span.kind == "publish":
            _put(self.publishing, track.name, span.step, sign)
        elif change.background:
            _count(self.background, (track.role, span.kind), sign)
        elif span.kind == "idle":
            _count(self.idle, (track.role, span.waits), sign)
            if span.waits in ("lost", "start"):
                _put(self.lost if span.waits == "lost" else self.starting, track.name, track.role, sign)
        elif span.kind == "starting":
            _put(self.starting, track.name, track.role, sign)
        elif span.kind in _GENERATES:
            _put(self.generating, track.name, span.step, sign)
        elif span.kind == "evaluation":
            _put(self.evaluating, track.name, span.step, sign)
        elif span.kind == "swap":
            self.swapping += sign
        elif track.role == TRAINER:
            _put(self.training, track.name, span.step, sign)
        elif span.kind in _WORKS and track.role not in SERVERS and track.role != DRIVER:
            _put(self.computing, track.name, track.role, sign)

    def why(self, role: str, waits: str) -> IdleReason:
        """Return the reason why a process of ``role`` that waits for this is idle now."""
        if waits == "lost":
            return IdleReason("lost")
        if waits == "start":
            return IdleReason("starting")
        if role == DRIVER or role in SERVERS:
            return self._served()
        if waits == "weights":
            return IdleReason("sync", self._one(self.publishing or self.training, TRAINER))
        if waits == "permit":
            return IdleReason("sync", ROLLOUT)
        if waits == "reward":
            return IdleReason("reward")
        if waits == "end":
            return IdleReason("evaluation") if self._evaluates else IdleReason("data plane")
        if waits not in ("claim", ""):
            return IdleReason("data plane")
        if server := next((name for name, of in self.lost.items() if of == DRIVER or of in SERVERS), ""):
            return IdleReason("lost", server)
        return self._without_prompts() if role == ROLLOUT else self._without_samples(role)

    def _served(self) -> IdleReason:
        """Return the reason why a process is idle that only serves requests."""
        if self.generating or self.training or self.computing or self.background[ROLLOUT, "reward"]:
            return IdleReason("starved")
        if self.evaluating:
            return IdleReason("evaluation")
        has_rollout = any(role == ROLLOUT and waits not in ("lost", "start") for role, waits in self.idle)
        if absent := self._absent(TRAINER) or (None if has_rollout else self._absent(ROLLOUT)):
            return absent
        return IdleReason("evaluation" if self._evaluates else "starved")

    def _without_samples(self, role: str) -> IdleReason:
        """Return the reason why the trainer, or a task, has no samples."""
        if self.background[role, "fetch"]:
            return IdleReason("data plane")
        if self.generating:
            without = self.idle[ROLLOUT, "claim"]
            tail = without >= len(self.generating)
            return IdleReason("tail" if tail else "starved", self._one(self.generating, ROLLOUT))
        if self._rewarding:
            return IdleReason("reward")
        if others := {name: of for name, of in self.computing.items() if of != role}:
            return IdleReason("starved", self._one(others, next(iter(others.values()))))
        if self.idle[ROLLOUT, "delivery"] or self.idle[ROLLOUT, "fetch"]:
            return IdleReason("data plane")
        if self.swapping or self.idle[ROLLOUT, "weights"] or self.publishing or self.background[ROLLOUT, "receive"]:
            return IdleReason("sync", self._one(self.publishing, TRAINER) if self.publishing else ROLLOUT)
        if self.evaluating:
            return IdleReason("evaluation")
        if absent := self._absent(ROLLOUT):
            return absent
        if self._evaluates:
            return IdleReason("evaluation")
        if self.training and role != TRAINER:
            return IdleReason("back-pressure", self._one(self.training, TRAINER))
        return IdleReason("data plane")

    def _without_prompts(self) -> IdleReason:
        """Return the reason why a rollout has no prompts."""
        held: Cause = "sync" if self.idle[DRIVER, "version"] else "back-pressure"
        limited = not self.driven or bool(self.idle[DRIVER, "version"] or self.idle[DRIVER, "admission"])
        if self.generating:
            lags = limited and self.training and min(self.training.values()) < min(self.generating.values())
            if lags:
                return IdleReason(held, self._one(self.training, TRAINER))
            return IdleReason("tail", self._one(self.generating, ROLLOUT))
        if self.training:
            if limited or self.idle[DRIVER, "dispatched"]:
                return IdleReason(held if limited else "tail", self._one(self.training, TRAINER))
            return IdleReason("data plane", DRIVER)
        if self.publishing or self.swapping or self.idle[ROLLOUT, "weights"] or self.background[ROLLOUT, "receive"]:
            return IdleReason("sync", self._one(self.publishing, TRAINER) if self.publishing else ROLLOUT)
        if self._rewarding:
            return IdleReason("reward")
        if self.computing:
            return IdleReason("starved", self._one(self.computing, next(iter(self.computing.values()))))
        if self.evaluating:
            return IdleReason("evaluation")
        absent = self._absent(TRAINER) or self._absent(ROLLOUT)
        return absent or IdleReason("evaluation" if self._evaluates else "data plane")

    @property
    def _rewarding(self) -> bool:
        return bool(self.background[ROLLOUT, "reward"] or self.idle[ROLLOUT, "reward"])

    @property
    def _evaluates(self) -> bool:
        return bool(self.evaluating or self.background[DRIVER, "evaluation"])

    def _absent(self, role: str) -> IdleReason | None:
        """Return the lost or starting process of ``role`` as the reason, None if there is none."""
        states: tuple[tuple[Cause, dict[str, str]], ...] = ("lost", self.lost), ("starting", self.starting)
        for cause, names in states:
            if name := next((name for name, of in names.items() if of == role), ""):
                return IdleReason(cause, name)
        return None

    @staticmethod
    def _one(names: Mapping[str, object], role: str) -> str:
        """Return the name if there is only one, otherwise the role."""
        return next(iter(names)) if len(names) == 1 else role


def _count(counts: Counter[K], key: K, sign: int) -> None:
    counts[key] += sign
    if not counts[key]:
        del counts[key]


def _put(names: dict[str, T], name: str, value: T, sign: int) -> None:
    if sign > 0:
        names[name] = value
    elif names.get(name) == value:
        del names[name]
