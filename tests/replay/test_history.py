"""Which of the recorded steps count, from where one is made again, and what stands in the way."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pytest

from asyncflow.api.job import RLJobSpec
from asyncflow.api.load import load_job
from asyncflow.errors import ManifestError
from asyncflow.identity import Version
from asyncflow.replay.history import ReplayPlan, RunHistory, obstacles, plan_replay, reasons
from asyncflow.training.recording import BeginRecord, Record, SampleRecord, StepRecord, TokenRun, WeightsRecord

SMALLEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: one}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  sampling: {maxTokens: 8}
  algorithm: {name: grpo, steps: 9, promptsPerStep: 2, groupSize: 2}
"""


def spec(*settings: str) -> RLJobSpec:
    return load_job(io.StringIO(SMALLEST), settings).spec


def sample(serial: int, *by: Version, decided: float | None = 0.5) -> SampleRecord:
    return SampleRecord(serial, 0, [TokenRun(4, *version) for version in by], 1.0, decided, "a", "b")


def step(number: int, *by: int, attempt: int = 0, serial: int = 0) -> StepRecord:
    samples = [sample(serial + index, Version(attempt, one)) for index, one in enumerate(by or (number - 1,))]
    return StepRecord(attempt=attempt, step=number, slots=[samples])


def begin(attempt: int, number: int, *, ranks: int = 1) -> BeginRecord:
    return BeginRecord(attempt=attempt, step=number, ranks=ranks)


def history(*records: Record) -> RunHistory:
    return RunHistory.of([records])


def attempts(known: RunHistory) -> dict[int, int]:
    return {number: one.attempt for number, one in known.steps.items()}


def test_a_step_counts_as_it_was_made_last() -> None:
    known = history(begin(0, 0), step(1), step(2), step(3), begin(1, 1), step(2, attempt=1))
    assert attempts(known) == {1: 0, 2: 1}


def test_what_an_older_attempt_still_wrote_does_not_count() -> None:
    known = history(begin(0, 0), step(1), begin(1, 1), step(2, attempt=0), step(2, attempt=1), step(3, attempt=0))
    assert attempts(known) == {1: 0, 2: 1}


def test_slots_of_all_ranks_are_joined_and_a_step_that_lacks_a_rank_is_none() -> None:
    ranks: Iterable[list[Record]] = (
        [begin(0, 0, ranks=2), step(1, serial=0), step(2)],
        [begin(0, 0, ranks=2), step(1, serial=5)],
    )
    known = RunHistory.of(ranks)
    assert attempts(known) == {1: 0}
    assert [one.serial for one in known.step(1).slots[0]] == [0, 5]
    with pytest.raises(ManifestError, match="step 2 has no record"):
        known.step(2)


@pytest.mark.parametrize(
    ("checkpoints", "base"),
    [
        ({}, 0),
        ({2: []}, 0),
        ({2: [1]}, 0),
        ({2: [0, 1]}, 2),
        ({2: [0, 1], 3: [1, 2], 4: [2, 3]}, 3),
        ({2: [0, 1], 3: [2], 5: [4]}, 2),
    ],
)
def test_a_replay_begins_at_the_last_checkpoint_with_all_versions_that_it_needs(
    checkpoints: dict[int, list[int]], base: int
) -> None:
    known = history(begin(0, 0), *(step(number, max(0, number - 2), max(0, number - 3)) for number in range(1, 6)))
    assert plan_replay(known, step=4, checkpoints=checkpoints) == ReplayPlan(base, range(base + 1, 5))


def test_versions_are_kept_as_long_as_a_step_to_come_needs_them() -> None:
    known = history(begin(0, 0), *(step(number, max(0, number - 2)) for number in range(1, 6)))
    plan = ReplayPlan(0, range(1, 6))
    assert [plan.after(number, known) for number in (0, 2, 4, 5)] == [{0, 1, 2, 3}, {1, 2, 3}, {3}, set()]


def test_a_step_that_is_not_recorded_is_named() -> None:
    known = history(begin(0, 0), step(1), step(3))
    with pytest.raises(ManifestError, match="step 2 has no record"):
        plan_replay(known, step=3, checkpoints={})


def weights(version: Version, digest: str) -> WeightsRecord:
    return WeightsRecord(attempt=version.attempt, step=version.step, digest=digest)


@pytest.mark.parametrize(("digest", "lost"), [("x", False), ("y", True)])
def test_weights_are_lost_unless_the_next_attempt_made_the_same_ones(digest: str, lost: bool) -> None:
    first, second = Version(0, 3), Version(1, 3)
    known = history(
        *(begin(0, 0), step(1), step(2), step(3), weights(first, "x")),
        *(begin(1, 2), step(3, attempt=1), weights(second, digest)),
    )
    assert known.lost(first) == lost
    assert not known.lost(second)
    assert not known.lost(Version(0, 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["rollout.engine={name: vllm}"], "vLLM"),
        (["trainer.external=true"], "a user's process"),
        (["algorithm.name=ppo", "critic={role: {}}"], "the critic was a process of its own"),
        (["environment={function: 'calculator', maxTurns: 2}"], "several turns"),
        (["reference={replicas: 1}", "algorithm.kl.coefficient=0.1"], "ref_logprobs"),
    ],
)
def test_what_cannot_be_made_again_is_refused_with_its_reason(settings: list[str], said: str) -> None:
    known = history(begin(0, 0), step(1))
    found = obstacles(spec(*settings), known, ReplayPlan(0, range(1, 2)))
    assert [reason for reason in found.refused if said in reason]


def test_what_may_differ_is_named() -> None:
    known = RunHistory.of([[begin(0, 0, ranks=2), step(1)], [begin(0, 0, ranks=2), step(1)]])
    plan = ReplayPlan(0, range(1, 2))
    keeps = spec("schedule={swapAt: token, prefix: keep, maxStaleness: 2}")
    assert [reason.split()[0] for reason in obstacles(keeps, known, plan).inexact] == ["tokens", "the"]
    assert obstacles(spec(), history(begin(0, 0), step(1)), plan) == ([], [])


def test_advantages_of_tokens_are_in_the_way() -> None:
    one = StepRecord(attempt=0, step=1, slots=[[sample(0, Version(0, 0), decided=None)]])
    found = obstacles(spec(), history(begin(0, 0), one), ReplayPlan(0, range(1, 2)))
    assert found.refused == ["advantages of single tokens are not recorded"]


def test_why_a_version_made_a_sample_is_said() -> None:
    known = history(begin(0, 0), step(4, 2, 2))
    (quota,) = reasons(spec(), 4, known.step(4))
    assert quota.startswith("2 samples generated by θ2: D_4 is generated by θ2 alone")
    mixed = StepRecord(attempt=0, step=4, slots=[[sample(0, Version(0, 2), Version(0, 3))]])
    (token,) = reasons(spec("schedule={swapAt: token, maxStaleness: 2}"), 4, history(begin(0, 0), mixed).step(4))
    assert token.startswith("1 sample generated by θ2, then θ3: ")
    assert "1 behind, of at most 2" in token
