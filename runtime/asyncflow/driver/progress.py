"""Progress of the run and within its current step: lines for steps and evaluations, and the figures drawn from them.

The lines are the truth: ``metrics.jsonl`` (steps) and ``events.jsonl`` (start, evaluations, end) are read back by a
restarted driver; where they are gone with its folder, the ledger still says which step was the last. A step that a
restarted trainer made again has two lines; the later attempt's counts. Evaluations of it and of what followed spoke of
weights that are no more: an event says from which step on they are void.

Invariants: no figure is kept that is not computed from lines, so what a person sees before and after a restart agrees;
an evaluation that counts is one of the weights that survive; how far the run has come is known from the ledger where
lines are missing; durations are those that the trainer measured with a clock that nobody sets; figures of the current
step are counted by those who do the work: generated samples by the queue, trained ones by the trainer's ranks, tokens
and running sequences by the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
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
"""Seconds between two lines of progress: an event loop that is busy for a while still keeps to the promised 10."""
_WINDOW = 5
"""Looks over which the rate of generation is taken."""


class _Step(Struct, kw_only=True):
    """Fields of a line of ``metrics.jsonl`` from which figures are drawn, with the bounds of their values."""

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
    """Further fields of an event ``AGAIN``."""

    step: Count


def line_of(report: TrainReport, *, at: float, components: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the line of ``metrics.jsonl`` that says what ``report`` says.

    at: when it came, in unix seconds; components: means of those of the reward, where it has any.
    """
    fields: dict[str, Any] = msgspec.to_builtins(report)
    seconds, metrics = fields.pop("seconds"), fields.pop("metrics")
    spent = {f"{cause}_s": value for cause, value in seconds.items()}
    judged = {"reward_components": dict(components)} if components else {}
    return {"at": at, **fields, **judged, **spent, **metrics}


@dataclass
class RunProgress:
    """The run's lines. folder: the run's output folder; steps: of the whole run; now: unix seconds at the start."""

    folder: Path
    steps: int
    now: float
    _by_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    _unreported: dict[int, int] = field(default_factory=dict)
    _newest: int = 0
    evaluations: dict[int, EvaluationResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what an earlier driver of this run wrote."""
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

    def at(self, event: str, *, first: bool = True) -> float | None:
        """Return when ``event`` happened for the first (or last) time, or None."""
        times = [float(line["at"]) for line in self._events.lines if line["event"] == event]
        return None if not times else times[0] if first else times[-1]

    @property
    def started(self) -> float:
        """Time at which the run's first driver started, in unix seconds."""
        return self.at("driver started") or self.now

    def catch_up(self, step: int, *, attempt: int) -> None:
        """Take over from the ledger that ``step`` was made by trainer ``attempt``, where no line says so.

        The figures of steps that have no line are not known any more.
        """
        if step > self.done:
            self._unreported = {step: attempt}

    def step(self, line: dict[str, Any]) -> bool:
        """Record an optimizer step; return whether it, or a later one, was made before by another attempt.

        One that is known, since the answer to its report was lost, is not recorded again. Raises Fenced for one of an
        attempt older than one that has reported to this driver: its report was long on its way.
        """
        if self.knows(line["step"], attempt=line["attempt"]):
            return False
        if line["attempt"] < self._newest:
            what = f"attempt {line['attempt']} of the trainer was replaced by attempt {self._newest}"
            raise Fenced(what, where=f"the report of step {line['step']}")
        self._newest = line["attempt"]
        made = {step: int(old["attempt"]) for step, old in self._by_step.items()}
        made |= {step: attempt for step, attempt in self._unreported.items() if step > max(made, default=0)}
        again = any(step >= line["step"] and attempt != line["attempt"] for step, attempt in made.items())
        if again:
            self.note(AGAIN, at=line["at"], step=line["step"])
            self._forget(line["step"])
        self._metrics.append(line)
        self._take(line)
        self._unreported = {}
        return again

    def knows(self, step: int, *, attempt: int) -> bool:
        """Return whether there is a line of ``step`` as this attempt made it."""
        return step in self._by_step and self._by_step[step]["attempt"] == attempt

    def write(self) -> None:
        """Write the lines that could not be written when they were made."""
        self._metrics.write()
        self._events.write()

    def evaluated(self, result: EvaluationResult, *, at: float) -> None:
        """Record an evaluation."""
        self.evaluations[result.step] = result
        self.note("evaluation", at=at, **asdict(result))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The steps of the surviving history, in order."""
        return [self._by_step[step] for step in sorted(self._by_step)]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far, in order."""
        return self._events.lines

    @property
    def done(self) -> int:
        """The newest step of the surviving history."""
        return min(self.steps, max([*self._by_step, *self._unreported], default=0))

    @property
    def last_step_at(self) -> float | None:
        """Time at which the newest step that has a line was done, in unix seconds."""
        return float(self.lines[-1]["at"]) if self._by_step else None

    def step_seconds(self) -> list[float]:
        """Return the seconds that each step took that followed one of the same trainer attempt."""
        return [seconds for seconds, _ in self._paces()]

    def tokens_per_second(self) -> float:
        """Return the tokens trained in a second, over the recent steps that followed one of their own attempt."""
        recent = self._paces()[-RECENT_STEPS:]
        seconds = sum(pace for pace, _ in recent)
        return sum(tokens for _, tokens in recent) / seconds if seconds > _LEAST_S else 0.0

    def eta_seconds(self) -> float | None:
        """Return the seconds to the last step at the pace of the recent steps; None before there is a pace."""
        recent = self.step_seconds()[-RECENT_STEPS:]
        return statistics.fmean(recent) * (self.steps - self.done) if recent else None

    def step_p95(self) -> float | None:
        """Return the 95th percentile of the seconds between steps."""
        seconds = sorted(self.step_seconds())
        return seconds[int(0.95 * len(seconds))] if seconds else None

    def wait_share(self) -> float:
        """Return the share of the recent steps that the trainer waited for samples."""
        recent = self.lines[-RECENT_STEPS:]
        wall = sum(float(line["wall_s"]) for line in recent)
        return min(1.0, sum(float(line["wait_s"]) for line in recent) / wall) if wall else 0.0

    def samples_needed(self) -> float | None:
        """Return the samples a second that the trainer took in the recent steps while it did not wait; None before."""
        recent = self.lines[-RECENT_STEPS:]
        worked = sum(float(line["wall_s"]) - float(line["wait_s"]) for line in recent)
        return sum(int(line["samples"]) for line in recent) / worked if worked > _LEAST_S else None

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._events.close()

    def _paces(self) -> list[tuple[float, int]]:
        """Return seconds and tokens of each step that followed one of the same attempt."""
        pairs = [(a, b) for a, b in pairwise(self.lines) if a["attempt"] == b["attempt"]]
        return [(float(b["wall_s"]), int(b["tokens"])) for _, b in pairs]

    def _forget(self, step: int) -> None:
        self.evaluations = {known: result for known, result in self.evaluations.items() if known < step}

    def _take(self, line: dict[str, Any]) -> None:
        step = int(line["step"])
        for later in [known for known in self._by_step if known >= step]:
            del self._by_step[later]
        self._by_step[step] = line

    def _check_step(self, line: Any) -> None:
        """Raise msgspec.ValidationError or ValueError for what is no step of this run."""
        self._check_within(msgspec.convert(line, _Step).step)

    def _event_of(self, line: Any) -> _Event | _Again | EvaluationResult:
        """Return what a line of ``events.jsonl`` says. Raises as ``_check_step``."""
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
    """Looks into the step that is being made. samples: of one step; clock: monotonic seconds.

    A step that all ranks finished after this driver read the ledger, and that was reported to the one before, is
    noticed here: nobody reports it again, and until it is known the versions that it needed are kept for it.
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

    async def look(self) -> StepProgress | None:
        """Return how far the step is, None after the last. Raises PeerLost or DeadlineExceeded as the queue does."""
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
    """Log ``words()`` every ``LOG_S`` seconds, without end."""
    while True:
        await asyncio.sleep(LOG_S)
        log.info("%s", words())
