"""Each check finds what is just beyond its threshold, and not what is just below; all have such a pair."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from cases import FAULTS, HEALTHY
from runs_seen import BEGAN, TOOK, evidence, life, steps

from asyncflow.api.check import fields, model_at
from asyncflow.api.job import RLJobSpec
from asyncflow.api.names import ROLES
from asyncflow.api.status import DriverStatus, RewardState
from asyncflow.doctor.checks import CHECKS, examine
from asyncflow.doctor.evidence import Evidence

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "doctor.md"
CHECK_OF = {check.name: check for check in CHECKS}


def rollout(busy: float = 0.8, **figures: float) -> dict[str, object]:
    return {"lives": {"rollout-0-a": life("rollout", busy=busy, **figures)}}


def with_life(role: str, **figures: float) -> dict[str, object]:
    return {"lives": {f"{role}-0-a": life(role, **figures)}}


def learning(**figures: object) -> dict[str, object]:
    return {"lines": steps(12, **figures)}


def restarted(times: int, role: str = "rollout") -> dict[str, object]:
    """A process that was started again so often, beside another one that stayed."""
    lives = {"publisher-0-z": life("publisher")}
    for number in range(times + 1):
        one = life(role)
        one.started, one.seen = BEGAN + 10 * number + 1, BEGAN + 10 * number + 9
        lives[f"{role}-0-{number}"] = one
    return {"lives": lives}


def waiting(words: str, phase: str = "Running") -> dict[str, object]:
    return {"status": DriverStatus(phase=phase, waiting_for=words, rewards=RewardState(first_failure="x"))}  # type: ignore[arg-type]


FAR = evidence(
    "algorithm.kl={coefficient: 0.1, target: {value: 0.02, horizon: 100}}", **learning(kl=0.2, approx_kl=0.01)
)
FAR_IN_REWARD = evidence(
    "algorithm.kl={coefficient: 0.1, place: reward, target: {value: 0.02, horizon: 100}}",
    **learning(penalty_kl=0.2, approx_kl=0.01),
)
MASKED = evidence("algorithm.correction={kind: mask}", **learning(correction_ess=0.29))
GROWS = [0.02] * 4 + [0.03] * 4
SYNCED = {"ledger_syncs_total": 100.0}
EVALUATES = "evaluation.every=1"
SYNC = ("schedule.mode=sync", "schedule.update=sync", "schedule.maxStaleness=0")
PAIRS: dict[str, tuple[Evidence, Evidence]] = {
    "stalled": (evidence(**waiting("step 3, stalled for 700 s: ...")), evidence(**waiting("1 rollout"))),
    "constant-reward": (
        evidence(**learning(reward=[0.1] * 7 + [0.0] * 5, silent_samples=128)),
        evidence(**learning(reward=[0.1] * 8 + [0.0] * 4, silent_samples=100)),
    ),
    "skipped-steps": (evidence(**learning(skipped=[0.0] * 11 + [1.0])), evidence(**learning(skipped=0.0))),
    "logprob-gap": (
        evidence(**learning(logprob_gap_p99=[*GROWS, *[0.0601] * 4])),
        evidence(**learning(logprob_gap_p99=[*GROWS, *[0.06] * 4])),
    ),
    "kl-runaway": (evidence(**learning(approx_kl=0.101)), evidence(**learning(approx_kl=0.1))),
    "entropy-collapse": (
        evidence(**learning(entropy=[1.0] * 8 + [0.1] * 4, reward=[0.3, 0.2] * 6)),
        evidence(**learning(entropy=[1.0] * 8 + [0.101] * 4, reward=[0.3, 0.2] * 6)),
    ),
    "gradient-norm": (
        evidence(lines=steps(20, grad_norm=[1.0] * 15 + [10.1] * 5)),
        evidence(lines=steps(20, grad_norm=[1.0] * 15 + [10.0] * 5)),
    ),
    "insecure": (evidence(**with_life("driver", insecure=1.0)), evidence(**with_life("driver", insecure=0.0))),
    "rewards-fail": (
        evidence(scored=99, failed={"raised": 1}, first_failure="Traceback\nValueError: no"),
        evidence(scored=100, failed={"raised": 1}),
    ),
    "clip-fraction": (
        evidence(**learning(clip_low=0.1, clip_high=0.101)),
        evidence(**learning(clip_low=0.1, clip_high=0.099)),
    ),
    "cut-responses": (
        evidence(**rollout(**{"sequences_total{length}": 30.0, "sequences_total{stop}": 70.0})),
        evidence(**rollout(**{"sequences_total{length}": 29.0, "sequences_total{stop}": 71.0})),
    ),
    "equal-groups": (
        evidence(**learning(silent_samples=103, reward=[0.2, 0.3] * 6)),
        evidence(**learning(silent_samples=102, reward=[0.2, 0.3] * 6)),
    ),
    "few-effective": (evidence(**learning(correction_ess=0.29)), evidence(**learning(correction_ess=0.3))),
    "lost-processes": (evidence("elasticity.enabled=true", **restarted(2)), evidence(**restarted(1))),
    "lease-timeouts": (
        evidence(**with_life("controller", lease_timeouts_total=1.0)),
        evidence(**with_life("controller", lease_timeouts_total=0.0, redeliveries_total=9.0)),
    ),
    "storage-full": (
        evidence(**with_life("storage", budget_waited_seconds_total=5.0 * TOOK / 100)),
        evidence(**with_life("storage", budget_waited_seconds_total=4.9 * TOOK / 100)),
    ),
    "slow-ledger": (
        evidence("storage.ledger.sync=always", **with_life("controller", ledger_sync_seconds_total=2.0, **SYNCED)),
        evidence("storage.ledger.sync=always", **with_life("controller", ledger_sync_seconds_total=1.9, **SYNCED)),
    ),
    "slow-link": (
        evidence(**rollout(pull_seconds_count=10.0, pull_seconds_sum=8.0, pulled_bytes_total=1e7)),
        evidence(**rollout(pull_seconds_count=10.0, pull_seconds_sum=7.9, pulled_bytes_total=1e7)),
    ),
    "prompts-skipped": (
        evidence(**with_life("driver", prompts_skipped_total=11.0)),
        evidence(**with_life("driver", prompts_skipped_total=10.0)),
    ),
    "sinks-fail": (
        evidence(**with_life("driver", **{"sink_failures_total{wandb}": 1.0})),
        evidence(**with_life("driver", **{"sink_failures_total{wandb}": 0.0})),
    ),
    "trainer-starved": (
        evidence(lines=steps(wait=0.61), **rollout(busy=0.7)),
        evidence(lines=steps(wait=0.59), **rollout(busy=0.7)),
    ),
    "rollouts-starved": (
        evidence(lines=steps(wait=0.0), **rollout(busy=0.39)),
        evidence(lines=steps(wait=0.0), **rollout(busy=0.41)),
    ),
    "taking-turns": (
        evidence(*SYNC, lines=steps(wait=0.5), **rollout(busy=0.59)),
        evidence(*SYNC, lines=steps(wait=0.5), **rollout(busy=0.61)),
    ),
    "slow-rewards": (
        evidence(**rollout(busy=0.5, held=0.7, reward_seconds_count=10.0, reward_seconds_sum=1.0)),
        evidence(**rollout(busy=0.5, held=0.69, reward_seconds_count=10.0, reward_seconds_sum=1.0)),
    ),
    "tail": (
        evidence(causes={"rollout": {"tail": 25.0}}, lived={"rollout": 100.0}),
        evidence(causes={"rollout": {"tail": 24.0}}, lived={"rollout": 100.0}),
    ),
    "data-plane": (
        evidence(causes={"trainer": {"data plane": 20.0}}, lived={"trainer": 100.0}),
        evidence(causes={"trainer": {"data plane": 19.0}}, lived={"trainer": 100.0}),
    ),
    "checkpoint-stall": (evidence(lines=steps(checkpoint_s=0.11)), evidence(lines=steps(checkpoint_s=0.09))),
    "publication-stall": (evidence(lines=steps(publish_s=0.11)), evidence(lines=steps(publish_s=0.09))),
    "swap-stall": (
        evidence(**rollout(swap_seconds_count=10.0, swap_seconds_sum=10.0)),
        evidence(**rollout(swap_seconds_count=10.0, swap_seconds_sum=9.9)),
    ),
    "evaluation-share": (
        evidence(EVALUATES, **rollout(tokens=1000, tokens_generated_eval=500.0)),
        evidence(EVALUATES, **rollout(tokens=1000, tokens_generated_eval=499.0)),
    ),
}


@pytest.mark.parametrize("name", CHECK_OF)
def test_a_check_finds_what_is_just_beyond_its_threshold(name: str) -> None:
    ill, well = PAIRS[name]
    words = CHECK_OF[name].examine(ill)
    assert words is not None
    assert all(words)
    assert any(sign.isdigit() for sign in words.why) or name in ("insecure", "sinks-fail"), "a why without arithmetic"
    assert CHECK_OF[name].examine(well) is None


@pytest.mark.parametrize("name", CHECK_OF)
def test_a_run_with_one_fault_has_that_finding(name: str) -> None:
    assert name in [finding.name for finding in examine(PAIRS[name][0])]


def test_nothing_is_found_in_a_healthy_run_nor_where_nothing_is_known() -> None:
    assert examine(evidence()) == []
    assert examine(evidence(lines=[], lives={})) == []


def test_the_worst_comes_first() -> None:
    found = examine(evidence(lines=steps(wait=0.9, skipped=1.0, clip_low=0.9, clip_high=0.0), **rollout(busy=0.9)))
    assert [each.name for each in found] == ["skipped-steps", "clip-fraction", "trainer-starved"]


def test_faults_are_planted_for_checks_that_there_are() -> None:
    planted = {fault.finds for fault in FAULTS.values()}
    assert planted <= set(CHECK_OF)
    assert len(planted) == len(FAULTS) >= 12
    assert all(healthy.finds == "" for healthy in HEALTHY.values())


def test_every_check_is_described_with_its_name() -> None:
    page = PAGE.read_text()
    assert [name for name in CHECK_OF if f"`{name}`" not in page] == []


def test_of_responses_that_are_made_up_nothing_is_learned() -> None:
    made_up = evidence(of="counting.yaml", lines=steps(reward=0.0, clip_low=0.9, clip_high=0.0, approx_kl=9.0))
    assert examine(made_up) == []


def test_a_solved_task_has_a_constant_reward_and_equal_groups() -> None:
    assert examine(evidence(**learning(reward=1.0, silent_samples=128))) == []
    assert examine(evidence(**learning(reward=[0.95, 0.99] * 6, silent_samples=120))) == []
    assert examine(evidence("evaluation=null", **learning(reward=1.0, silent_samples=128))) == []


def test_of_a_constant_reward_nothing_else_is_said() -> None:
    assert [each.name for each in examine(PAIRS["constant-reward"][0])] == ["constant-reward"]


def test_starved_trainer_is_told_the_rollouts_that_leave_it_waiting_as_the_policy_aims_at() -> None:
    starved = {"lines": steps(wait=0.75), **rollout(busy=1.0, tokens=1000)}
    words, after = (CHECK_OF["trainer-starved"].examine(evidence(**starved, **more)) for more in (waiting(""), {}))
    assert words is not None
    assert after is not None
    # One rollout makes g, training takes g / (1 - 0.75) = 4 g; to wait a tenth of the time it needs 3.6 g.
    assert "rollout.replicas: 4 instead of 1 leaves it waiting 10 % (asyncflow scale DIR rollout=4)" in words.change
    assert "rollout.replicas: 4 instead of 1 leaves it waiting 10 %; or" in after.change, "a run that has ended"


def test_more_rollouts_than_there_may_be_are_not_to_be_scaled_to() -> None:
    more = rollout(busy=1.0, tokens=1000) | waiting("")
    starved = evidence("rollout.maxReplicas=3", lines=steps(wait=0.75), **more)
    words = CHECK_OF["trainer-starved"].examine(starved)
    assert words is not None
    assert "rollout.replicas: 4 instead of 1 leaves it waiting 10 %, with rollout.maxReplicas: 4" in words.change
    assert "scale" not in words.change


def test_starved_rollouts_are_told_how_many_would_be_busy() -> None:
    lives = {f"rollout-{index}-a": life("rollout", busy=0.3) for index in range(4)}
    words = CHECK_OF["rollouts-starved"].examine(evidence(lines=steps(wait=0.0), lives=lives))
    assert words is not None
    assert "rollout.replicas: 2 instead of 4" in words.change  # 4 x 0.3 = 1.2 would be busy all the time


def test_of_trainer_and_rollouts_one_is_starved_or_both_take_turns() -> None:
    assert examine(evidence(lines=steps(wait=0.9), lives={})) == []
    both = evidence(*SYNC, lines=steps(wait=0.7), **rollout(busy=0.2))
    assert [each.name for each in examine(both)] == ["taking-turns"]


@pytest.mark.parametrize(
    ("name", "found", "advice"),
    [
        ("rollouts-starved", PAIRS["rollouts-starved"][0], "a smaller device share, or 2.6 times as fast a trainer"),
        ("checkpoint-stall", PAIRS["checkpoint-stall"][0], "storage.checkpoints.every: 22 instead of 10 makes"),
        ("slow-rewards", PAIRS["slow-rewards"][0], "reward.workers.max: 32 instead of 8"),
        (
            "evaluation-share",
            evidence(EVALUATES, **rollout(tokens=1000, tokens_generated_eval=750.0)),
            "evaluation.every: 27 instead of 1 makes that 10 %",
        ),
        (
            "tail",
            evidence("schedule.swapAt=quota", causes={"rollout": {"tail": 25.0}}, lived={"rollout": 100.0}),
            "schedule.maxStaleness: 2 (with swapAt: sequence, stalenessThreshold: 2)",
        ),
        (
            "rewards-fail",
            evidence(scored=90, failed={"timeout": 6, "raised": 4}),
            "reward.timeoutSeconds: 30 instead of 10, or reward.workers.max: 16 instead of 8",
        ),
        ("rewards-fail", evidence(scored=90, failed={"timeout": 5, "raised": 5}), "fix the function"),
        ("rewards-fail", evidence(scored=90, failed={"raised": 10}), "10 % of the samples get no reward"),
        ("slow-ledger", PAIRS["slow-ledger"][0], "20 ms each (2.0 % of the controller's life)"),
        ("slow-ledger", PAIRS["slow-ledger"][0], "below 5 ms, 4 times less), or sync: interval"),
        ("stalled", evidence(**waiting("", "Paused")), "a user to resume it, at step 0 of 0; the first sample"),
        ("stalled", evidence(**waiting("a person", "Paused")), "it waits for a person"),
        ("lost-processes", PAIRS["lost-processes"][0], "raise rollout.resources"),
        ("gradient-norm", PAIRS["gradient-norm"][0], "a third of the learning rate (0.0001)"),
        ("equal-groups", PAIRS["equal-groups"][0], "the gradient comes from 25 samples"),
        ("entropy-collapse", PAIRS["entropy-collapse"][0], "the mean entropy of a token fell from 1 to 0.1 nats"),
        ("kl-runaway", PAIRS["kl-runaway"][0], "algorithm.learningRate from 0.0003 to about 9e-05"),
        ("kl-runaway", FAR, "0.2 nats a token in the median of the last 5 steps, 10.0 times"),
        ("kl-runaway", FAR, "algorithm.kl.coefficient: 1 instead of 0.1, or use a horizon below 100"),
        ("kl-runaway", FAR_IN_REWARD, "0.2 nats a token in the median of the last 5 steps, 10.0 times"),
        ("few-effective", PAIRS["few-effective"][0], "or a smaller bound (algorithm.correction.high)"),
        ("few-effective", MASKED, "schedule: {mode: sync}, or wider bounds (algorithm.correction)"),
    ],
)
def test_advice_is_worked_out(name: str, found: Evidence, advice: str) -> None:
    words = CHECK_OF[name].examine(found)
    assert words is not None
    assert advice in f"{words.what} {words.why} {words.change}"


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("few-effective", {"correction_ess": 0.2}),
        ("clip-fraction", {"clip_low": 0.2, "clip_high": 0.2}),
        ("kl-runaway", {"approx_kl": 0.2}),
    ],
)
def test_a_run_without_staleness_is_not_told_to_reduce_it(name: str, figures: dict[str, float]) -> None:
    words = CHECK_OF[name].examine(evidence(*SYNC, **learning(**figures)))
    assert words is not None
    assert "taleness" not in words.change


@pytest.mark.parametrize(
    "well",
    [
        evidence(**learning(kl=9.0, approx_kl=0.01)),
        evidence(lines=steps(20, grad_norm=[0.01] * 15 + [0.9] * 5)),
        evidence(**with_life("driver", dropped_total=1.0)),
        evidence("storage.ledger.sync=always", **with_life("controller", ledger_sync_seconds_total=9.0)),
    ],
    ids=["no target", "below the clipping", "another counter", "no syncs"],
)
def test_nothing_is_found_of_what_has_no_measure(well: Evidence) -> None:
    assert examine(well) == []


def test_the_queue_holds_up_who_makes_or_trains_samples_and_nobody_else() -> None:
    others = {"storage": {"data plane": 90.0}, "trainer": {"data plane": 19.0}}
    assert examine(evidence(causes=others, lived={"storage": 100.0, "trainer": 100.0})) == []


def test_causes_of_idle_time_are_named_where_spans_tell() -> None:
    known = {"causes": {"trainer": {"starved": 60.0, "sync": 2.0}}, "lived": {"trainer": 100.0}}
    words = CHECK_OF["trainer-starved"].examine(evidence(lines=steps(wait=0.7), **rollout(busy=0.9), **known))
    assert words is not None
    assert "idle by cause: starved 60 %)" in words.why


def unknown_fields(words: str) -> list[str]:
    """Return the places in a manifest that these words name, and that there are not."""
    sections = "|".join((*fields(RLJobSpec), *ROLES, "task-mark"))
    named = re.findall(rf"(?<![\w/.])(?:{sections})(?:\[\w+\])?(?:\.\w[\w-]*)+", words)
    places = [(path, tuple(0 if key.endswith("]") else key for key in re.split(r"\.|(?=\[)", path))) for path in named]
    return [path for path, place in places if place[-1] not in fields(model_at(RLJobSpec, place[:-1]) or RLJobSpec)]


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_to_be_changed_are_fields_of_a_manifest(name: str) -> None:
    found = {finding.name: finding for finding in examine(PAIRS[name][0])}
    assert unknown_fields(f"{found[name].what} {found[name].why} {found[name].change}") == []


@pytest.mark.parametrize("role", [*(role for role in ROLES if role not in ("publisher", "follower")), "task-mark"])
def test_of_each_role_that_is_lost_the_fields_are_named(role: str) -> None:
    (finding,) = examine(evidence(**restarted(2, role)))
    assert unknown_fields(finding.change) == []
    assert f"logs/{role}-*.log" in finding.change
    assert "failurePolicy." in finding.change


STALL = {"lines": steps(wait=0.5, publish_s=0.2, staleness_start_max=4)}
SLOW = {"pull_seconds_count": 10.0, "pull_seconds_sum": 50.0, "swap_seconds_count": 10.0, "swap_seconds_sum": 20.0}


@pytest.mark.parametrize(
    "schedule",
    [
        "{mode: sync, update: sync, maxStaleness: 0}",
        "{mode: periodic}",
        "{mode: async, update: delayed, swapAt: quota, deterministic: true}",
        "{mode: async, update: delayed, swapAt: quota, maxStaleness: 3}",
        "{mode: async, swapAt: sequence}",
        "{mode: async, swapAt: token, update: staggered, syncEvery: 3, maxStaleness: 4, stalenessThreshold: 0.5}",
    ],
)
def test_a_schedule_that_is_advised_is_valid_and_another_one(schedule: str) -> None:
    idle = {"causes": {"rollout": {"tail": 50.0}}, "lived": {"rollout": 100.0}}
    ill = evidence(f"schedule={schedule}", **STALL, **rollout(busy=0.5, **SLOW), **idle)
    found = {each.name: each.change for each in examine(ill)}
    assert {"taking-turns", "tail", "publication-stall", "swap-stall", "slow-link"} <= set(found)
    for name, change in found.items():
        for advised in re.findall(r"schedule\.(\w+: [\w.]+(?: \([^)]*\))?)", change):
            pairs = re.findall(r"(\w+): ([\w.]+)", advised)
            values = [f"schedule.{field}={value}" for field, value in pairs]
            changed = evidence(f"schedule={schedule}", *values).spec.schedule
            assert changed != ill.spec.schedule
            if name in ("tail", "taking-turns"):
                assert changed.ahead > ill.spec.schedule.ahead


def test_processes_that_were_told_to_leave_are_not_lost() -> None:
    lives = restarted(2)["lives"]
    assert isinstance(lives, dict)
    for each in lives.values():
        each.left = each.role == "rollout"
    assert examine(evidence(lives=lives)) == []


def test_a_larger_group_is_advised_where_it_would_help() -> None:
    words = CHECK_OF["equal-groups"].examine(evidence(**learning(silent_samples=120, reward=[0.04, 0.06] * 6)))
    assert words is not None
    size = next(size for size in range(9, 65) if 0.95**size + 0.05**size <= 0.5)
    assert f"algorithm.groupSize {size} instead of 8" in words.change
    alike = CHECK_OF["equal-groups"].examine(PAIRS["equal-groups"][0])
    assert alike is not None
    assert "groupSize" not in alike.change, "only a tenth of independent groups of 8 would be equal"


def test_a_step_without_a_token_in_its_loss_says_nothing_of_tokens() -> None:
    figures = {"surprise": [1.0] * 4 + [0.0] * 8, "computed_tokens": [9] * 4 + [0] * 8, "reward": [0.3, 0.2] * 6}
    assert examine(evidence(**learning(**figures))) == []


def test_steps_that_were_made_again_count_once_and_an_attempt_warms_up() -> None:
    lines = steps(12, wait=0.0)
    for line in lines[8:10]:
        line |= {"attempt": 1, "wall_s": math.inf}
    for line in lines[10:]:
        line["attempt"] = 1
    assert evidence(lines=lines).timed_s == 8.0


def test_prompts_that_were_skipped_count_once_whoever_is_driver() -> None:
    lives = {f"driver-0-{name}": life("driver", prompts_skipped_total=10.0) for name in "ab"}
    assert examine(evidence(lives=lives)) == []
