"""Spans on tracks: the activities of each process of a run over time, and why it was idle; for real and simulated runs.

A track is one life of one process. Its *main* spans fill that life without gaps: an activity of the process, or the
reason why it was idle. *Background* spans may overlap them and each other: a version that is received while sequences
run, a checkpoint that is written while the next step is trained, a reward that is awaited.

Invariants: the main spans of a track are in order and do not overlap, and their lengths sum to its life. Times are Unix
seconds of one clock (in a simulation: virtual seconds from 0).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

Kind = Literal[
    "starting",
    "generate",
    "prefill",
    "swap",
    "receive",
    "stage",
    "claim",
    "fetch",
    "forward",
    "backward",
    "optimizer",
    "publish",
    "reward",
    "compute",
    "evaluation",
    "checkpoint",
    "idle",
    "dispatch",
    "advantage",
]
"""Activity of a process in a span. compute: a user's task; forward and backward if they are not measured separately;
the CPU time of a driver, controller or storage unit. dispatch, advantage: the driver puts prompts, decides on groups.
"""

Cause = Literal[
    "",
    "starved",
    "tail",
    "sync",
    "back-pressure",
    "reward",
    "data plane",
    "evaluation",
    "starting",
    "lost",
]
"""Cause of a process being idle.

starved: its input is not yet produced, by the role in ``Span.by``; tail: other processes finish the last sequences of a
step, and no prompt is left for this one; sync: it waits until other weights are published or received; back-pressure:
the limit on staleness or on prompts in flight blocks new prompts until the role in ``Span.by`` has made progress;
reward: samples wait for their rewards; data plane: its input exists, but is still being transferred (claim, fetch,
queue, ledger); evaluation: held-out prompts run elsewhere; starting: it, or a process that it needs, is starting; lost:
the process was killed or silent.
"""

KINDS: Final[tuple[Kind, ...]] = Kind.__args__  # type: ignore[attr-defined]
CAUSES: Final[tuple[Cause, ...]] = Cause.__args__  # type: ignore[attr-defined]
WAITS: Final = (
    "",
    "claim",
    "fetch",
    "weights",
    "permit",
    "reward",
    "delivery",
    "version",
    "admission",
    "dispatched",
    "evaluation",
    "queue",
    "calls",
    "start",
    "end",
    "lost",
)
"""Reasons to wait that a process itself records.

claim: for rows; fetch: for their columns; weights, permit: for other weights, or for the right to load them; reward:
for rewards of its samples; delivery: for the queue to accept its samples; queue: for another answer of the queue or the
driver; calls: a server without requests. Reasons of the driver: version: no prompt may be dispatched before a version
is published; admission: a limit on staleness or on prompts in flight is reached; dispatched: all prompts are in flight;
evaluation: held-out prompts are in flight. start: for a role that must start first; end: for the end of the job; lost:
unknown, because the process had been lost.
"""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One activity of a process. step, version: that it worked on and with, -1 if it has none.

    waits: for an idle span, the reason that the process itself recorded (``WAITS``);
    cause, by: derived from the spans of all processes (``timeline.causes``).
    """

    kind: Kind
    begin: float
    end: float
    step: int = -1
    version: int = -1
    waits: str = ""
    cause: Cause = ""
    by: str = ""

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.begin


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one process. killed: whether it ended without recording its end."""

    role: str
    index: int
    attempt: int
    main: Sequence[Span]
    background: Sequence[Span] = ()
    killed: bool = False

    @property
    def name(self) -> str:
        """Name of the process, as in the view: ``rollout-0``."""
        return f"{self.role}-{self.index}"

    @property
    def begin(self) -> float:
        """Start of the life."""
        return self.main[0].begin

    @property
    def end(self) -> float:
        """End of the life, or the time of the last record."""
        return self.main[-1].end


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """An event at one time: a kill, a change of the number of rollouts, an evaluation. of: the affected process."""

    at: float
    what: str
    of: str = ""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of a run. begin, end: the window in which its time is counted, Unix seconds."""

    tracks: Sequence[Track]
    marks: Sequence[Mark] = ()
    begin: float
    end: float

    def first(self, what: str) -> float | None:
        """Return the time of the first event ``what``, None if there is none."""
        return next((mark.at for mark in self.marks if mark.what == what), None)

    def since(self, at: float) -> Timeline:
        """Return the timeline without the spans that ended before a time, and without tracks that have no others."""
        late = [_since(track, at) for track in self.tracks if track.end > at]
        return msgspec.structs.replace(self, tracks=late)


def _since(track: Track, at: float) -> Track:
    first = max(0, bisect_right(track.main, at, key=_begin) - 1)
    background = [span for span in track.background if span.end > at]
    return msgspec.structs.replace(track, main=track.main[first:], background=background)


def _begin(span: Span) -> float:
    return span.begin
