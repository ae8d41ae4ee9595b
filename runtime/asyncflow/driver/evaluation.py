"""Accuracy, pass@k and mean reward on held-out prompts, at versions that the schedule names, without stopping anything.

An evaluation is a partition's worth of rows pinned to one version; instances that are at that version generate them
between training prompts. Each held-out prompt is sampled ``samples`` times at the evaluation's temperature and, where
asked for, once greedily. The prompts of all sets are evaluated together; an index counts through one set after the
other.

When a step is made again, weights that were being evaluated may be those of another history; then everything that is
not recorded begins anew, in another *round*, whose number travels with the rows. It does so too when rows of an
earlier round turn up, which were under way when the partition was cleared: they keep those of this round out. What
another driver put cannot turn up: this one has taken over, and what it creates carries its attempt.

A row names a step and no attempt of the trainer, as rows of training do: an instance that has still loaded the θ_step
of an earlier attempt may answer. A sample that is lost and made again, before or after it was counted, counts once.

A held-out prompt that is too long is left out of all evaluations, where ``data.overlong`` says so.

Invariant: an evaluation is recorded once a round, when all its samples of that round are in, and all of them were made
by a θ_step.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import comb
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from asyncflow import clock
from asyncflow.api.base import NAME
from asyncflow.api.job import RLJobSpec
from asyncflow.data.prompter import Prompter
from asyncflow.driver.dispatch import CALL_TIMEOUT_S, PROMPTS_PER_PUT, EncodedPrompt, Overlong, PromptColumns
from asyncflow.driver.groups import RewardTally, failure_of
from asyncflow.driver.journal import Count, Finite, Share
from asyncflow.driver.tasks import EVAL
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow, Samples, Tag
from asyncflow.rpc.columns import batches
from asyncflow.rpc.membership import Best
from asyncflow.telemetry.spans import NO_SPANS, Spans

log = logging.getLogger(__name__)

SCORED = "evaluated"
ROUND = "round"
PassedAt = Annotated[str, Meta(pattern="^[0-9]{1,4}$")]
SetName = Annotated[str, Meta(pattern=NAME, max_length=63)]


@dataclass(kw_only=True)
class EvaluationTally:
    """Rewards received for one evaluation by (serial, sample), None where there is none: a repeat changes nothing.

    began: when its rows were created.
    """

    sampled: dict[tuple[int, int], float | None] = field(default_factory=dict)
    greedy: dict[tuple[int, int], float | None] = field(default_factory=dict)
    began: float = field(default_factory=clock.now)

    @property
    def size(self) -> int:
        """Samples that are in."""
        return len(self.sampled) + len(self.greedy)


class EvaluatedRow(NamedTuple):
    """A row of an evaluation that was judged. place: of its prompt among those of all sets; set: name of its set."""

    row: LeasedRow
    place: int
    set: str


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """Means over the prompts of one set.

    accuracy, greedy: share of the samples that pass, of all at the evaluation's temperature, and of the greedy ones;
    reward, greedy_reward: mean rewards of those of the same that have one (None in lines of older versions); pass_at:
    by k, the estimated chance that at least one of k samples of a prompt passes. A sample that got no reward does not
    pass, and is counted with ``RewardTally``.
    """

    prompts: Count
    accuracy: Share
    greedy: Share | None
    reward: Finite | None = None
    greedy_reward: Finite | None = None
    pass_at: Annotated[dict[PassedAt, Share], Meta(max_length=8)] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The result in one sentence."""
        figures = {"accuracy": self.accuracy, "greedy": self.greedy, "reward": self.reward}
        figures |= {f"pass@{k}": share for k, share in self.pass_at.items()}
        said = (f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
        return ", ".join([f"{self.prompts} prompts", *said])


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(SetResult):
    """Results of θ_step: those of the main set, and by name those of the sets that have one."""

    step: Count
    sets: Annotated[dict[SetName, SetResult], Meta(max_length=16)] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The result in one sentence."""
        return "; ".join([super().words, *(f"{name}: {each.words}" for name, each in self.sets.items())])


def pass_at(k: int, *, passed: Sequence[int], samples: int) -> float:
    """Return pass@k, the chance that at least one of k samples of a prompt passes, as a mean over prompts.

    passed: by prompt, how many of its ``samples`` >= k samples passed. The estimate is without bias: 1 - C(n-c, k) /
    C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).
    """
    return fmean(1 - comb(samples - right, k) / comb(samples, k) for right in passed)


def best_of(evaluations: Mapping[int, EvaluationResult], *, by: Literal["accuracy", "greedy", "reward"]) -> Best | None:
    """Return the evaluation that was the best by a figure of the main set, the earliest of equals."""
    values = {step: getattr(evaluations[step], by) for step in sorted(evaluations)}
    known = {step: float(value) for step, value in values.items() if value is not None}
    step = max(known, key=lambda step: known[step], default=None)
    return None if step is None else Best(step=step, by=by, value=known[step])


@dataclass(kw_only=True)
class Evaluation:
    """Puts the evaluations that are due and counts what comes back.

    sets: by name, the main one first. steps: all that are evaluated, in order: the n-th evaluation has the serials from
    n * prompts on, where prompts are those of all sets. pass_at, pass_reward: of ``EvaluationSpec``. due: gives the
    steps whose weights are published and are to be evaluated. changed: waits until that may have changed. keep: called
    with the rows that count, before they are dropped. finished: called with each result. spans: records how long each
    took.
    """

    queue: QueueClient
    rewards: RewardTally
    sets: Mapping[str, PromptColumns]
    sizes: Mapping[str, int]
    steps: Sequence[int]
    group_size: int
    greedy: bool
    pass_at: Sequence[int]
    pass_reward: float
    temperature: float
    due: Callable[[], list[int]]
    changed: Callable[[], Awaitable[None]]
    keep: Callable[[Sequence[EvaluatedRow]], Awaitable[None]]
    finished: Callable[[EvaluationResult], None]
    spans: Spans = NO_SPANS
    _fitting: Sequence[int] = ()
    _tallies: dict[int, EvaluationTally] = field(default_factory=dict)
    _put: set[int] = field(default_factory=set)
    _round: int = 0
    _cleared: int = 0
    _names: list[str] = field(init=False)
    _begins: list[int] = field(init=False)
    prompts: int = field(init=False)

    def __post_init__(self) -> None:
        """Lay the sets one after another."""
        self._names = list(self.sets)
        *self._begins, self.prompts = accumulate((self.sizes[name] for name in self._names), initial=0)

    @classmethod
    def of(cls, spec: RLJobSpec, *, prompters: Mapping[str, Prompter], **others: Any) -> Evaluation | None:
        """Return the evaluation that a manifest asks for, None where it asks for none.

        prompters: of the sets of held-out prompts, by name; others: fields as above.
        """
        wanted = spec.evaluation
        if wanted is None:
            return None
        held_out = spec.data.held_out
        return cls(
            sets={
                name: PromptColumns.of(
                    spec, prompter=prompters[name], what=f"held-out prompt{f' of {name}' if name else ''}"
                )
                for name in held_out
            },
            sizes={name: each.size for name, each in held_out.items()},
            group_size=wanted.group_size,
            greedy=wanted.greedy,
            pass_at=wanted.pass_at,
            pass_reward=wanted.pass_reward,
            temperature=wanted.temperature or spec.sampling.temperature,
            **others,
        )

    def begin_anew(self) -> None:
        """Forget what came in of evaluations that are not finished; the rows that are out are put again."""
        self._round += 1
        self._tallies.clear()

    async def put_due(self) -> None:
        """Create the rows of each evaluation as it falls due; may be run again after it failed.

        Raises ManifestError for a prompt that is too long, where such are refused, and where all are.
        """
        self._fitting = self._fitting or await asyncio.to_thread(self._fit)
        while True:
            if self._cleared != self._round:
                cleared = self._round
                await self.queue.clear_partition(partition=EVAL, timeout=CALL_TIMEOUT_S)
                self._put.clear()
                self._cleared = cleared
            for step in [step for step in self.due() if step not in self._put]:
                self._tallies.setdefault(step, EvaluationTally())
                await self._create(step)
                self._put.add(step)
            await self.changed()

    async def _create(self, step: int) -> None:
        for indices in batches(self._fitting, PROMPTS_PER_PUT):
            await self._put_prompts(step, indices)

    async def _put_prompts(self, step: int, indices: Sequence[int]) -> None:
        main, first = self.sets[self._names[0]], self.steps.index(step) * self.prompts
        await self.queue.put(
            EVAL,
            main.columns([self._encode(index) for index in indices], copies=self.group_size),
            tags=[self._tags(sample) for _ in indices for sample in range(self.group_size)],
            group_size=self.group_size,
            outputs=main.outputs,
            samples=Samples(
                serials=[first + index for index in indices], step=step, purpose="eval", oldest=step, newest=step
            ),
            timeout=CALL_TIMEOUT_S,
        )

    def _encode(self, index: int) -> EncodedPrompt:
        name = self._set_of(index)
        return self.sets[name].encode(index - self._begins[self._names.index(name)])

    def _set_of(self, index: int) -> str:
        """Return the name of the set that has the prompt ``index``."""
        return self._names[bisect_right(self._begins, index) - 1]

    def _fit(self) -> list[int]:
        """Return the indices of the prompts that are not too long."""
        fitting: list[int] = []
        for name, begin in zip(self._names, self._begins, strict=True):
            before, end = len(fitting), begin + self.sizes[name]
            first: Overlong | None = None
            for index in range(begin, end):
                try:
                    self._encode(index)
                except Overlong as error:
                    if not self.sets[name].skips or (index == end - 1 and len(fitting) == before):
                        raise
                    first = first or error
                else:
                    fitting.append(index)
            if first is not None:
                left_out, of_set = end - begin - len(fitting) + before, f" of the set {name}" if name else ""
                words = "%d of %d prompts%s are left out of all evaluations, the first: %s"
                log.warning(words, left_out, end - begin, of_set, first.what)
        return fitting

    async def replace_lost(self) -> None:
        """Create again the rows whose bytes were lost with a storage unit, for as long as the job lasts."""
        known = 0
        while True:
            wanted = await self.queue.wanted(partition=EVAL, known=known, timeout=CALL_TIMEOUT_S)
            known = wanted.revision
            for step, serial in sorted({(meta.step, meta.serial) for meta in wanted.keys}):
                await self._put_prompts(step, [serial % self.prompts])

    async def count(self) -> None:
        """Take in what the rollouts have scored, for as long as the job lasts."""
        while True:
            claimed = await self.queue.claim(partition=EVAL, task="score", max_rows=4096, timeout=CALL_TIMEOUT_S)
            rows = claimed.rows
            await self.keep([self._evaluated(row) for row in rows if self._take(row)])
            if rows:
                await self.queue.drop(rows, reason=SCORED, timeout=CALL_TIMEOUT_S)
            whole = len(self._fitting) * self.group_size
            for step in [step for step, tally in self._tallies.items() if tally.size == whole]:
                tally = self._tallies.pop(step)
                self.spans.note("evaluation", begin=tally.began, end=clock.now(), step=step, version=step)
                self.finished(self._result(step, tally))

    def _evaluated(self, row: LeasedRow) -> EvaluatedRow:
        index = row.meta.serial % self.prompts
        return EvaluatedRow(row, index, self._set_of(index))

    def _take(self, row: LeasedRow) -> bool:
        """Count a row of this round; return whether it is one.

        For one of another round, now that the partition was cleared, everything is begun anew.
        """
        tally = self._tallies.get(row.meta.step)
        if row.meta.tags.get(ROUND) != self._round and self._cleared == self._round:
            log.info("evaluating anew: rows of another round were still under way")
            self.begin_anew()
        elif row.meta.tags.get(ROUND) == self._round and tally is not None:
            self._note(tally, row)
            return True
        return False

    def _note(self, tally: EvaluationTally, row: LeasedRow) -> None:
        greedy = self._is_greedy(row.meta.sample)
        kind = tally.greedy if greedy else tally.sampled
        if (row.meta.serial, row.meta.sample) not in kind:
            self.rewards.take(row)
        reward = None if failure_of(row) else float(row.meta.tags["reward"])
        kind[row.meta.serial, row.meta.sample] = reward

    def _result(self, step: int, tally: EvaluationTally) -> EvaluationResult:
        parts = {name: EvaluationTally() for name in self._names}
        for (serial, sample), reward in tally.sampled.items():
            parts[self._set_of(serial % self.prompts)].sampled[serial, sample] = reward
        for (serial, sample), reward in tally.greedy.items():
            parts[self._set_of(serial % self.prompts)].greedy[serial, sample] = reward
        results = {name: self._set_result(part) for name, part in parts.items()}
        main = results[self._names[0]]
        return EvaluationResult(
            step=step,
            **{each.name: getattr(main, each.name) for each in fields(main)},
            sets={name: result for name, result in results.items() if name},
        )

    def _set_result(self, tally: EvaluationTally) -> SetResult:
        passed: Counter[int] = Counter()
        for (serial, _), reward in tally.sampled.items():
            passed[serial] += self._passes(reward)
        samples = self.group_size - int(self.greedy)
        return SetResult(
            prompts=len(passed),
            accuracy=fmean(map(self._passes, tally.sampled.values())),
            greedy=fmean(map(self._passes, tally.greedy.values())) if tally.greedy else None,
            reward=_mean(tally.sampled.values()),
            greedy_reward=_mean(tally.greedy.values()),
            pass_at={str(k): pass_at(k, passed=list(passed.values()), samples=samples) for k in self.pass_at},
        )

    def _passes(self, reward: float | None) -> bool:
        return reward is not None and reward >= self.pass_reward

    def _tags(self, sample: int) -> dict[str, Tag]:
        return {"temperature": 0.0 if self._is_greedy(sample) else self.temperature, ROUND: self._round}

    def _is_greedy(self, sample: int) -> bool:
        return self.greedy and sample == self.group_size - 1


def _mean(rewards: Iterable[float | None]) -> float | None:
    had = [reward for reward in rewards if reward is not None]
    return fmean(had) if had else None
