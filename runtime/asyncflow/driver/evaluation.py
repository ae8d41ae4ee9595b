"""Accuracy and mean reward on held-out prompts, at versions that the schedule names, without stopping anything.

An evaluation is a partition's worth of rows pinned to one version; instances that are at that version generate them
between training prompts. Each held-out prompt is sampled ``samples`` times at the evaluation's temperature and, where
asked for, once greedily.

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
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from asyncflow.api.job import RLJobSpec
from asyncflow.data.prompter import Prompter
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.journal import Count, Finite, Share
from asyncflow.driver.prompts import PROMPTS_PER_PUT, Overlong, PromptColumns
from asyncflow.driver.rewards import RewardTally, failure_of
from asyncflow.driver.tasks import EVAL
from asyncflow.net.batches import batches
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta

log = logging.getLogger(__name__)

SCORED = "evaluated"
ROUND = "round"
RIGHT = 1.0
"""The least reward of a right answer. A sample that got no reward is not right, and counted with ``RewardTally``."""


@dataclass(kw_only=True)
class Tally:
    """What has come in of one evaluation, so that a repeat changes nothing: by (serial, sample) its reward, or None."""

    sampled: dict[tuple[int, int], float | None] = field(default_factory=dict)
    greedy: dict[tuple[int, int], float | None] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Samples that are in."""
        return len(self.sampled) + len(self.greedy)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Means over the held-out prompts.

    accuracy, greedy: share of right answers over all samples at the evaluation's temperature, and greedily; reward,
    greedy_reward: mean rewards of those of the same that have one (None in lines of older versions).
    """

    step: Count
    prompts: Count
    accuracy: Share
    greedy: Share | None
    reward: Finite | None = None
    greedy_reward: Finite | None = None


@dataclass(kw_only=True)
class Evaluation:
    """Puts the evaluations that are due and counts what comes back.

    steps: all that are evaluated, in order: the n-th evaluation has the serials from n * prompts on. due: gives the
    steps whose weights are published and are to be evaluated. changed: waits until that may have changed. finished:
    told each result.
    """

    queue: QueueClient
    rewards: RewardTally
    columns: PromptColumns
    steps: Sequence[int]
    prompts: int
    group_size: int
    greedy: bool
    temperature: float
    due: Callable[[], list[int]]
    changed: Callable[[], Awaitable[None]]
    finished: Callable[[EvaluationResult], None]
    _fitting: Sequence[int] = ()
    _tallies: dict[int, Tally] = field(default_factory=dict)
    _put: set[int] = field(default_factory=set)
    _round: int = 0
    _cleared: int = 0

    @classmethod
    def of(cls, spec: RLJobSpec, *, prompter: Prompter | None, **others: Any) -> Evaluation | None:
        """Give the evaluation that a manifest asks for, None where it asks for none; ``others``: fields as above."""
        wanted, data = spec.evaluation, spec.data.eval
        if wanted is None or data is None or prompter is None:
            return None
        return cls(
            columns=PromptColumns.of(spec, prompter=prompter, what="held-out prompt"),
            prompts=data.size,
            group_size=wanted.group_size,
            greedy=wanted.greedy,
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
                self._tallies.setdefault(step, Tally())
                await self._create(step)
                self._put.add(step)
            await self.changed()

    async def _create(self, step: int) -> None:
        for indices in batches(self._fitting, PROMPTS_PER_PUT):
            await self._put_prompts(step, indices)

    async def _put_prompts(self, step: int, indices: Sequence[int]) -> None:
        metas = [self._meta(step, index, sample) for index in indices for sample in range(self.group_size)]
        columns = self.columns.columns([self.columns.encode(index) for index in indices], copies=self.group_size)
        await self.queue.create(
            metas, columns, group_size=self.group_size, outputs=self.columns.outputs, timeout=CALL_TIMEOUT_S
        )

    def _fit(self) -> list[int]:
        """Return the indices of the prompts that are not too long."""
        fitting: list[int] = []
        for index in range(self.prompts):
            try:
                self.columns.encode(index)
            except Overlong as error:
                if not self.columns.skips or (index == self.prompts - 1 and not fitting):
                    raise
                log.warning("left out of all evaluations: %s", error.what)
            else:
                fitting.append(index)
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
            rows = await self.queue.claim(partition=EVAL, task="score", max_rows=4096, timeout=CALL_TIMEOUT_S)
            for row in rows:
                self._take(row)
            if rows:
                await self.queue.drop(rows, reason=SCORED, timeout=CALL_TIMEOUT_S)
            whole = len(self._fitting) * self.group_size
            for step in [step for step, tally in self._tallies.items() if tally.size == whole]:
                self.finished(self._result(step, self._tallies.pop(step)))

    def _take(self, row: LeasedRow) -> None:
        """Count a row of this round; one of another, now that the partition was cleared, is begun anew for."""
        tally = self._tallies.get(row.meta.step)
        if row.meta.tags.get(ROUND) != self._round and self._cleared == self._round:
            log.info("evaluating anew: rows of another round were still under way")
            self.begin_anew()
        elif row.meta.tags.get(ROUND) == self._round and tally is not None:
            self._note(tally, row)

    def _note(self, tally: Tally, row: LeasedRow) -> None:
        greedy = self._is_greedy(row.meta.sample)
        kind = tally.greedy if greedy else tally.sampled
        if (row.meta.serial, row.meta.sample) not in kind:
            self.rewards.take(row)
        reward = None if failure_of(row) else float(row.meta.tags["reward"])
        kind[row.meta.serial, row.meta.sample] = reward

    def _result(self, step: int, tally: Tally) -> EvaluationResult:
        return EvaluationResult(
            step=step,
            prompts=len(self._fitting),
            accuracy=_share_right(tally.sampled.values()),
            greedy=_share_right(tally.greedy.values()) if tally.greedy else None,
            reward=_mean(tally.sampled.values()),
            greedy_reward=_mean(tally.greedy.values()),
        )

    def _meta(self, step: int, index: int, sample: int) -> RowMeta:
        temperature = 0.0 if self._is_greedy(sample) else self.temperature
        return RowMeta(
            partition=EVAL,
            serial=self.steps.index(step) * self.prompts + index,
            sample=sample,
            step=step,
            purpose="eval",
            min_version=step,
            max_version=step,
            tags={"temperature": temperature, ROUND: self._round},
        )

    def _is_greedy(self, sample: int) -> bool:
        return self.greedy and sample == self.group_size - 1


def _share_right(rewards: Collection[float | None]) -> float:
    return fmean(reward is not None and reward >= RIGHT for reward in rewards)


def _mean(rewards: Iterable[float | None]) -> float | None:
    had = [reward for reward in rewards if reward is not None]
    return fmean(had) if had else None
