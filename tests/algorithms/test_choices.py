"""Tests of what algorithms demand of a manifest, and which samples of a group they let go further."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncflow.algorithms.base import Group, StepSamples, algorithm_of
from asyncflow.algorithms.dapo import FILTERED_OVERLONG, Dapo, DapoOptions
from asyncflow.algorithms.dpo import FILTERED_UNPAIRED, Dpo, DpoOptions
from asyncflow.algorithms.grpo import Grpo
from asyncflow.algorithms.overlong import overlong_penalty
from asyncflow.algorithms.pf_ppo import FILTERED_POLICY, PfPpo, PfPpoOptions
from asyncflow.api.load import load_job
from asyncflow.driver.tasks import tasks_of
from asyncflow.errors import ManifestError

EXAMPLES = Path(__file__).parents[2] / "examples"
PERIODIC = "schedule={mode: periodic}"
BY_TURN = "algorithm.credit=turn"
EXTERNAL = "trainer.external=true"


def group_of(*rewards: float, lengths: tuple[int, ...] = (), cut: tuple[int, ...] = (), serial: int = 0) -> Group:
    n = len(rewards)
    return Group(
        serial=serial,
        samples=np.arange(n),
        rewards=np.array(rewards, np.float64),
        lengths=np.array(lengths or (1,) * n),
        cut=np.isin(np.arange(n), cut),
    )


@pytest.mark.parametrize(
    ("example", "overrides", "said"),
    [
        ("gspo", ["algorithm.aggregation=token-mean"], "aggregation .*gspo averages over responses"),
        ("dapo", ["algorithm.aggregation=token-sum"], "aggregation .*Set aggregation: token-mean"),
        ("dapo", ["algorithm.clip={low: 0.2, high: 0.2}"], r"clip\.high = 0\.2: dapo clips higher above"),
        ("dapo", ["algorithm.filterZeroVariance=keep"], "filterZeroVariance .*options.dynamic_sampling: false"),
        ("dapo", ["algorithm.options={overlong_buffer: 9}"], "overlong_buffer is 9, and a response has at most 8"),
        ("dpo", ["algorithm.aggregation=token-mean"], "aggregation .*averages over pairs"),
        ("dpo", ["algorithm.name=ipo", "algorithm.filterZeroVariance=keep"], "ipo learns only from pairs"),
        ("dpo", ["algorithm.correction={kind: mask}"], "correction.* no ratio to the behaviour policy"),
        ("dpo", ["trainer.backend.tokensPerMicroBatch=40"], "the longest one has 48 tokens"),
        ("dpo", ["algorithm.kl={coefficient: 0.1, estimator: k1, place: reward}"], "Set place: loss"),
        ("quickstart", ["algorithm.name=pf-ppo", "algorithm.options={keep: 10}"], "keep is 10, and a group has 8"),
        ("quickstart", ["algorithm.name=reinforce-plus-plus", PERIODIC], "needs? all samples of a step"),
        ("quickstart", ["algorithm.kl={coefficient: 0.1, place: reward}", PERIODIC], "need all samples of a step"),
        ("ppo", ["algorithm.groupSize=1", "reward.shuffle=true"], "a group of 1 has one order"),
        ("ppo", ["algorithm.options={whiten: true}", PERIODIC], "need all samples of a step"),
        ("ppo", ["algorithm.options={lam: 2}"], "lam"),
        ("quickstart", ["critic={learningRate: 1e-4}"], "grpo has no critic"),
        ("ppo", ["algorithm.advantage=rloo"], r'algorithm\.advantage = "rloo": ppo does not use it'),
        ("dpo", ["algorithm.advantage=rloo"], r'algorithm\.advantage = "rloo": dpo does not use it'),
        ("dpo", ["algorithm.clip={high: 0.3}"], r"algorithm\.clip .*dpo does not use it"),
        ("quickstart", ["algorithm.name=cispo", "algorithm.clip={dual: 3}"], r"clip\.dual = 3\.0: cispo does not use"),
        (
            "quickstart",
            ["algorithm.name=reinforce-plus-plus", "algorithm.advantage=dr-grpo"],
            "reinforce-plus-plus does not use it",
        ),
        ("dpo", ["algorithm.old=recompute", "schedule={mode: sync}"], "dpo has no old policy"),
        (
            "quickstart",
            ["algorithm.name=reinforce-plus-plus", "algorithm.groupSize=1", "algorithm.options={baseline: group}"],
            "the baseline of a single sample is its own reward",
        ),
        ("quickstart", [BY_TURN], "without an environment a sample has one turn"),
        ("tools", [BY_TURN, EXTERNAL], "an external trainer receives one advantage per sample"),
        ("ppo", [EXTERNAL], r'algorithm\.name = "ppo": .* by the job.s own trainer'),
        ("quickstart", ["algorithm.name=reinforce-plus-plus", EXTERNAL], "Set grpo, and compute them in your loop"),
        ("quickstart", ["algorithm.kl={coefficient: 0.1, place: reward}", EXTERNAL], "Set place: loss"),
        ("quickstart", ["algorithm.epochs=2", EXTERNAL], r"algorithm\.epochs = 2: .*makes its updates itself"),
        ("quickstart", ["algorithm.miniBatches=2", EXTERNAL], r"algorithm\.miniBatches = 2: .*Leave it at 1"),
        ("tools", [BY_TURN, "algorithm.name=reinforce-plus-plus"], "from the rewards of whole samples"),
        ("tools", [BY_TURN, "algorithm.kl={coefficient: 0.1, place: reward}"], "from the rewards of whole samples"),
        ("tools", [BY_TURN, "reward.shuffle=true"], "permuted between samples"),
        (
            "quickstart",
            ["algorithm.name=reinforce-plus-plus", "algorithm.groupSize=1", "algorithm.filterZeroVariance=drop"],
            "reward of a single sample has no variance",
        ),
    ],
)
def test_an_algorithm_refuses_what_would_make_it_another(example: str, overrides: list[str], said: str) -> None:
    spec = load_job(EXAMPLES / f"{example}.yaml", overrides).spec
    with pytest.raises(ManifestError, match=said):
        algorithm_of(spec)


def test_an_algorithm_of_ones_own_says_how_many_samples_it_compares() -> None:
    class Medians(Grpo):
        min_samples = 5

    refused, fine = (load_job(EXAMPLES / "quickstart.yaml", [f"algorithm.groupSize={size}"]).spec for size in (4, 5))
    (problem,) = Medians().problems(refused)
    assert problem.reason == "grpo compares the samples of a group, and needs at least 5"
    assert list(Medians().problems(fine)) == []


@pytest.mark.parametrize(
    ("example", "overrides"),
    [
        ("ppo", ["critic={learningRate: 1e-4}"]),
        ("dapo", ["algorithm.options={overlong_buffer: 8}"]),
        ("dpo", ["trainer.backend.tokensPerMicroBatch=48"]),
        ("quickstart", ["algorithm.name=pf-ppo", "algorithm.options={keep: 8}"]),
        ("quickstart", ["algorithm.name=reinforce-plus-plus", "algorithm.groupSize=1"]),
    ],
)
def test_what_is_just_possible_is_not_refused(example: str, overrides: list[str]) -> None:
    spec = load_job(EXAMPLES / f"{example}.yaml", overrides).spec
    assert algorithm_of(spec).longest == spec.sampling.max_tokens


def test_recipes_without_dynamic_sampling_say_so() -> None:
    overrides = ["algorithm.filterZeroVariance=keep", "algorithm.options={dynamic_sampling: false}"]
    assert algorithm_of(load_job(EXAMPLES / "dapo.yaml", overrides).spec).options.overlong_buffer == 0


def test_only_pairs_bind_a_group_to_one_rank_and_slot() -> None:
    bound = {
        name: {task.name: task.groups for task in tasks_of(load_job(EXAMPLES / f"{name}.yaml").spec)}["train"]
        for name in ("quickstart", "dapo", "gspo", "dpo")
    }
    assert bound == {"quickstart": False, "dapo": False, "gspo": False, "dpo": True}


def test_the_penalty_falls_over_the_buffer() -> None:
    lengths = np.array([1, 80, 90, 100])
    assert overlong_penalty(lengths, longest=100, buffer=20, factor=2.0).tolist() == [0, 0, -1, -2]


def test_a_response_that_was_cut_off_is_compared_and_left_out() -> None:
    dapo = Dapo(DapoOptions(overlong_buffer=4, overlong_filter=True), longest=10)
    group = group_of(1, 1, 0, 0, lengths=(3, 8, 10, 5), cut=(2,))
    assert dapo.shaped(group).tolist() == [1, 0.5, -1, 0]
    assert dapo.excluded(group) == {2: FILTERED_OVERLONG}
    usual = Dapo(longest=10)
    assert (usual.shaped(group).tolist(), usual.excluded(group)) == ([1, 1, 0, 0], {})


@pytest.mark.parametrize("keep", [2, 4, 6])
def test_policy_filtration_keeps_as_many_as_it_says(keep: int) -> None:
    rewards = (0, 5, 3, 1, 4, 2)
    for kind in ("best-random", "best-worst"):
        filtered = PfPpo(PfPpoOptions(filter=kind, keep=keep))  # type: ignore[arg-type]
        left = filtered.excluded(group_of(*rewards))
        assert left == filtered.excluded(group_of(*rewards)), "a function of seed and prompt"
        assert set(left.values()) <= {FILTERED_POLICY}
        kept = sorted((rewards[i] for i in range(6) if i not in left), reverse=True)
        assert len(kept) == keep
        assert kept[: keep // 2] == [5, 4, 3][: keep // 2]
        if kind == "best-worst":
            assert kept[keep // 2 :] == [2, 1, 0][3 - keep // 2 :]


def test_which_of_the_others_is_kept_differs_by_prompt_and_seed() -> None:
    group = [group_of(3, 0, 1, 2, serial=serial) for serial in range(8)]
    kept = [tuple(PfPpo(seed=seed).excluded(one)) for seed in (0, 1) for one in group]
    assert len(set(kept)) == 3
    assert kept[:8] != kept[8:]


def test_pairs_are_the_best_and_the_worst() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0, 0.5])
    assert Dpo().advantages(rewards).tolist() == [0, 1, 0, -1, 0]
    two = Dpo(DpoOptions(pairs=2))
    assert two.advantages(rewards).tolist() == [-2, 1, 2, -1, 0]
    assert two.advantages(np.array([1.0, 1, 1, 0])).tolist() == [1, 0, 0, -1], "no pair of equals"
    assert Dpo().excluded(group_of(*rewards)) == dict.fromkeys([0, 2, 4], FILTERED_UNPAIRED)


def test_a_group_that_lost_too_many_samples_is_credited_with_nothing() -> None:
    """With the KL in the reward the trainer compares; a group of one, whose others were dropped, is silent."""
    step = StepSamples(
        serials=np.array([3, 4, 4]),
        samples=np.array([0, 0, 1]),
        rewards=np.array([1.0, 0.0, 1.0]),
        offsets=np.array([0, 2, 3, 5]),
        counted=np.ones(5, np.bool_),
        penalty=np.zeros(5),
    )
    found = Grpo(penalised=True).credit(step, lambda table: table)
    assert found[:2].tolist() == [0, 0]
    assert found[2] == -found[3] == -found[4] == pytest.approx(-(0.5**0.5), rel=1e-5)
