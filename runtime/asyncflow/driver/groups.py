"""The advantage task: whole groups in, one scalar a sample out.

The driver claims each finished group, decides whether the trainer shall see it, and writes ``advantage``. Everything it
needs travels as tags with the claim, so no cell is fetched. The trainer never filters after a claim.

Invariant: every group that the rollouts finished is either given an advantage or dropped with a reason that is counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from asyncflow.algorithms.advantages import AdvantageName, group_advantages
from asyncflow.algorithms.filters import zero_variance
from asyncflow.api.job import RLJobSpec
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import ManifestError
from asyncflow.net.frames import Jagged
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow

log = logging.getLogger(__name__)

FILTERED_ZERO_VARIANCE = "filtered: zero variance"
DROPPED_REWARD_TIMEOUT = "reward_timeout"
GROUPS_PER_CLAIM = 64


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """What becomes of a finished group.

    estimator: the advantage's name (``asyncflow.algorithms.advantages``). drop_zero_variance: DAPO's dynamic sampling,
    with at most ``most_filtered`` groups dropped for one step.
    drop_timeouts: a group with a reward that ran into its deadline is dropped instead of getting reward 0.
    shuffle_seed: permute the rewards of each group by it, the control in which nothing may be learned; None is off.
    """

    estimator: AdvantageName
    drop_zero_variance: bool
    most_filtered: int
    drop_timeouts: bool
    shuffle_seed: int | None = None

    @classmethod
    def of(cls, spec: RLJobSpec) -> GroupPolicy:
        """Give the policy that a manifest asks for."""
        return cls(
            estimator=spec.algorithm.advantage,
            drop_zero_variance=spec.algorithm.filter_zero_variance == "drop",
            most_filtered=spec.algorithm.max_filtered_batches * spec.algorithm.prompts_per_step,
            drop_timeouts=spec.reward.on_timeout == "drop",
            shuffle_seed=spec.algorithm.seed if spec.reward.shuffle else None,
        )

    def advantages(self, serial: int, rewards: np.ndarray) -> np.ndarray:
        """Give float32[G] for the rewards [G] of group ``serial``."""
        if self.shuffle_seed is not None:
            rewards = np.random.default_rng([self.shuffle_seed, serial]).permutation(rewards)
        return group_advantages(rewards, name=self.estimator)

    def refusal(self, rewards: np.ndarray, flags: Sequence[str]) -> str | None:
        """Give the reason for which the trainer shall not see the group, or None."""
        if self.drop_timeouts and "timeout" in flags:
            return DROPPED_REWARD_TIMEOUT
        if self.drop_zero_variance and zero_variance(rewards):
            return FILTERED_ZERO_VARIANCE
        return None


@dataclass(kw_only=True)
class Groups:
    """Runs the advantage task.

    finished: told the serial of each group that was generated; excluded: of one that the trainer will not see.
    filtered: groups of each step without variance, those that an earlier driver dropped included.
    """

    queue: QueueClient
    policy: GroupPolicy
    finished: Callable[[int], None]
    excluded: Callable[[int], None]
    filtered: Counter[int] = field(default_factory=Counter)

    async def run(self) -> None:
        """Serve the task for as long as the job lasts.

        Raises ManifestError when more groups of a step had no variance than the policy allows.
        """
        while True:
            rows = await self.queue.claim(
                partition=TRAIN, task="advantage", max_rows=1 << 20, max_groups=GROUPS_PER_CLAIM, timeout=CALL_TIMEOUT_S
            )
            by_serial = sorted(rows, key=lambda row: (row.meta.serial, row.meta.sample))
            for serial, group in groupby(by_serial, key=lambda row: row.meta.serial):
                await self._decide(serial, list(group))

    async def _decide(self, serial: int, group: list[LeasedRow]) -> None:
        rewards = np.array([float(row.meta.tags["reward"]) for row in group], dtype=np.float64)
        reason = self.policy.refusal(rewards, [str(row.meta.tags.get("flag", "")) for row in group])
        self.finished(serial)
        if reason is not None:
            log.info("group %d goes no further: %s", serial, reason)
            await self.queue.drop(group, reason=reason, timeout=CALL_TIMEOUT_S)
            self.excluded(serial)
            if reason == FILTERED_ZERO_VARIANCE:
                self._count_filtered(group[0].meta.step, reward=rewards[0])
            return
        advantages = self.policy.advantages(serial, rewards)
        column = Jagged.from_rows([advantages[i : i + 1] for i in range(len(group))], np.float32)
        await self.queue.complete(group, {"advantage": column}, timeout=CALL_TIMEOUT_S)

    def _count_filtered(self, step: int, *, reward: float) -> None:
        self.filtered[step] += 1
        if self.filtered[step] > self.policy.most_filtered:
            raise ManifestError(
                f"{self.filtered[step]} groups of step {step} were dropped: within each, all rewards were equal,"
                f" the last time {reward:g}",
                where="spec.algorithm.filterZeroVariance",
                hint="The task is too easy or too hard for the model, or the reward always says the same. Change data"
                " or reward, keep such groups, or raise maxFilteredBatches; the run can be resumed",
            )
