"""Progress of the run and of its current step: lines for steps and evaluations, and the figures computed from them.

The lines are the source of all figures: a restarted driver reads ``metrics.jsonl`` (steps) and ``events.jsonl`` (start,
evaluations, end). If they were lost with its folder, the ledger still has the last step. A step that a restarted
trainer made again has two lines, of which the line of the later attempt counts. Evaluations of that step and of later
ones refer to weights that no longer exist: an event records the step from which on they are void.

Invariants: every figure is computed from lines, so it is the same before and after a restart; only evaluations of
surviving weights count; if lines are missing, the last step is taken from the ledger; durations are measured by the
trainer with a monotonic clock; the counts of the current step come from the process that does the work: generated
samples from the queue, trained samples from the trainer's ranks, tokens and running sequences from the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from asyncflow.api.status import StepProgress
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.evaluation import EvaluationResult
from asyncflow.driver.journal import EVENTS, METRICS, Count, Finite, Journal, Moment, Seconds
from asyncflow.driver.members import Members
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import Fenced
from asyncflow.queue.client import QueueClient
from asyncflow.training.report import TrainReport

log = logging.getLogger(__name__)

RECENT_STEPS = 10
_LEAST_S = 1e-6
AGAIN = "step made again"

_Versions = Annotated[float, Meta(ge=-1e9, le=1e9)]

LOG_S = 7.0
"""Seconds between two log lines of progress; less than the documented 10, since the event loop may be busy."""
_WINDOW = 5
"""Number of observations over which the rate of generation is computed."""


class _Step(Struct, kw_only=True):
    """Fields of a line of ``metrics.jsonl`` from which figures are computed, with the bounds of their values."""

    at: Moment
    step: Annotated[int, Meta(ge=1)]
    attempt: Count
    samples: Count
    tokens: Count
    response_tokens: Count
    observation_tokens: Count = 0
    reward: Finite | None
    staleness_start_max: _Versions
    staleness_start_mean: _Versions
    staleness_end_max: _Versions
    staleness_token_mean: _Versions
    reward_components: Annotated[dict[Annotated[str, Meta(max_length=63)], Finite], Meta(max_length=16)] = {}
    logprob_gap_p99: Finite | None = None
    correction_ess: Finite | None = None
    correction_high: Finite = 0.0
    correction_low: Finite = 0.0
    wall_s: Seconds
    wait_s: Seconds
    skipped: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class _Event(Struct, kw_only=True):
    """Fields of every line of ``events.jsonl``."""

    event: str
    at: Moment


class _Again(Struct, kw_only=True):
    """Further fields of the event ``AGAIN``."""

    step: Count


def line_of(report: TrainReport, *, at: float, components: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the line of ``metrics.jsonl`` for ``report``.

    at: time of its arrival in unix seconds; components: means of the components of the reward, if it has any.
    """
    fields: dict[str, Any] = msgspec.to_builtins(report)
    seconds, metrics = fields.pop("seconds"), fields.pop("metrics")
    spent = {f"{cause}_s": value for cause, value in seconds.items()}
    judged = {"reward_components": dict(components)} if components else {}
    return {"at": at, **fields, **judged, **spent, **metrics}


@dataclass
class RunProgress:
    """The run's lines. folder: output folder of the run; steps: number of steps of the run; now: unix seconds at the
    start of this driver.
    """

    folder: Path
    steps: int
    now: float
    _by_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)
    _unreported: dict[int, int] = field(default_factory=dict)
    _newest: int = 0
    evaluations: dict[int, EvaluationResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the lines of earlier drivers of this run."""
        self._metrics = Journal(self.folder / METRICS, check=self._check_step)
        self._events = Journal(self.folder / EVENTS, check=self._event_of)
        for line in self._metrics.lines:
            self._take(line)
        for line in self._events.lines:
            match self._event_of(line):
                case _Again(step=step):
                    self._forget(step)
                case EvaluationResult() as result:
                    self.evaluations[result.step] = result
        self.note("driver started", at=self.now)

    def note(self, event: str, *, at: float, **fields: Any) -> None:
        """Write an event of the run; ``at`` in unix seconds."""
        self._events.append({"event": event, "at": at, **fields})

    def at(self, event: str) -> float | None:
        """Return the time when ``event`` first happened, or None."""
        return next((float(line["at"]) for line in self._events.lines if line["event"] == event), None)

    @property
    def started(self) -> float:
        """Time at which the run's first driver started, in unix seconds."""
        return self.at("driver started") or self.now

    def catch_up(self, step: int, *, attempt: int) -> None:
        """Record from the ledger that trainer ``attempt`` made ``step``, if no line does.

        The figures of steps without a line are lost.
        """
        if step > self.done:
            self._unreported = {step: attempt}

    def step(self, line: dict[str, Any]) -> bool:
        """Record an optimizer step; return whether another attempt made it, or a later step, before.

        A step that is already recorded, because the answer to its report was lost, is not recorded again. Raises Fenced
        for a delayed report of an attempt older than one that has reported to this driver.
        """
        if self.knows(line["step"], attempt=line["attempt"]):
            return False
        if line["attempt"] < self._newest:
            what = f"attempt {line['attempt']} of the trainer was replaced by attempt {self._newest}"
            raise Fenced(what, where=f"the report of step {line['step']}")
        self._newest = line["attempt"]
        later = takewhile(lambda old: old["step"] >= line["step"], reversed(self._by_step.values()))
        made = {old["step"]: old["attempt"] for old in later}
        made |= {step: attempt for step, attempt in self._unreported.items() if step > self._last_step}
        again = any(step >= line["step"] and attempt != line["attempt"] for step, attempt in made.items())
        if again:
            self.note(AGAIN, at=line["at"], step=line["step"])
            self._forget(line["step"])
        self._metrics.append(line)
        self._take(line)
        self._unreported = {}
        return again

    def knows(self, step: int, *, attempt: int) -> bool:
        """Return whether there is a line of ``step`` from this attempt."""
        return step in self._by_step and self._by_step[step]["attempt"] == attempt

    def write(self) -> None:
        """Write the lines that could not be written before."""
        self._metrics.write()
        self._events.write()

    def evaluated(self, result: EvaluationResult, *, at: float) -> None:
        """Record an evaluation."""
        self.evaluations[result.step] = result
        self.note("evaluation", at=at, **asdict(result))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The steps of the surviving history, in order."""
        return list(self._by_step.values())

    @property
    def last_line(self) -> dict[str, Any]:
        """The newest step of the surviving history, empty before the first."""
        return next(self._backwards, {})

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far, in order."""
        return self._events.lines

    @property
    def done(self) -> int:
        """The newest step of the surviving history."""
        return min(self.steps, max([self._last_step, *self._unreported]))

    @property
    def last_step_at(self) -> float | None:
        """Time of the report of the newest step that has a line, in unix seconds."""
        return float(self.last_line["at"]) if self._by_step else None

    def step_seconds(self) -> list[float]:
        """Return the seconds of the recent steps that followed a step of the same trainer attempt, newest first."""
        return [seconds for seconds, _ in self._paces()]

    def tokens_per_second(self) -> float:
        """Return the trained tokens per second over the recent steps that followed a step of the same attempt."""
        recent = self._paces()
        seconds = sum(pace for pace, _ in recent)
        return sum(tokens for _, tokens in recent) / seconds if seconds > _LEAST_S else 0.0

    def eta_seconds(self) -> float | None:
        """Return the seconds to the last step at the pace of the recent steps; None while there is no pace."""
        recent = self.step_seconds()
        return statistics.fmean(recent) * (self.steps - self.done) if recent else None

    def step_p95(self) -> float | None:
        """Return the 95th percentile of the seconds of a step."""
        return self._seconds[int(0.95 * len(self._seconds))] if self._seconds else None

    def wait_share(self) -> float:
        """Return the share of the time of the recent steps in which the trainer waited for samples."""
        recent = list(islice(self._backwards, RECENT_STEPS))
        wall = sum(float(line["wall_s"]) for line in recent)
        return min(1.0, sum(float(line["wait_s"]) for line in recent) / wall) if wall else 0.0

    def samples_needed(self) -> float | None:
        """Return the samples per second that the trainer took in the recent steps while it did not wait, None if
        unknown.
        """
        recent = list(islice(self._backwards, RECENT_STEPS))
        worked = sum(float(line["wall_s"]) - float(line["wait_s"]) for line in recent)
        return sum(int(line["samples"]) for line in recent) / worked if worked > _LEAST_S else None

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._events.close()

    @property
    def _backwards(self) -> Iterator[dict[str, Any]]:
        """The steps of the surviving history, the newest first."""
        return reversed(self._by_step.values())

    @property
    def _last_step(self) -> int:
        """The newest step that has a line, 0 if none has."""
        return next(reversed(self._by_step), 0)

    def _paces(self) -> list[tuple[float, int]]:
        """Return the seconds and tokens of the recent steps that followed a step of the same attempt, newest first."""
        followed = (b for b, a in pairwise(self._backwards) if a["attempt"] == b["attempt"])
        return [(float(b["wall_s"]), int(b["tokens"])) for b in islice(followed, RECENT_STEPS)]

    def _forget(self, step: int) -> None:
        self.evaluations = {known: result for known, result in self.evaluations.items() if known < step}

    def _take(self, line: dict[str, Any]) -> None:
        """Add a step after the steps before it; it replaces all later ones."""
        step = int(line["step"])
        while self._by_step and self._last_step >= step:
            _, later = self._by_step.popitem()
            if self._followed_by(later):
                del self._seconds[bisect_left(self._seconds, float(later["wall_s"]))]
        if self._followed_by(line):
            insort(self._seconds, float(line["wall_s"]))
        self._by_step[step] = line

    def _followed_by(self, line: Mapping[str, Any]) -> bool:
        """Return whether the attempt of ``line`` also made the newest step."""
        return bool(self._by_step) and self.last_line["attempt"] == line["attempt"]

    def _check_step(self, line: Any) -> None:
        """Raise msgspec.ValidationError or ValueError if ``line`` is not a step of this run."""
        self._check_within(msgspec.convert(line, _Step).step)

    def _event_of(self, line: Any) -> _Event | _Again | EvaluationResult:
        """Return the event in a line of ``events.jsonl``. Raises as ``_check_step``."""
        event = msgspec.convert(line, _Event)
        if event.event == AGAIN:
            return msgspec.convert(line, _Again)
        if event.event != "evaluation":
            return event
        result = msgspec.convert(line, EvaluationResult)
        self._check_within(result.step)
        return result

    def _check_within(self, step: int) -> None:
        if step > self.steps:
            raise ValueError(f"step {step} of a run of {self.steps}")


class StepWatch:
    """Observes the current step. samples: number of samples of one step; clock: monotonic seconds.

    It also notices a step that all ranks finished after this driver read the ledger but reported to the driver before:
    the trainer does not report it again, and until it is known the versions that it needed stay required.
    """

    def __init__(
        self,
        queue: QueueClient,
        *,
        progress: RunProgress,
        members: Members,
        samples: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._progress = progress
        self._members = members
        self._samples = samples
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    async def observe(self) -> StepProgress | None:
        """Return the progress of the current step, None after the last. Raises PeerLost or DeadlineExceeded."""
        step = self._progress.done + 1
        if step > self._progress.steps:
            return None
        snapshot = await self._queue.snapshot(partition=TRAIN, step=step, timeout=CALL_TIMEOUT_S)
        self._progress.catch_up(snapshot.last_staged_step, attempt=snapshot.attempt)
        state, trainers = snapshot.steps.get(step), self._members.statuses("trainer")
        behind = [status for status in trainers if status.get("step") == step - 1]
        publishing = max((int(status.get("publishing", -1)) for status in trainers), default=-1)
        return StepProgress(
            step=step,
            samples=self._samples,
            generated=min(state.done.get("rollout", 0), self._samples) if state else 0,
            filtered=state.filtered if state else 0,
            trained=sum(int(status.get("trained", 0)) for status in behind),
            running=sum(int(status.get("running", 0)) for status in self._members.statuses("rollout")),
            tokens_per_second=self._rate(),
            publishing=publishing if publishing >= 0 else None,
            saving=any(bool(status.get("saving")) for status in trainers),
        )

    def _rate(self) -> float:
        now, tokens = self._clock(), self._members.lives.tokens_generated
        self._seen.append((now, tokens))
        since, before = self._seen[0]
        return max(0, tokens - before) / (now - since) if now > since else 0.0


async def log_progress(words: Callable[[], str]) -> None:
    """Log ``words()`` every ``LOG_S`` seconds; never returns."""
    while True:
        await asyncio.sleep(LOG_S)
        log.info("%s", words())
