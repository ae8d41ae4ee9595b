"""Finished groups: their rewards are counted, and each of their samples is given an advantage or dropped.

The driver claims each finished group, decides which of its samples the trainer shall see, and writes ``advantage``.
Everything it needs travels as tags with the claim, so no cell is fetched. The trainer never filters after a claim.
Where several batches must be complete before training begins (``requireBatches``), what is decided is held until then.

A sample without a reward is no sample: it is counted by why it has none, and never trained as if it had earned 0. Its
group goes on with the others as long as these can be compared. When too many have none, the job pauses.

Invariants: every sample that the rollouts finished is either given an advantage or dropped with a reason that is
counted; a driver that claims a group again, because its lease has ended or an answer was lost, does not count it again;
a driver that takes over in the middle of a group decides as the one before would have, but for one of which that had
just dropped what the algorithm leaves out, whose others are then compared among themselves; no sample of a step is
ready to be trained before all of the steps that are to be complete with it are; a job pauses once more than a share of
the samples that one step needs have failed, and more than that of those that were judged for it; a timeout to which the
manifest gives 0 does not count for that; the totals go on over restarts of the driver, but for the last seconds of one
that was killed, and what one held when it ended is counted by the next one too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from asyncflow.algorithms.advantages import zero_variance
from asyncflow.algorithms.base import OUTCOME, Algorithm, Group, algorithm_of
from asyncflow.api.job import RLJobSpec
from asyncflow.api.learning import EvaluationSpec
from asyncflow.api.status import RewardState
from asyncflow.driver.components import ComponentMeans
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.tasks import DRIVER_LEASE_S, TRAIN
from asyncflow.errors import ManifestError, Refused
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import TOKENS_TAG, LeasedRow, Tag
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
    """Counts that are kept over restarts of the driver; fields as in ``RewardTally``."""

    scored: _Kept
    failed: Annotated[dict[Annotated[str, Meta(max_length=32)], _Kept], Meta(max_length=64)]
    first_failure: Annotated[str, Meta(max_length=_MOST_WORDS)]
    alike: dict[Alike, _Kept] = {}


def to_mend(failures: Counter[str]) -> str:
    """Return what has to be mended, by the most frequent of ``failures``: the reward, or a task, which names itself."""
    most = next((failure for failure, _ in failures.most_common(1)), "")
    task, colon, _ = most.partition(": ")
    return f"the task {task}" if colon else "the reward"


def failure_of(row: LeasedRow) -> str:
    """Return why a sample has no reward, "" where it has one."""
    return str(row.meta.tags.get("failure", ""))


@dataclass(kw_only=True)
class RewardTally:
    """The outcomes of all samples of a run, and of its groups.

    needed: samples of one optimizer step; keep: writes the totals down for the next driver, which is given them back
    by ``restore``.
    timeouts_fail: whether a sample whose reward took too long counts for a pause: not where the manifest gives it 0;
    most_failed: share of a step's samples that may have no reward; beyond it the job pauses.
    first_failure: what is known of the first sample without a reward, once the job has paused of the first that failed
    as most did; alike: groups without variance, dropped or not, by whether all of their samples were right or wrong;
    paused: what a paused job waits for, "" while it runs.
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

    def restore(self, kept: Totals | None) -> None:
        """Go on from what an earlier driver kept, None where that is nothing."""
        if kept is not None:
            self.scored, self.failed, self.first_failure = kept.scored, Counter(kept.failed), kept.first_failure
            self.alike = Counter(kept.alike)

    def take(self, row: LeasedRow, *, step: int | None = None) -> None:
        """Count a sample that was judged; step: the one that it is for, None where it is for an evaluation."""
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
        """Stop the job from taking on more work; the first reason stays."""
        self.paused = self.paused or why

    def resume(self) -> None:
        """Continue the job, and judge each step anew."""
        self.paused = ""
        self._judged.clear()
        self._failed_of.clear()

    def flush(self) -> None:
        """Save the totals, if they have changed since they were saved."""
        totals = Totals(self.scored, dict(self.failed), self.first_failure, dict(self.alike))
        if totals != self._kept:
            self.keep(totals)
            self._kept = totals

    def forget(self, step: int) -> None:
        """Forget the counts of a step that was trained."""
        self._judged.pop(step, None)
        self._failed_of.pop(step, None)

    def outcomes(self) -> dict[str, int]:
        """Return how many samples were scored, and how many failed by why."""
        return {"scored": self.scored, **self.failed}

    def equal_groups(self) -> dict[str, int]:
        """Return how many groups were all right, and how many all wrong."""
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
            said = ", ".join(f"{count} {failure}" for failure, count in failures.most_common())
            self.first_failure = self._firsts[failures.most_common(1)[0][0]]
            blamed = to_mend(failures)
            last_line = self.first_failure.strip().rpartition("\n")[2][:300]
            self.pause(
                f"{blamed} to be mended: {failed} of {judged} samples of step {step} have none ({said}). The first: "
                f"{last_line}. Suspend the job, mend {blamed} and resume; or POST /v1/resume to go on as it is"
            )


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """Rules for what becomes of a finished group.

    algorithm: shapes rewards, leaves out samples, and computes advantages. drop_zero_variance: DAPO's dynamic sampling,
    with at most ``most_filtered`` groups dropped for one step. drop_timeouts: a reward that ran into its deadline is
    none, instead of 0. right_at: the least reward of a right answer. shuffle_seed: permute the rewards of each group by
    it, with all else that a decision goes by (a punished length would teach): the control in which nothing may be
    learned; None is off. refills: whether another group takes the place of one that goes no further; in a run that
    promises the same bits none can, because which one it is would depend on when it happens.
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
        """Return the policy that a manifest asks for."""
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
        """Return what becomes of the samples of a group that have a reward."""
        if (reason := self._refusal(group)) is not None:
            return GroupDecision(reason, {}, np.zeros(0, np.float32))
        if self.shuffle_seed is not None:
            rng = np.random.default_rng([self.shuffle_seed, group.serial])
            group = group.permuted(_order(len(group.rewards), rng, compared=self.algorithm.compares))
        shaped, left_out = self.algorithm.shaped(group), self.algorithm.excluded(group)
        if len(left_out) == len(shaped):
            return GroupDecision(next(iter(left_out.values())), {}, np.zeros(0, np.float32))
        if self.algorithm.writes == OUTCOME:
            return GroupDecision(None, left_out, shaped.astype(np.float32))
        if self.algorithm.by_turn:
            turns = self.algorithm.turn_advantages(group, shaped)
            return GroupDecision(None, left_out, np.array([each.mean() for each in turns], np.float32), turns)
        return GroupDecision(None, left_out, self.algorithm.advantages(shaped))

    def alike(self, group: Group) -> Alike | None:
        """Return "right" or "wrong" where all samples of a group are equally so, else None."""
        if len(group.rewards) < self.algorithm.fewest or not zero_variance(group.rewards):
            return None
        return "right" if group.rewards[0] >= self.right_at else "wrong"

    def drops(self, failure: str) -> bool:
        """Return whether a sample whose reward failed in this way is dropped; "": it has its reward."""
        return bool(failure) and (failure != "timeout" or self.drop_timeouts)

    def _refusal(self, group: Group) -> str | None:
        if len(group.rewards) < self.algorithm.fewest:
            return TOO_FEW_REWARDS
        if self.drop_zero_variance and zero_variance(group.rewards):
            told_apart = self.algorithm.by_turn and any(
                each.any() for each in self.algorithm.turn_advantages(group, group.rewards)
            )
            return None if told_apart else FILTERED_ZERO_VARIANCE
        return None


class GroupDecision(NamedTuple):
    """Decision about a group of n samples.

    reason: why the trainer shall see none of them, None where it shall see some; left_out: the indices of those that it
    shall not see, with the reason; advantages: float32[n], or the shaped rewards where the trainer makes them; turns:
    the advantages of the turns of each, float32[turns], whose mean is then the sample's; () where turns have none.
    """

    reason: str | None
    left_out: Mapping[int, str]
    advantages: np.ndarray
    turns: Sequence[np.ndarray] = ()


class DecidedGroup(NamedTuple):
    """The samples of a group that the trainer shall see, the advantage of each, float32[n], and the others.

    reasons: why the others are left out, by row; turns: as in ``GroupDecision``.
    """

    rows: list[LeasedRow]
    advantages: np.ndarray
    others: list[LeasedRow]
    reasons: Mapping[int, str]
    turns: Sequence[np.ndarray] = ()

    @property
    def cells(self) -> Jagged:
        """The advantage of each sample that the trainer shall see, or those of its turns, float32."""
        return Jagged.from_rows(self.turns or [self.advantages[i : i + 1] for i in range(len(self.rows))], np.float32)

    @property
    def leases(self) -> set[str]:
        """The leases of its samples."""
        return {row.lease for row in (*self.rows, *self.others)}


class _Exchange(NamedTuple):
    """A finished group, the step to which it is to go, and the group that is late there."""

    serial: int
    step: int
    late: int


def _order(size: int, rng: np.random.Generator, *, compared: bool) -> np.ndarray:
    """Return the order, int64[n], in which samples are given the rewards of a group, so that these say nothing of them.

    compared: samples are judged relative to the group; then each order is as likely, and the mean of an advantage over
    all of them is 0. Otherwise no sample keeps its own reward: with one chance in n of that it would still be earned.
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
    """Return the rewards of the turns of a sample, float64[turns]; the last has all where its turns have none."""
    if TURN_REWARDS in tags:
        return np.array(msgspec.json.decode(str(tags[TURN_REWARDS])), dtype=np.float64)
    rewards = np.zeros(int(tags.get("turns", 1)))
    rewards[-1] = float(tags["reward"])
    return rewards


@dataclass(kw_only=True)
class AdvantageTask:
    """Runs the advantage task.

    finished: called with the serial of each group that was generated; excluded: of one that the trainer will not see;
    both return whether this is the first time. complete: returns whether the steps are complete that must be before a
    step is trained. late: returns the step to which a finished group may go, and the group that is
    late there, None where there is none; exchanged: called when the two have changed their steps; decided: called with
    the step and each group that the trainer shall see, again where it is decided again. spans: records when it decides.
    filtered: groups of each step without variance that were dropped, by an earlier driver too; components: means of the
    components of the reward.
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
    _asked: _Exchange | None = None

    async def run(self) -> None:
        """Serve the task for as long as the job lasts.

        Raises ManifestError when more groups of a step had no variance than the policy allows.
        """
        while True:
            await self._exchange()
            await self._release()
            claimed = await self.queue.claim(
                partition=TRAIN, task="advantage", max_rows=1 << 20, max_groups=GROUPS_PER_CLAIM, timeout=CALL_TIMEOUT_S
            )
            by_serial = sorted(claimed.rows, key=lambda row: (row.meta.serial, row.meta.sample))
            with self.spans.beside("advantage"):
                for serial, group in groupby(by_serial, key=lambda row: row.meta.serial):
                    await self._decide(serial, list(group))

    async def renew(self) -> None:
        """Renew the leases of what is held, for ever; what was lost is claimed again by ``run``."""
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
        """Write the advantages of all steps of which enough are complete."""
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
            flat = reason == FILTERED_ZERO_VARIANCE  # as many groups of each step may be
            (log.debug if flat else log.info)("group %d goes no further: %s", serial, reason)
            # Before the drops, whose answer may be lost: what is dropped is not claimed again.
            first = self._exclude(serial, reason, mend=to_mend(Counter(map(failure_of, failing))))
            filtered = first and flat
            self.filtered[group[0].meta.step] += filtered
            await self._drop(group, dict.fromkeys([row.row for row in kept], reason) | failed)
            if filtered:
                self._check_filtered(group[0].meta.step, reward=judged.rewards[0])
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
        """Return the step that has a finished group, once it has taken the place of one that is late."""
        if (place := self.late(serial)) is None:
            return step
        self._asked = _Exchange(serial, *place)
        return place[0] if await self._exchange() else step

    async def _exchange(self) -> bool:
        """Ask for the exchange that was not answered yet, if any; return whether it was made.

        The same pair is asked for until there is an answer: the queue may have made an exchange that it did not answer.
        """
        if self._asked is None:
            return False
        serial, step, late = self._asked
        try:
            await self.queue.exchange(partition=TRAIN, serial=serial, step=step, late=late, timeout=CALL_TIMEOUT_S)
            self.exchanged(serial, late)
            made = True
        except Refused as error:
            log.warning("group %d stays in its step: %s", serial, error)
            made = False
        self._asked = None
        return made

    async def _drop(self, rows: list[LeasedRow], reasons: Mapping[int, str]) -> None:
        def reason_of(row: LeasedRow) -> str:
            return reasons[row.row]

        for reason, alike in groupby(sorted(rows, key=reason_of), key=reason_of):
            await self.queue.drop(list(alike), reason=reason, timeout=CALL_TIMEOUT_S)

    def _exclude(self, serial: int, reason: str, *, mend: str) -> bool:
        first = self.excluded(serial)
        if not self.policy.refills:
            self.rewards.pause(
                f"{mend} to be mended: group {serial} goes no further ({reason}), and schedule.deterministic is "
                "true: which prompt takes its place would depend on when that happened"
            )
        return first

    def _check_filtered(self, step: int, *, reward: float) -> None:
        if 2 * self.filtered[step] == self.policy.most_filtered:
            what = "step %d: half of the groups that maxFilteredBatches allows to drop were dropped; of all groups, %s"
            log.warning(what, step, self._alike_words)
        if self.filtered[step] > self.policy.most_filtered:
            raise ManifestError(
                f"{self.filtered[step]} groups of step {step} were dropped: within each, all rewards were equal,"
                f" the last time {reward:g} (of all groups, {self._alike_words})",
                where="spec.algorithm.filterZeroVariance",
                hint="The task is too easy or too hard for the model, or the reward always says the same. Change data"
                " or reward, keep such groups, or raise maxFilteredBatches; the run can be resumed",
            )

    @property
    def _alike_words(self) -> str:
        return f"{self.rewards.alike['right']} were all right and {self.rewards.alike['wrong']} all wrong"
