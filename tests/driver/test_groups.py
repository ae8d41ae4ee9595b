"""Tests of a finished group: advantages for those of its samples that have a reward, a reason for the others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from queue_world import answer_all, claim_all, queue_of

from asyncflow.algorithms.base import Group
from asyncflow.algorithms.dapo import FILTERED_OVERLONG, Dapo, DapoOptions
from asyncflow.algorithms.grpo import Grpo
from asyncflow.algorithms.ppo import Ppo
from asyncflow.api.load import load_job
from asyncflow.driver import groups as module
from asyncflow.driver.dispatch import restore
from asyncflow.driver.groups import (
    FILTERED_ZERO_VARIANCE,
    TOO_FEW_REWARDS,
    AdvantageTask,
    DecidedGroup,
    GroupPolicy,
    RewardTally,
)
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost, Refused
from asyncflow.flow.assignment import PromptAssignment
from asyncflow.flow.schedule import Schedule
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta, Samples, Slot
from asyncflow.rewards.wire import TURN_REWARDS
from asyncflow.rpc.columns import Jagged

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
SIZE = 4
INPUTS = {"prompt_ids": np.int32, "task": np.uint8}
AS_PUT: dict[str, Any] = {
    "late": lambda _serial: None,
    "exchanged": lambda _serial, _late: None,
    "decided": lambda _step, _group: None,
}
"""No group takes the place of another."""
AT_ONCE: dict[str, Any] = {"complete": lambda _step: True} | AS_PUT
"""No step waits for another."""


def group_of(*rewards: float, serial: int = 0) -> Group:
    n = len(rewards)
    return Group(serial, np.arange(n), np.array(rewards, dtype=np.float64), np.ones(n, np.int64), np.zeros(n, np.bool_))


def policy(**changes: object) -> GroupPolicy:
    settings = {"algorithm": Grpo(), "drop_zero_variance": False, "most_filtered": 1, "drop_timeouts": False} | changes
    return GroupPolicy(**settings)  # type: ignore[arg-type]


def test_a_group_without_variance_is_kept_or_filtered() -> None:
    assert policy().decide(group_of(1, 1, 1, 1)).reason is None
    assert policy(drop_zero_variance=True).decide(group_of(1, 1, 1, 1)).reason == FILTERED_ZERO_VARIANCE
    assert policy(drop_zero_variance=True).decide(group_of(0, 1)).reason is None


@pytest.mark.parametrize("failure", ["raised", "invalid", "out_of_range", "died"])
def test_a_sample_without_a_reward_goes_no_further(failure: str) -> None:
    assert policy().drops(failure)
    assert not policy().drops("")


def test_a_reward_that_timed_out_is_0_unless_it_is_to_be_dropped() -> None:
    assert not policy().drops("timeout")
    assert policy(drop_timeouts=True).drops("timeout")


def test_a_manifest_says_what_becomes_of_groups() -> None:
    sizes = ["algorithm.promptsPerStep=3", "algorithm.seed=7"]
    settings = {
        "algorithm.filterZeroVariance": "drop",
        "algorithm.maxFilteredBatches": "5",
        "evaluation.passReward": "0.5",
        "reward.onTimeout": "zero",
        "reward.shuffle": "true",
    }
    overrides = [f"{field}={value}" for field, value in settings.items()]
    usual, other, same_bits = (
        GroupPolicy.of(load_job(EXAMPLE, [*sizes, *more]).spec)
        for more in ([], overrides, ["schedule.deterministic=true"])
    )
    assert (usual.refills, other.refills, same_bits.refills) == (True, True, False)
    assert (usual.drop_zero_variance, other.drop_zero_variance) == (False, True)
    assert (usual.drop_timeouts, other.drop_timeouts) == (True, False)
    assert (usual.shuffle_seed, other.shuffle_seed, other.most_filtered) == (None, 7, 15)
    halves = group_of(0.5, 0.5)
    assert (usual.alike(halves), other.alike(halves), usual.alike(group_of(1, 1))) == ("wrong", "right", "right")
    assert usual.alike(group_of(0.5, 1)) is None


def test_a_group_of_one_reward_has_nothing_to_be_compared_with() -> None:
    assert policy().decide(group_of(1)).reason == policy().decide(group_of()).reason == TOO_FEW_REWARDS


class Faulty(Grpo):
    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        return {}["mean"] if rewards[0] else rewards[1:]  # type: ignore[return-value]


def test_a_class_that_fails_ends_the_job_and_its_line_is_named() -> None:
    faulty = policy(algorithm=Faulty())
    with pytest.raises(ManifestError, match=r"Faulty failed for the rewards .*: KeyError: 'mean' \(test_groups\.py:"):
        faulty.decide(group_of(1, 0))
    with pytest.raises(ManifestError, match=r"Faulty\.advantages returned an array of the shape \(1,\) for 2 samples"):
        faulty.decide(group_of(0, 1))


def test_shuffling_permutes_within_the_group_and_is_a_function_of_the_serial() -> None:
    rewards = (0, 0, 0, 1, 1, 2)
    plain, shuffled = policy(), policy(shuffle_seed=3)
    once = shuffled.decide(group_of(*rewards, serial=7)).advantages
    assert np.array_equal(once, shuffled.decide(group_of(*rewards, serial=7)).advantages)
    assert np.allclose(np.sort(once), np.sort(plain.decide(group_of(*rewards, serial=7)).advantages))
    others = [shuffled.decide(group_of(*rewards, serial=serial)).advantages for serial in range(20)]
    different = [not np.array_equal(other, once) for other in others]
    assert any(different)


def test_shuffled_samples_are_not_told_apart_by_their_length() -> None:
    dapo = Dapo(DapoOptions(overlong_buffer=4), longest=8)
    group = group_of(0, 0, 1, 1)._replace(lengths=np.array([8, 1, 1, 1]))
    found = [policy(algorithm=dapo, shuffle_seed=3).decide(group._replace(serial=serial)) for serial in range(40)]
    assert len({int(decision.advantages.argmin()) for decision in found}) == 4


def test_where_samples_are_not_compared_shuffling_leaves_none_its_own_reward() -> None:
    rewards = [0, 1, 2, 3, 4]
    shuffled = policy(algorithm=Ppo(), shuffle_seed=3)
    orders = [shuffled.decide(group_of(*rewards, serial=serial)).advantages for serial in range(50)]
    assert all((order != rewards).all() and sorted(order) == rewards for order in orders)
    assert len({tuple(order) for order in orders}) > 10


def test_of_an_algorithm_with_a_critic_groups_are_filtered_and_the_trainer_is_told_the_outcomes() -> None:
    decided = policy(algorithm=Ppo()).decide(group_of(0.5))
    assert (decided.reason, decided.advantages.tolist()) == (None, [0.5])
    filtering = policy(algorithm=Ppo(), drop_zero_variance=True)
    assert filtering.decide(group_of(1, 1)).reason == FILTERED_ZERO_VARIANCE
    assert filtering.decide(group_of(1)).reason is None, "a group of one is not known to vary"
    assert filtering.alike(group_of(1)) is None


def test_each_turn_has_an_advantage_where_credit_goes_by_turns() -> None:
    algorithm = Grpo(estimator="dr-grpo", by_turn=True)
    turns = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    group = group_of(1, 1)._replace(turns=turns)
    decided = policy(algorithm=algorithm, drop_zero_variance=True).decide(group)
    assert decided.reason is None, "its samples are worth the same, but not their turns"
    assert [each.tolist() for each in decided.turns] == [[0, -0.5], [0, 0.5]]
    assert decided.advantages.tolist() == [-0.25, 0.25]
    alike = group._replace(turns=[turns[0], turns[0]])
    assert policy(algorithm=algorithm, drop_zero_variance=True).decide(alike).reason == FILTERED_ZERO_VARIANCE
    dapo = Dapo(DapoOptions(overlong_buffer=4), longest=8, estimator="dr-grpo", by_turn=True)
    punished = policy(algorithm=dapo).decide(group._replace(lengths=np.array([8, 1])))
    assert [each.tolist() for each in punished.turns] == [[-0.5, -1], [0.5, 1]], "the penalty is for the last turn"


def test_advantages_are_the_estimators() -> None:
    decided = policy(algorithm=Grpo(estimator="dr-grpo")).decide(group_of(0, 1))
    assert decided.advantages.tolist() == pytest.approx([-0.5, 0.5])


async def test_of_a_group_the_trainer_sees_the_samples_that_have_a_reward(tmp_path: Path) -> None:
    """Of three groups of four: one is whole, one lacks a reward, and of one there is a single reward left."""
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=2"]).spec
    tally = RewardTally(needed=2 * SIZE, keep=lambda totals: None)
    excluded: list[int] = []
    async with queue_of(spec, tmp_path) as (queue, _):
        groups = AdvantageTask(
            queue=queue,
            policy=GroupPolicy.of(spec),
            rewards=tally,
            finished=lambda _: True,
            excluded=lambda serial: excluded.append(serial) is None,
            **AT_ONCE,
        )
        await queue.open_step(partition=TRAIN, step=1, groups=2, group_size=SIZE, timeout=10)
        keys = [(serial, sample) for serial in range(3) for sample in range(SIZE)]
        prompts = {
            "prompt_ids": Jagged.from_rows([[1]] * len(keys), np.int32),
            "task": Jagged.from_rows([[1]] * len(keys), np.uint8),
        }
        samples = Samples(serials=[0, 1, 2], step=1)
        await queue.put(TRAIN, prompts, group_size=SIZE, samples=samples, timeout=10)
        rows = await claim_all(queue, partition=TRAIN, rows=len(keys))
        failed = {(1, 0), (2, 0), (2, 1), (2, 3)}
        tags = [
            {"reward": float(row.meta.sample % 2)}
            | ({"failure": "raised", "detail": "boom"} if (row.meta.serial, row.meta.sample) in failed else {})
            for row in rows
        ]
        assert all(await answer_all(queue, rows, tags))
        work = asyncio.create_task(groups.run())
        await queue.begin(partition=TRAIN, attempt=0, step=0, world=1, timeout=10)
        async with asyncio.timeout(10):
            slots = [await _slot(queue, 0)]
            while not slots[-1].last:
                slots.append(await _slot(queue, len(slots)))
            while (await queue.stats(timeout=10)).dropped < 1 + SIZE:
                await asyncio.sleep(0.01)
        snapshot = await queue.snapshot(partition=TRAIN, timeout=10)
        audit = await queue.audit(timeout=10)
        work.cancel()
        await asyncio.wait([work])
    assert {(row.meta.serial, row.meta.sample) for slot in slots for row in slot.rows} == {
        *((0, sample) for sample in range(SIZE)),
        *((1, sample) for sample in range(1, SIZE)),
    }
    assert excluded == [2]
    assert tally.outcomes() == {"scored": 8, "raised": 4}
    assert (audit.dropped, audit.unfinished, audit.lost, audit.problems) == (5, 7, 0, [])
    assignment = PromptAssignment(prompts_per_step=2, steps=1)
    restore(assignment, snapshot)
    assert assignment.running == 0
    assert assignment.dispatched == 2, "a group that lost some of its samples still counts, one that lost all does not"
    assert assignment.issue() is None


async def test_of_a_group_whose_algorithm_makes_pairs_the_trainer_sees_these_alone(tmp_path: Path) -> None:
    spec = load_job(
        EXAMPLE, [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=2", "algorithm.filterZeroVariance=drop",
                  "algorithm.name=dpo", "algorithm.aggregation=seq-mean-token-sum"]
    ).spec  # fmt: skip
    rewards = {0: [0.0, 1.0, 0.0, 0.5], 1: [1.0, 1.0, 1.0, 1.0], 2: [0.0, 0.0, 2.0, 1.0]}
    excluded: list[int] = []
    async with queue_of(spec, tmp_path) as (queue, _):
        groups = AdvantageTask(
            queue=queue,
            policy=GroupPolicy.of(spec),
            rewards=RewardTally(needed=2 * SIZE, keep=lambda totals: None),
            finished=lambda _: True,
            excluded=lambda serial: excluded.append(serial) is None,
            **AT_ONCE,
        )
        await queue.open_step(partition=TRAIN, step=1, groups=2, group_size=SIZE, timeout=10)
        cells = {name: Jagged.from_rows([[1]] * 3 * SIZE, kind) for name, kind in INPUTS.items()}
        await queue.put(TRAIN, cells, group_size=SIZE, samples=Samples(serials=[0, 1, 2], step=1), timeout=10)
        rows = await claim_all(queue, partition=TRAIN, rows=3 * SIZE)
        values = [rewards[row.meta.serial][row.meta.sample] for row in rows]
        assert all(await answer_all(queue, rows, [{"reward": value, "reward/right": value} for value in values]))
        work = asyncio.create_task(groups.run())
        await queue.begin(partition=TRAIN, attempt=0, step=0, world=1, timeout=10)
        async with asyncio.timeout(10):
            slots = [await _slot(queue, 0)]
            while not slots[-1].last:
                slots.append(await _slot(queue, len(slots)))
            while not excluded:
                await asyncio.sleep(0.01)
        trained = [row for slot in slots for row in slot.rows]
        written = await queue.fetch(trained, ["advantage"], timeout=10)
        audit = await queue.audit(timeout=10)
        work.cancel()
        await asyncio.wait([work])
    assert {(row.meta.serial, row.meta.sample) for row in trained} == {(0, 1), (0, 2), (2, 1), (2, 2)}
    assert sorted(written["advantage"].values.tolist()) == [-1, -1, 1, 1]
    assert excluded == [1]
    assert groups.rewards.equal_groups() == {"right": 1, "wrong": 0}
    assert groups.components.of(1) == {"right": (1 + 0 + 2 + 0) / 4}, "of the samples that are trained"
    assert (audit.filtered, audit.dropped, audit.problems) == (8, 0, [])


async def test_what_is_decided_is_held_until_all_batches_that_are_required_are_complete(tmp_path: Path) -> None:
    spec = load_job(
        EXAMPLE,
        [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=1", "algorithm.steps=3", "schedule.requireBatches=2"],
    ).spec
    assignment = PromptAssignment(prompts_per_step=1, steps=3)
    async with queue_of(spec, tmp_path) as (queue, _):
        groups = AdvantageTask(
            queue=queue,
            policy=GroupPolicy.of(spec),
            rewards=RewardTally(needed=SIZE, keep=lambda totals: None),
            finished=assignment.finish,
            excluded=assignment.exclude,
            complete=lambda step: assignment.complete_together(Schedule.of(spec).together(step)),
            **AS_PUT,
        )
        work = asyncio.create_task(groups.run())

        async def make(*steps: int) -> None:
            """Have the sample groups of these steps made, and wait until it is decided what becomes of them."""
            for _ in steps:
                issued = assignment.issue()
                assert issued is not None
                serial, step = issued
                await queue.open_step(partition=TRAIN, step=step, groups=1, group_size=SIZE, timeout=10)
                cells = {name: Jagged.from_rows([[1]] * SIZE, kind) for name, kind in INPUTS.items()}
                samples = Samples(serials=[serial], step=step)
                await queue.put(TRAIN, cells, group_size=SIZE, samples=samples, timeout=10)
            rows = await claim_all(queue, partition=TRAIN, rows=SIZE * len(steps))
            assert all(await answer_all(queue, rows, [{"reward": float(row.meta.sample)} for row in rows]))
            while not all(map(assignment.complete, steps)):
                await asyncio.sleep(0.01)

        async def ready() -> int:
            return (await queue.stats(timeout=10)).ready["train/train"]

        async with asyncio.timeout(20):
            await make(1)
            assert await ready() == 0
            await make(2)
            while await ready() != 2 * SIZE:
                await asyncio.sleep(0.01)
            await make(3)
            while await ready() != 3 * SIZE:
                await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work])


async def test_a_driver_that_takes_over_knows_what_was_held_although_samples_of_it_were_dropped(tmp_path: Path) -> None:
    settings = [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=4", "schedule.requireBatches=2"]
    spec = load_job(EXAMPLE, settings).spec
    async with queue_of(spec, tmp_path) as (queue, _):
        excluded: list[int] = []
        groups = AdvantageTask(
            queue=queue,
            policy=GroupPolicy.of(spec),
            rewards=RewardTally(needed=4 * SIZE, keep=lambda totals: None),
            finished=lambda _: True,
            excluded=lambda serial: excluded.append(serial) is None,
            complete=lambda _: False,
            **AS_PUT,
        )
        await queue.open_step(partition=TRAIN, step=1, groups=4, group_size=SIZE, timeout=10)
        cells = {name: Jagged.from_rows([[1]] * 4 * SIZE, kind) for name, kind in INPUTS.items()}
        samples = Samples(serials=[0, 1, 2, 3], step=1)
        await queue.put(TRAIN, cells, group_size=SIZE, samples=samples, timeout=10)
        rows = await claim_all(queue, partition=TRAIN, rows=4 * SIZE)
        tags: list[dict[str, Any]] = [
            {"reward": float(row.meta.sample)} | ({} if row.meta.sample else {"failure": "raised"}) for row in rows
        ]
        assert all(await answer_all(queue, rows, tags))
        work = asyncio.create_task(groups.run())
        async with asyncio.timeout(20):
            while (await queue.stats(timeout=10)).dropped < 4 or len(groups._held.get(1, ())) < 4:
                await asyncio.sleep(0.01)
        snapshot = await queue.snapshot(partition=TRAIN, timeout=10)
        work.cancel()
        await asyncio.wait([work])
    assert excluded == []
    assignment = PromptAssignment(prompts_per_step=4, steps=1)
    restore(assignment, snapshot)
    assert assignment.running == 4
    assert not assignment.complete(1)


async def test_what_is_held_is_renewed_at_once_and_what_has_lost_one_is_claimed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DRIVER_LEASE_S", 1000.0)
    renewed = asyncio.Event()

    class Queue(Finished):
        async def renew(self, leases: list[str], *, timeout: float) -> list[str]:
            assert leases == ["l0", "l1"]
            renewed.set()
            return ["l1"]

    groups = groups_of(Queue(reward=0.0, varied=frozenset((0, 1)), groups=2), limit=2)
    groups.complete = lambda _step: False
    with pytest.raises(TimeoutError):
        await groups.run()
    assert {step: list(held) for step, held in groups._held.items()} == {1: [0], 2: [1]}
    renewing = asyncio.create_task(groups.renew())
    async with asyncio.timeout(10):
        await renewed.wait()
        while groups._held[1]:
            await asyncio.sleep(0.001)
    renewing.cancel()
    assert list(groups._held[2]) == [1]


async def test_a_renewal_that_is_lost_leaves_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(TimeoutError):
        await groups_of(Finished(reward=0.0), limit=2).renew()
    assert pauses[0] < module.DRIVER_LEASE_S / 2


async def _slot(queue: QueueClient, number: int) -> Slot:
    slot = await queue.slot(partition=TRAIN, attempt=0, step=1, slot=number, rank=0, tokens=1 << 20, timeout=10)
    assert slot is not None
    return slot


async def test_where_nothing_may_take_a_groups_place_the_job_pauses(tmp_path: Path) -> None:
    tally = RewardTally(needed=8, keep=lambda totals: None)
    groups = AdvantageTask(
        queue=None,  # type: ignore[arg-type]
        policy=policy(refills=False),
        rewards=tally,
        finished=lambda _: True,
        excluded=lambda _: True,
        **AT_ONCE,
    )
    groups._exclude(7, TOO_FEW_REWARDS, part="the reward")
    assert "group 7 is dropped" in tally.paused
    assert "deterministic" in tally.paused


class Finished:
    """A queue with finished groups of one step, which all have one reward but those of ``varied``."""

    def __init__(self, *, reward: float, varied: frozenset[int] = frozenset(), groups: int = 1000) -> None:
        self._groups = self._rows(reward, varied, groups)
        self.dropped: list[str] = []

    def _rows(self, reward: float, varied: frozenset[int], groups: int) -> Iterator[list[LeasedRow]]:
        for serial in range(groups):
            values = [reward, reward + (serial in varied)]
            metas = [
                RowMeta(partition="train", serial=serial, sample=sample, step=1 + serial % 2, tags={"reward": value})
                for sample, value in enumerate(values)
            ]
            yield [
                LeasedRow(row=meta.sample, meta=meta, attempt=0, lease=f"l{serial}", until=1, unit=0, bytes={})
                for meta in metas
            ]

    async def claim(self, **_: Any) -> SimpleNamespace:
        group = next(self._groups, None)
        if group is None:
            raise TimeoutError
        return SimpleNamespace(rows=group)

    async def complete(self, *_: Any, **__: Any) -> None:
        """Every advantage is taken."""

    async def drop(self, _rows: Any, *, reason: str, timeout: float) -> None:
        self.dropped.append(reason)


def groups_of(queue: Finished, limit: int) -> AdvantageTask:
    drop = policy(drop_zero_variance=True, most_filtered=limit)
    tally = RewardTally(needed=2, keep=lambda totals: None)
    return AdvantageTask(
        queue=queue,  # type: ignore[arg-type]
        policy=drop,
        rewards=tally,
        finished=lambda _: True,
        excluded=lambda _: True,
        **AT_ONCE,
    )


def test_a_task_whose_rewards_are_all_the_same_ends_the_job_with_that_reason() -> None:
    queue = Finished(reward=0.25)
    with pytest.raises(
        ManifestError, match=r"21 groups of step 1 .* within each, all rewards were equal, the last time 0\.25"
    ) as said:
        asyncio.run(groups_of(queue, limit=20).run())
    assert said.value.where == "spec.algorithm.filterZeroVariance"
    assert queue.dropped == [FILTERED_ZERO_VARIANCE] * 41


def test_an_algorithm_that_excludes_all_samples_of_every_group_ends_the_job() -> None:
    """DAPO that leaves out what was cut off, with responses that never end in time, would generate without end."""

    class Cut(Finished):
        def _rows(self, reward: float, varied: frozenset[int], groups: int) -> Iterator[list[LeasedRow]]:
            for rows in super()._rows(reward, varied, groups):
                for row in rows:
                    row.meta.tags["finish"] = "length"
                yield rows

    queue = Cut(reward=0.0)
    groups = groups_of(queue, limit=20)
    groups.policy = policy(algorithm=Dapo(DapoOptions(overlong_filter=True)), most_filtered=20)
    with pytest.raises(ManifestError, match=r"21 groups of step 1 were dropped, the last one as .filtered: overlong"):
        asyncio.run(groups.run())
    assert queue.dropped == [FILTERED_OVERLONG] * 41


def test_what_an_earlier_driver_filtered_counts() -> None:
    queue = Finished(reward=1.0)
    groups = groups_of(queue, limit=20)
    groups.filtered[2] = 20
    with pytest.raises(ManifestError, match="21 groups of step 2"):
        asyncio.run(groups.run())
    assert len(queue.dropped) == 2


def test_steps_that_stay_below_the_limit_go_on_without_a_line_for_each_group(caplog: pytest.LogCaptureFixture) -> None:
    queue = Finished(reward=0.0, varied=frozenset(range(40, 1000)), groups=60)
    with caplog.at_level("INFO"), pytest.raises(TimeoutError):
        asyncio.run(groups_of(queue, limit=20).run())
    assert len(queue.dropped) == 40
    assert len(caplog.messages) == 2, "one for each step, at half of its limit"


def test_a_response_is_as_long_as_its_limit_counts_observations_too() -> None:
    class Observed(Finished):
        def _rows(self, reward: float, varied: frozenset[int], groups: int) -> Iterator[list[LeasedRow]]:
            for (long, short), tokens in zip(super()._rows(reward, varied, groups), [(8, 4)], strict=False):
                for row, made in zip((long, short), tokens, strict=True):
                    row.meta.tags.update({"tokens": made, "response_tokens": 2})
                yield [long, short]

    decided: list[list[float]] = []
    groups = groups_of(Observed(reward=1.0), limit=1)
    groups.policy = policy(algorithm=Dapo(DapoOptions(overlong_buffer=4), longest=8, estimator="dr-grpo"))
    groups.decided = lambda _step, group: decided.append(group.advantages.tolist())
    with pytest.raises(TimeoutError):
        asyncio.run(groups.run())
    assert decided == [[-0.5, 0.5]]


def test_a_sample_whose_turns_have_no_rewards_has_its_own_for_the_last() -> None:
    class Turns(Finished):
        def _rows(self, reward: float, varied: frozenset[int], groups: int) -> Iterator[list[LeasedRow]]:
            told = {"reward": 1.0, TURN_REWARDS: "[0.25,0.5,0.25]", "turns": 3}, {"reward": 2.0, "turns": 3}
            for rows, _ in zip(super()._rows(reward, varied, groups), range(1), strict=False):
                for row, tags in zip(rows, told, strict=True):
                    row.meta.tags.update(tags)
                yield rows

    decided: list[DecidedGroup] = []
    groups = groups_of(Turns(reward=0.0), limit=1)
    groups.policy = policy(algorithm=Grpo(estimator="dr-grpo", by_turn=True))
    groups.decided = lambda _step, group: decided.append(group)
    with pytest.raises(TimeoutError):
        asyncio.run(groups.run())
    assert [each.tolist() for each in decided[0].turns] == [[-0.5, -0.625, -0.875], [0.5, 0.625, 0.875]]
    assert decided[0].cells.row(1).tolist() == [0.5, 0.625, 0.875]


def test_a_group_that_is_claimed_again_is_not_counted_again() -> None:
    class Again(Finished):
        """It gives the first group out three times."""

        def _rows(self, reward: float, varied: frozenset[int], groups: int) -> Iterator[list[LeasedRow]]:
            yield from [next(super()._rows(reward, varied, groups))] * 3

    assignment = PromptAssignment(prompts_per_step=2, steps=1)
    assignment.issue()
    queue = Again(reward=1.0)
    groups = groups_of(queue, limit=1)
    groups.finished, groups.excluded = assignment.finish, assignment.exclude
    with pytest.raises(TimeoutError):
        asyncio.run(groups.run())
    assert queue.dropped == [FILTERED_ZERO_VARIANCE] * 3
    assert groups.rewards.outcomes() == {"scored": 2}
    assert groups.filtered == {1: 1}
    assert assignment.dispatched == 0


@pytest.mark.parametrize("refused", [False, True])
def test_the_same_exchange_is_asked_for_until_there_is_an_answer(*, refused: bool) -> None:
    """The first answer is lost; whatever would be late by then, the pair stays the same."""

    class Exchanging(Finished):
        def __init__(self) -> None:
            super().__init__(reward=0.0, varied=frozenset((0,)), groups=1)
            self.asked: list[tuple[int, int, int]] = []

        async def exchange(self, *, partition: str, serial: int, step: int, late: int, timeout: float) -> None:
            self.asked.append((serial, step, late))
            if len(self.asked) == 1:
                raise PeerLost("gone")
            if refused:
                raise Refused("group 5 is in a slot")

    queue = Exchanging()
    late, exchanged = iter([(1, 5), (1, 4)]), list[tuple[int, int]]()
    groups = groups_of(queue, limit=1)
    groups.late = lambda _serial: next(late)
    groups.exchanged = lambda serial, late: exchanged.append((serial, late))
    with pytest.raises(PeerLost):
        asyncio.run(groups.run())
    with pytest.raises(TimeoutError):
        asyncio.run(groups.run())
    assert queue.asked == [(0, 1, 5)] * 2
    assert exchanged == ([] if refused else [(0, 5)])


async def test_what_is_complete_first_is_trained_first_where_completion_fills_the_steps(tmp_path: Path) -> None:
    spec = load_job(
        EXAMPLE,
        [
            f"algorithm.groupSize={SIZE}",
            "algorithm.promptsPerStep=1",
            "algorithm.steps=3",
            "schedule={mode: async, swapAt: token, maxStaleness: 9, fill: completion}",
        ],
    ).spec
    schedule, assignment = Schedule.of(spec), PromptAssignment(prompts_per_step=1, steps=3)
    decided: list[tuple[int, int]] = []
    async with queue_of(spec, tmp_path) as (queue, _):
        groups = AdvantageTask(
            queue=queue,
            policy=GroupPolicy.of(spec),
            rewards=RewardTally(needed=SIZE, keep=lambda totals: None),
            finished=assignment.finish,
            excluded=assignment.exclude,
            complete=lambda step: assignment.complete_together(schedule.together(step)),
            late=lambda serial: assignment.late(serial, alike=schedule.window),
            exchanged=assignment.exchange,
            decided=lambda step, group: decided.append((group.rows[0].meta.serial, step)),
        )
        for step in (1, 2, 3):
            assert assignment.issue() == (step - 1, step)
            await queue.open_step(partition=TRAIN, step=step, groups=1, group_size=SIZE, timeout=10)
            cells = {name: Jagged.from_rows([[1]] * SIZE, kind) for name, kind in INPUTS.items()}
            await queue.put(TRAIN, cells, group_size=SIZE, samples=Samples(serials=[step - 1], step=step), timeout=10)
        assignment.mark_put(range(3))
        rows = await claim_all(queue, partition=TRAIN, rows=3 * SIZE)
        work = asyncio.create_task(groups.run())
        await queue.begin(partition=TRAIN, attempt=0, step=0, world=1, timeout=10)
        trained = []
        async with asyncio.timeout(20):
            for step, serial in enumerate((2, 0, 1), 1):
                mine = [row for row in rows if row.meta.serial == serial]
                assert all(await answer_all(queue, mine, [{"reward": float(row.meta.sample)} for row in mine]))
                slot = None
                while slot is None:
                    slot = await queue.slot(
                        partition=TRAIN, attempt=0, step=step, slot=0, rank=0, tokens=1 << 20, timeout=5
                    )
                assert slot.last
                trained.append({(row.meta.serial, row.meta.step) for row in slot.rows})
        work.cancel()
        await asyncio.wait([work])
    assert trained == [{(2, 1)}, {(0, 2)}, {(1, 3)}]
    assert decided == [(2, 1), (0, 2), (1, 3)], "the step that trains a group is told, not the one that it was put for"


def test_a_group_whose_drop_is_not_answered_is_replaced() -> None:
    class Unanswered(Finished):
        async def drop(self, _rows: Any, *, reason: str, timeout: float) -> None:
            raise DeadlineExceeded("no answer", where="queue")

    assignment = PromptAssignment(prompts_per_step=2, steps=1)
    assignment.issue()
    groups = groups_of(Unanswered(reward=1.0), limit=20)
    groups.finished, groups.excluded = assignment.finish, assignment.exclude
    with pytest.raises(DeadlineExceeded):
        asyncio.run(groups.run())
    assert assignment.dispatched == 0, "its place in the step is free"
    assert groups.filtered == {1: 1}, "what is dropped is not claimed again, so it would never be counted"
