"""Spans on tracks: when each process of a run did what, and why it was idle; of real roles and of simulated ones.

A track is one life of one process. Its *main* spans fill that life one after another: what the process did, or that it
was idle, and why. Spans *beside* them overlap them and each other: a version that is received while sequences run, a
checkpoint that is written while the next step is trained, a reward that is awaited.

Invariants: the main spans of a track are in order, do not overlap, and their lengths sum to its life; times are Unix
seconds of one clock (of a simulation: virtual seconds from 0).
"""

from __future__ import annotations

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
"""What a process does in a span. compute: a user's task; forward and backward where they are not told apart; the CPU
time of a driver, controller or storage unit. dispatch, advantage: the driver puts prompts, decides about groups.
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
"""Why a process was idle.

starved: what it needs is still made, by the role that ``Span.by`` names; tail: the others finish the last sequences of
a step, and there is no prompt for this one; sync: other weights are published, received or waited for; back-pressure:
the limit on staleness or on prompts in flight lets nothing out until the role that ``Span.by`` names has gone on;
reward: samples wait for their rewards; data plane: what it needs is there and on its way (claim, fetch, queue, ledger);
evaluation: held-out prompts run elsewhere; starting: a process that it needs, or it, starts; lost: the process was
killed or silent.
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
"""Reasons to wait that a process knows by itself.

claim: rows; fetch: their columns; weights, permit: other weights, the right to load them; reward: of its samples;
delivery: the queue has to take its samples; queue: any other answer of the queue or the driver; calls: of a server,
what others ask it. Of the driver: version: no prompt may go out before a version is published; admission: nor, because
of a limit on staleness or on prompts in flight; dispatched: all prompts are out; evaluation: held-out prompts are.
start: a role that has to be there first; end: the job's; lost: it is not known, since the process was gone.
"""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a process did. step, version: that it worked on and with, -1 where it has none.

    waits: of an idle span, what the process itself knew that it waited for (``WAITS``);
    cause, by: what the spans of all processes together say (``timeline.causes``).
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
    """One life of one process. killed: it ended without having said so."""

    role: str
    index: int
    attempt: int
    main: Sequence[Span]
    beside: Sequence[Span] = ()
    killed: bool = False

    @property
    def name(self) -> str:
        """Name of the process, as in the view: ``rollout-0``."""
        return f"{self.role}-{self.index}"

    @property
    def begin(self) -> float:
        """When it began."""
        return self.main[0].begin

    @property
    def end(self) -> float:
        """When it ended, or was seen last."""
        return self.main[-1].end


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at one moment: a kill, a change of the number of rollouts, an evaluation. of: whose."""

    at: float
    what: str
    of: str = ""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A run. begin, end: the window in which its time is counted, Unix seconds."""

    tracks: Sequence[Track]
    marks: Sequence[Mark] = ()
    begin: float
    end: float

    def first(self, what: str) -> float | None:
        """Return when ``what`` happened for the first time, None where it did not."""
        return next((mark.at for mark in self.marks if mark.what == what), None)
