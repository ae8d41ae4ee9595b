"""Decision of finished groups: counts their rewards, and writes an advantage for each sample or drops it.

The driver claims each finished group, decides which of its samples are trained, and writes ``advantage``. All inputs of
a decision are tags in the answer to the claim, so no cell is fetched. The trainer never filters after a claim. If
several batches must be complete before training starts (``requireBatches``), decided groups are held until then.

A sample without a reward is counted by its kind of failure, and never trained as if its reward were 0. The other
samples of its group are still trained if they can be compared. If too many samples have no reward, the job pauses.

Invariants:
Every sample that the rollouts finished either receives an advantage or is dropped with a reason that is counted.
A driver that claims a group again, because its lease has ended or an answer was lost, does not count it again.
A driver that takes over a partly decided group decides it as the driver before it would have, with one exception: if
the samples that the algorithm excludes were dropped already, the remaining ones are compared among themselves.
No sample of a step can be trained before all steps that must be complete together with it are complete.
A job pauses when the failed samples of a step exceed a share both of the samples that a step needs and of the samples
judged for it; a timeout that the manifest scores as 0 does not count as failed.
The totals continue over restarts of the driver, except for the last seconds of a killed driver; a group that a driver
held when it ended is counted again by the next one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from asyncflow.algorithms.advantages import zero_variance
from asyncflow.algorithms.base import NAME, OUTCOME, Algorithm, Group, algorithm_of
from asyncflow.api.job import RLJobSpec
from asyncflow.api.learning import EvaluationSpec
from asyncflow.api.status import RewardState
from asyncflow.driver.components import ComponentMeans
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.journal import StateFile
from asyncflow.driver.tasks import DRIVER_LEASE_S, TRAIN
from asyncflow.errors import AsyncFlowError, ManifestError, Refused, in_one_line
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import FILTERED, TOKENS_TAG, LeasedRow, Tag
from asyncflow.rewards.wire import TURN_REWARDS
from asyncflow.rpc.columns import Jagged
from asyncflow.telemetry.spans import NO_SPANS, Spans

log = logging.getLogger(__name__)

_MOST_WORDS = 2000
_Kept = Annotated[int, Meta(ge=0, le=1 << 50)]
Alike: TypeAlias = Literal["right", "wrong"]

FILTERED_ZERO_VARIANCE: Final = "filtered: zero variance"
TOO_FEW_REWARDS: Final = "too few rewards in its group"
GROUPS_PER_CLAIM: Final = 64


class Totals(msgspec.Struct, frozen=True):
    """Counts that survive restarts of the driver; fields as in ``RewardTally``."""

    scored: _Kept
    failed: Annotated[dict[Annotated[str, Meta(max_length=32)], _Kept], Meta(max_length=64)]
    first_failure: Annotated[str, Meta(max_length=_MOST_WORDS)]
    alike: dict[Alike, _Kept] = {}


def failing_part(failures: Counter[str]) -> str:
    """Return the part to fix, from the most frequent of ``failures``: the reward, or a task, whose failures name it."""
    most = next((failure for failure, _ in failures.most_common(1)), "")
    task, colon, _ = most.partition(": ")
    return f"the task {task}" if colon else "the reward"


def failure_of(row: LeasedRow) -> str:
    """Return why a sample has no reward, "" if it has one."""
    return str(row.meta.tags.get("failure", ""))


@dataclass(kw_only=True)
class RewardTally:
    """Counts of the outcomes of all samples and groups of a run.

    needed: number of samples of one optimizer step; keep: saves the totals for the next driver, which passes them to
    ``restore``;
    timeouts_fail: whether a timed-out reward counts as failed for a pause; False if the manifest scores it as 0;
    most_failed: share of a step's samples that may have no reward; above it the job pauses;
    first_failure: description of the first sample without a reward; after a pause, of the first sample with the most
    frequent failure; alike: number of groups without variance, dropped or not, that were all right or all wrong;
    paused: reason of the pause, "" while the job runs.
    """

    needed: int
    keep: Callable[[Totals], None]
    timeouts_fail: bool = True
    most_failed: float = 0.5
    scored: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first_failure: str = ""
    alike: Counter[Alike] = field(default_factory=Counter)
    paused: str = ""
    _judged: Counter[int] = field(default_factory=Counter)
    _failed_of: dict[int, Counter[str]] = field(default_factory=dict)
    _firsts: dict[str, str] = field(default_factory=dict)
    _kept: Totals | None = None

    @classmethod
    def of(cls, spec: RLJobSpec, file: StateFile) -> RewardTally:
        """Return the tally of a manifest, with the totals that an earlier driver kept in ``file``."""
        tally = cls(
            needed=spec.algorithm.samples_per_step,
            keep=file.write,
            timeouts_fail=spec.reward.on_timeout == "drop",
            most_failed=spec.reward.max_failed,
        )
        tally.restore(file.read(Totals))
        return tally

    def restore(self, kept: Totals | None) -> None:
        """Restore the totals of an earlier driver, None if there are none."""
        if kept is not None:
            self.scored, self.failed, self.first_failure = kept.scored, Counter(kept.failed), kept.first_failure
            self.alike = Counter(kept.alike)

    def take(self, row: LeasedRow, *, step: int | None = None) -> None:
        """Count a judged sample; step: the step that it belongs to, None for an evaluation."""
        failure = failure_of(row)
        if step is not None:
            self._judged[step] += 1
        if not failure:
            self.scored += 1
            return
        self.failed[failure] += 1
        first = self._firsts.setdefault(failure, f"{failure}: {row.meta.tags.get('detail', '')}"[:_MOST_WORDS])
        self.first_failure = self.first_failure or first
        if step is not None and (failure != "timeout" or self.timeouts_fail):
            self._failed_of.setdefault(step, Counter())[failure] += 1
            self._pause_if_most_failed(step)

    def pause(self, why: str) -> None:
        """Pause the job; only the first reason is kept."""
        self.paused = self.paused or why

    def resume(self) -> None:
        """Continue the job, and reset the counts of failed samples per step."""
        self.paused = ""
        self._judged.clear()
        self._failed_of.clear()

    def flush(self) -> None:
        """Save the totals if they have changed since they were last saved."""
        totals = Totals(self.scored, dict(self.failed), self.first_failure, dict(self.alike))
        if totals != self._kept:
            self.keep(totals)
            self._kept = totals

    def forget(self, step: int) -> None:
        """Forget the counts of a step that was trained."""
        self._judged.pop(step, None)
        self._failed_of.pop(step, None)

    def outcomes(self) -> dict[str, int]:
        """Return the number of scored samples, and of failed samples by reason."""
        return {"scored": self.scored, **self.failed}

    def equal_groups(self) -> dict[str, int]:
        """Return the number of groups that were all right, and of those that were all wrong."""
        return {"right": self.alike["right"], "wrong": self.alike["wrong"]}

    @property
    def state(self) -> RewardState:
        """Counts of scored and failed samples, and of equal groups, for the status."""
        return RewardState(
            scored=self.scored,
            failed=dict(self.failed),
            first_failure=self.first_failure,
            groups_all_right=self.alike["right"],
            groups_all_wrong=self.alike["wrong"],
        )

    def _pause_if_most_failed(self, step: int) -> None:
        failures, judged = self._failed_of[step], self._judged[step]
        failed = failures.total()
        if failed > self.most_failed * max(self.needed, judged):
            reasons = ", ".join(f"{count} {failure}" for failure, count in failures.most_common())
            self.first_failure = self._firsts[failures.most_common(1)[0][0]]
            part = failing_part(failures)
            last_line = self.first_failure.strip().rpartition("\n")[2][:300]
            self.pause(
                f"{part} to be fixed: {failed} of {judged} samples of step {step} have none ({reasons}). The first: "
                f"{last_line}. Suspend the job (on one machine: Ctrl-C), fix {part} and resume; or POST /v1/resume to "
                "continue unchanged"
            )


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """Rules for the decision of a finished group.

    algorithm: shapes rewards, excludes samples, and computes advantages. drop_zero_variance: DAPO's dynamic sampling;
    at most ``most_filtered`` groups are filtered in one step. drop_timeouts: a reward that exceeded its deadline counts
    as missing, not as 0. right_at: the least reward of a right answer. shuffle_seed: seed by which the rewards of each
    group are permuted together with all other inputs of the decision (otherwise a length penalty could still be
    learned); a control experiment in which the model must not improve; None: off. refills: whether another group
    replaces a dropped one; False in a run that promises the same bits, since the replacement would depend on timing.
    """

    algorithm: Algorithm[Any]
    drop_zero_variance: bool
    most_filtered: int
    drop_timeouts: bool
    right_at: float = 1.0
    shuffle_seed: int | None = None
    refills: bool = True

    @classmethod
    def of(cls, spec: RLJobSpec) -> GroupPolicy:
        """Return the policy of a manifest."""
        return cls(
            algorithm=algorithm_of(spec),
            drop_zero_variance=spec.algorithm.filter_zero_variance == "drop",
            most_filtered=spec.algorithm.max_filtered_batches * spec.algorithm.prompts_per_step,
            drop_timeouts=spec.reward.on_timeout == "drop",
            right_at=spec.evaluation.pass_reward if spec.evaluation is not None else EvaluationSpec().pass_reward,
            shuffle_seed=spec.algorithm.seed if spec.reward.shuffle else None,
            refills=not spec.schedule.deterministic,
        )

    def decide(self, group: Group) -> GroupDecision:
        """Return the decision about the samples of a group that have a reward.

        Raises ManifestError if the class of the algorithm raises an error or returns values of another shape.
        """
        try:
            return self._decision(group)
        except AsyncFlowError:
            raise
        except Exception as error:
            kind = type(self.algorithm)
            log.exception("the algorithm failed for the group %d", group.serial)
            why = in_one_line(error, folder=Path(inspect.getfile(kind)).parent)
            what = f"{kind.__name__} failed for the rewards {group.rewards.tolist()}: {why}"
            raise ManifestError(what, where=NAME, hint="Correct the class") from error

    def _decision(self, group: Group) -> GroupDecision:
        if (reason := self._refusal(group)) is not None:
            return GroupDecision(reason, {}, np.zeros(0, np.float32))
        if self.shuffle_seed is not None:
            rng = np.random.default_rng([self.shuffle_seed, group.serial])
            group = group.permuted(_order(len(group.rewards), rng, compared=self.algorithm.compares))
        shaped = self._one_each(self.algorithm.shaped(group), group, method="shaped")
        left_out = self.algorithm.excluded(group)
        if len(left_out) == len(shaped):
            return GroupDecision(next(iter(left_out.values())), {}, np.zeros(0, np.float32))
        if self.algorithm.writes == OUTCOME:
            return GroupDecision(None, left_out, shaped.astype(np.float32))
        if self.algorithm.by_turn:
            turns = self.algorithm.turn_advantages(group, shaped)
            return GroupDecision(None, left_out, np.array([each.mean() for each in turns], np.float32), turns)
        advantages = self._one_each(self.algorithm.advantages(shaped), group, method="advantages")
        return GroupDecision(None, left_out, advantages.astype(np.float32))

    def _one_each(self, values: Any, group: Group, *, method: str) -> np.ndarray:
        """Return as an array what a method of the algorithm returned: a number for each sample of a group."""
        found = np.asarray(values)
        if found.shape != group.rewards.shape:
            what = f"{type(self.algorithm).__name__}.{method} returned an array of the shape {found.shape}"
            what += f" for {len(group.rewards)} samples"
            raise ManifestError(what, where=NAME, hint="Return one number for each sample, float[n]")
        return found

    def alike(self, group: Group) -> Alike | None:
        """Return "right" or "wrong" if all samples of a group have the same reward, None otherwise."""
        if len(group.rewards) < self.algorithm.min_samples or not zero_variance(group.rewards):
            return None
        return "right" if group.rewards[0] >= self.right_at else "wrong"

    def drops(self, failure: str) -> bool:
        """Return whether a sample with this failure of its reward is dropped; "" means no failure."""
        return bool(failure) and (failure != "timeout" or self.drop_timeouts)

    def _refusal(self, group: Group) -> str | None:
        if len(group.rewards) < self.algorithm.min_samples:
            return TOO_FEW_REWARDS
        if self.drop_zero_variance and zero_variance(group.rewards):
            turns_differ = self.algorithm.by_turn and any(
                each.any() for each in self.algorithm.turn_advantages(group, group.rewards)
            )
            return None if turns_differ else FILTERED_ZERO_VARIANCE
        return None


class GroupDecision(NamedTuple):
    """Decision about a group of n samples.

    reason: why no sample is trained, None if some are; left_out: reason by index of each sample that is not trained;
    advantages: float32[n], or the shaped rewards if the trainer computes advantages; turns: for each sample the
    advantages of its turns, float32[turns], whose mean is the advantage of the sample; () if turns have none.
    """

    reason: str | None
    left_out: Mapping[int, str]
    advantages: np.ndarray
    turns: Sequence[np.ndarray] = ()


class DecidedGroup(NamedTuple):
    """A decided group. rows: the samples to train; advantages: one for each of them, float32[n]; others: the remaining
    samples; reasons: why these are left out, by row; turns: as in ``GroupDecision``.
    """

    rows: list[LeasedRow]
    advantages: np.ndarray
    others: list[LeasedRow]
    reasons: Mapping[int, str]
    turns: Sequence[np.ndarray] = ()

    @property
    def cells(self) -> Jagged:
        """The advantage of each sample to train, or the advantages of its turns, float32."""
        return Jagged.from_rows(self.turns or [self.advantages[i : i + 1] for i in range(len(self.rows))], np.float32)

    @property
    def leases(self) -> set[str]:
        """The leases of all samples of the group."""
        return {row.lease for row in (*self.rows, *self.others)}


class _Exchange(NamedTuple):
    """A finished group, the step to which it moves, and the late group of that step."""

    serial: int
    step: int
    late: int


def _order(size: int, rng: np.random.Generator, *, compared: bool) -> np.ndarray:
    """Return the order, int64[n], in which a group's rewards are assigned to its samples, independent of the samples.

    compared: samples are judged relative to the group; then each order is equally likely, and the mean of a sample's
    advantage over all orders is 0. Otherwise no sample keeps its own reward: with a probability of 1/n to keep it, the
    reward would still teach.
    """
    order = rng.permutation(size)
    if compared:
        return order
    others = np.empty_like(order)
    others[order] = np.roll(order, 1)
    return others


def _judged(serial: int, rows: Sequence[LeasedRow], *, by_turn: bool) -> Group:
    tags = [row.meta.tags for row in rows]
    return Group(
        serial=serial,
        samples=np.array([row.meta.sample for row in rows], dtype=np.int64),
        rewards=np.array([float(tag["reward"]) for tag in tags], dtype=np.float64),
        lengths=np.array([int(tag.get(TOKENS_TAG, 0)) for tag in tags], dtype=np.int64),
        cut=np.array([tag.get("finish") == "length" for tag in tags], dtype=np.bool_),
        turns=[_rewards_of_turns(tag) for tag in tags] if by_turn else (),
    )


def _rewards_of_turns(tags: Mapping[str, Tag]) -> np.ndarray:
    """Return the rewards of a sample's turns, float64[turns]; if turns have none, the last has the sample's reward."""
    if TURN_REWARDS in tags:
        return np.array(msgspec.json.decode(str(tags[TURN_REWARDS])), dtype=np.float64)
    rewards = np.zeros(int(tags.get("turns", 1)))
    rewards[-1] = float(tags["reward"])
    return rewards


@dataclass(kw_only=True)
class AdvantageTask:
    """Runs the advantage task.

    finished: called with the serial of each generated group; excluded: called with the serial of each group that is not
    trained; both return whether this is the first call for the group. complete: returns whether all steps that must be
    complete before a step is trained are complete. late: returns the step to which a finished group may move and the
    late group there, None if there is none. exchanged: called after the two groups have exchanged their steps. decided:
    called with the step and each group to be trained, repeatedly if it is decided repeatedly. spans: records the times
    of decisions. filtered: number of wholly filtered groups by step, including those of earlier drivers.
    components: means of the components of the reward.
    """

    queue: QueueClient
    policy: GroupPolicy
    rewards: RewardTally
    finished: Callable[[int], bool]
    excluded: Callable[[int], bool]
    complete: Callable[[int], bool]
    late: Callable[[int], tuple[int, int] | None]
    exchanged: Callable[[int, int], None]
    decided: Callable[[int, DecidedGroup], None]
    spans: Spans = NO_SPANS
    filtered: Counter[int] = field(default_factory=Counter)
    components: ComponentMeans = field(default_factory=ComponentMeans)
    _held: dict[int, dict[int, DecidedGroup]] = field(default_factory=dict)
    _pending_exchange: _Exchange | None = None

    async def run(self) -> None:
        """Serve the task until the job ends.

        Raises ManifestError if more groups of a step were filtered than the policy allows.
        """
        while True:
            await self._exchange()
            await self._release()
            claimed = await self.queue.claim(
                partition=TRAIN, task="advantage", max_rows=1 << 20, max_groups=GROUPS_PER_CLAIM, timeout=CALL_TIMEOUT_S
            )
            by_serial = sorted(claimed.rows, key=lambda row: (row.meta.serial, row.meta.sample))
            with self.spans.background("advantage"):
                for serial, group in groupby(by_serial, key=lambda row: row.meta.serial):
                    await self._decide(serial, list(group))

    async def renew(self) -> None:
        """Renew the leases of held groups, without end; ``run`` claims groups with lost leases again."""
        while True:
            held = [group for groups in self._held.values() for group in groups.values()]
            if leases := set().union(*(group.leases for group in held)):
                lost = leases.difference(await self.queue.renew(sorted(leases), timeout=DRIVER_LEASE_S / 3))
                for groups in self._held.values():
                    for serial in [one for one, group in groups.items() if not lost.isdisjoint(group.leases)]:
                        log.info("group %d is decided again: its lease has ended", serial)
                        del groups[serial]
            await asyncio.sleep(DRIVER_LEASE_S / 3)

    async def _release(self) -> None:
        """Write the advantages of the held groups of all steps that may be trained."""
        for step in sorted(self._held):
            if not self.complete(step):
                continue
            for serial, group in list(self._held[step].items()):
                await self._drop(group.others, group.reasons)
                written = {self.policy.algorithm.writes: group.cells}
                await self.queue.complete(group.rows, written, timeout=CALL_TIMEOUT_S)
                self._held[step].pop(serial, None)
            del self._held[step]

    async def _decide(self, serial: int, group: list[LeasedRow]) -> None:
        if counts := self.finished(serial):
            for row in group:
                self.rewards.take(row, step=row.meta.step)
        failing = [row for row in group if self.policy.drops(failure_of(row))]
        failed = {row.row: f"reward {failure_of(row)}" for row in failing}
        kept = [row for row in group if row.row not in failed]
        judged = _judged(serial, kept, by_turn=self.policy.algorithm.by_turn)
        reason, left_out, advantages, turns = self.policy.decide(judged)
        if counts and (alike := self.policy.alike(judged)) is not None:
            self.rewards.alike[alike] += 1
        if reason is not None:
            flat = reason == FILTERED_ZERO_VARIANCE  # frequent, so logged at a lower level
            (log.debug if flat else log.info)("group %d is dropped: %s", serial, reason)
            # Before the drops: if their answer is lost, the dropped rows are not claimed again.
            first = self._exclude(serial, reason, part=failing_part(Counter(map(failure_of, failing))))
            filtered = first and reason.startswith(FILTERED)
            self.filtered[group[0].meta.step] += filtered
            await self._drop(group, dict.fromkeys([row.row for row in kept], reason) | failed)
            if filtered:
                self._check_filtered(group[0].meta.step, reason=reason, reward=judged.rewards[0])
            return
        await self._drop(failing, failed)
        chosen = [i for i in range(len(kept)) if i not in left_out]
        others = {kept[i].row: why for i, why in left_out.items()}
        decided = DecidedGroup(
            [kept[i] for i in chosen],
            advantages[chosen],
            [row for row in kept if row.row in others],
            others,
            [turns[i] for i in chosen] if turns else (),
        )
        step = await self._step_of(serial, group[0].meta.step)
        self.components.take(step, serial, decided.rows)
        self._held.setdefault(step, {})[serial] = decided
        self.decided(step, decided)

    async def _step_of(self, serial: int, step: int) -> int:
        """Exchange a finished group with a late one if possible; return the step of the finished group."""
        if (place := self.late(serial)) is None:
            return step
        self._pending_exchange = _Exchange(serial, *place)
        return place[0] if await self._exchange() else step

    async def _exchange(self) -> bool:
        """Request the pending exchange, if any, and return whether it was made.

        The same pair is requested until an answer arrives, since the queue may have made the exchange although its
        answer was lost.
        """
        if self._pending_exchange is None:
            return False
        serial, step, late = self._pending_exchange
        try:
            await self.queue.exchange(partition=TRAIN, serial=serial, step=step, late=late, timeout=CALL_TIMEOUT_S)
            self.exchanged(serial, late)
            made = True
        except Refused as error:
            log.warning("group %d stays in its step: %s", serial, error)
            made = False
        self._pending_exchange = None
        return made

    async def _drop(self, rows: list[LeasedRow], reasons: Mapping[int, str]) -> None:
        def reason_of(row: LeasedRow) -> str:
            return reasons[row.row]

        for reason, alike in groupby(sorted(rows, key=reason_of), key=reason_of):
            await self.queue.drop(list(alike), reason=reason, timeout=CALL_TIMEOUT_S)

    def _exclude(self, serial: int, reason: str, *, part: str) -> bool:
        first = self.excluded(serial)
        if not self.policy.refills:
            self.rewards.pause(
                f"{part} to be fixed: group {serial} is dropped ({reason}), and schedule.deterministic is true: the "
                "prompt that would replace it depends on timing"
            )
        return first

    def _check_filtered(self, step: int, *, reason: str, reward: float) -> None:
        if 2 * self.filtered[step] == self.policy.most_filtered:
            what = "step %d: half of the groups that maxFilteredBatches allows to drop were dropped; of all groups, %s"
            log.warning(what, step, self._alike_words)
        if self.filtered[step] <= self.policy.most_filtered:
            return
        if reason != FILTERED_ZERO_VARIANCE:
            raise ManifestError(
                f"{self.filtered[step]} groups of step {step} were dropped, the last one as {reason!r}"
                f" (of all groups, {self._alike_words})",
                where="spec.algorithm.maxFilteredBatches",
                hint="Change the settings by which the algorithm excludes all samples of a group (overlong:"
                " sampling.maxTokens), or raise maxFilteredBatches; the run can be resumed",
            )
        raise ManifestError(
            f"{self.filtered[step]} groups of step {step} were dropped: within each, all rewards were equal,"
            f" the last time {reward:g} (of all groups, {self._alike_words})",
            where="spec.algorithm.filterZeroVariance",
            hint="The task is too easy or too hard for the model, or the reward is constant. Change data or reward,"
            " keep such groups, or raise maxFilteredBatches; the run can be resumed",
        )

    @property
    def _alike_words(self) -> str:
        return f"{self.rewards.alike['right']} were all right and {self.rewards.alike['wrong']} all wrong"
