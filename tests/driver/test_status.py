"""A status says what is waited for, and nothing while the job goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from asyncflow.api.job import RLJobSpec
from asyncflow.api.load import load_job
from asyncflow.api.status import (
    BestState,
    CheckpointState,
    CorrectionFigures,
    DriverStatus,
    QueueDepth,
    RewardState,
    SetState,
    Staleness,
)
from asyncflow.api.versions import VersionsState
from asyncflow.driver.evaluation import EvaluationResult, SetResult
from asyncflow.driver.instances import rollout_state
from asyncflow.driver.progress import RunProgress, line_of
from asyncflow.driver.status import build_status, count_step, last_words, set_gauges, waiting_for
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.rpc.membership import Best, Member
from asyncflow.telemetry.metrics import DriverMetrics
from asyncflow.training.report import StepTally, describe

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SPEC = load_job(EXAMPLE).spec
ALL = {"controller": 1, "storage": 2, "trainer": 1, "rollout": 2}
STATS = QueueStats(
    ready={"train/rollout": 8},
    leased={"train/rollout": 4},
    parked={},
    live=12,
    staged=0,
    committed=0,
    filtered=0,
    dropped=0,
    wanted=0,
    bytes=0,
    limit=1,
    units=2,
    lease_expiries=0,
    redeliveries=0,
    fenced=0,
    ledger_bytes=0,
)

OF_STEP_1 = {"attempt": 0, "ranks": 1, "step": 1, "published": True, "spent": {}, "publication_s": None}
TIMES = {"busy_s": 0.0, "started": 0.0, "ended": 1.0}
REPORT = describe(StepTally(), {}, **OF_STEP_1, **TIMES)  # type: ignore[arg-type]
NOTHING = dict.fromkeys(("newest", "stats", "checkpoint", "best", "recent", "desired_rollouts", "step_progress")) | {
    "phase": "Running",
    "attempt": 0,
    "versions": VersionsState(),
    "fleets": {},
    "rollouts": (),
    "idle_share": {},
    "rewards": RewardState(),
    "tasks": {},
    "prompts_skipped": 0,
    "waiting_for": "",
    "clock_ahead_s": 0.0,
}


def words(
    folder: Path,
    *,
    spec: RLJobSpec = SPEC,
    members: dict[str, int] = ALL,
    newest: int | None = 0,
    evaluating: Sequence[int] = (0,),
    exported: bool = False,
    quiet_s: float = 0.0,
    steps: int = 60,
    missing_prompts: int = 0,
    stats: QueueStats = STATS,
) -> str:
    return waiting_for(
        RunProgress(folder, steps=steps, now=0.0),
        spec=spec,
        members=members,
        newest=newest,
        evaluating=evaluating,
        exported=exported,
        stats=stats,
        quiet_s=quiet_s,
        missing_prompts=missing_prompts,
    )


def test_missing_roles_are_named_first(tmp_path: Path) -> None:
    assert words(tmp_path, members={"controller": 1, "storage": 1}) == "1 storage, 1 trainer, 1 rollout"


def test_processes_of_tasks_are_waited_for(tmp_path: Path) -> None:
    tasks = "tasks=[{name: a, function: 'm:f', reads: [reward], writes: [{name: x}], replicas: 2}]"
    spec = load_job(EXAMPLE, [tasks]).spec
    there = {"controller": 1, "storage": 2, "trainer": 1, "rollout": 2, "task-a": 1}
    assert words(tmp_path, spec=spec, members=there) == "1 task-a"


def test_a_job_that_begins_without_rollouts_says_so(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, ["rollout.replicas=0", "rollout.minReplicas=0"]).spec
    there = {"controller": 1, "storage": 2, "trainer": 1}
    assert (
        words(tmp_path, spec=spec, members=there) == "1 rollout (the job started with rollout.replicas: 0; scale it up)"
    )


def test_holders_of_the_bytes_are_named_before_the_units_that_wait_for_them(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, ["transferQueue.backend=mooncake"]).spec
    there = {"controller": 1, "holder": 1, "trainer": 1, "rollout": 2}
    assert words(tmp_path, spec=spec, members=there) == "1 master, 1 holder, 2 storage"
    elsewhere = load_job(EXAMPLE, ["transferQueue={backend: redis, store: {address: 'a:1'}}"]).spec
    assert words(tmp_path, spec=elsewhere) == ""


def test_then_the_first_weights_then_a_stall(tmp_path: Path) -> None:
    assert "θ_0" in words(tmp_path, newest=None)
    assert words(tmp_path) == ""
    stalled = words(tmp_path, quiet_s=SPEC.limits.stall_seconds + 1)
    assert "step 1" in stalled
    assert "8 samples to be generated" in stalled


def test_prompts_that_nobody_has_put_are_named_before_a_stall(tmp_path: Path) -> None:
    quiet_s = SPEC.limits.stall_seconds + 1
    assert words(tmp_path, missing_prompts=3, quiet_s=quiet_s) == "3 prompts of step 1 to be put (put_prompts_data)"
    assert words(tmp_path, missing_prompts=3, steps=0, evaluating=[], exported=True) == ""


def test_a_task_that_is_left_to_the_user_and_that_nobody_does_is_named(tmp_path: Path) -> None:
    own = "tasks=[{name: mark, reads: [reward], writes: [{name: x}]}, {name: b, reads: [x], writes: [{name: z}]}]"
    spec = load_job(EXAMPLE, [own, "trainer.external=true"]).spec
    says = "64 samples of the task mark, which is left to your process"

    def said(*, ready: dict[str, int], leased: dict[str, int], quiet_s: float = 0.0) -> str:
        return words(tmp_path, spec=spec, stats=structs.replace(STATS, ready=ready, leased=leased), quiet_s=quiet_s)

    assert said(ready={"train/mark": 64}, leased={}) == says
    assert said(ready={"train/mark": 64, "train/b": 8}, leased={}) == says + ", " + says.replace("64", "8").replace(
        "mark", "b"
    )
    assert said(ready={"train/mark": 64}, leased={"train/mark": 4}) == "", "somebody does it"
    assert said(ready={"train/mark": 64}, leased={"train/rollout": 4}) == "", "the job goes on"
    stalled = said(ready={"train/mark": 64}, leased={"train/rollout": 4}, quiet_s=spec.limits.stall_seconds + 1)
    assert f"stalled for 1801 s: {says}, 0 samples to be generated" in stalled


def test_last_the_evaluations_then_what_the_run_leaves_behind(tmp_path: Path) -> None:
    assert words(tmp_path, steps=0) == "the evaluation of θ_0"
    assert words(tmp_path, steps=0, evaluating=[]) == "the trainer to write the last checkpoint and export/"
    assert words(tmp_path, steps=0, evaluating=[], exported=True) == ""


def test_a_rollout_lags_when_it_is_further_behind_than_the_schedule_allows() -> None:
    member = Member(role="rollout", index=0, incarnation="a")

    def state(version: int, silent_s: float = 0.5, **more: Any) -> str:
        status = {"version": Version(0, version).packed} | more
        return rollout_state((member, status, silent_s), newest=5, lag=1).state

    assert [state(step) for step in (5, 3, 2)] == ["ready", "ready", "lagging"]
    known = [Version(0, step).packed for step in (3, 4)]
    assert [state(1, newest=each) for each in known] == ["ready", "lagging"], "when it said so"
    assert state(1, newest=known[0], silent_s=4.0) == "lagging", "and has said nothing since"
    assert rollout_state((member, {"version": -1}, 0.0), newest=5, lag=1).state == "starting"
    assert state(5, draining=True) == "draining"


def test_what_prometheus_scrapes_of_an_evaluation_is_what_the_status_says() -> None:
    metrics = DriverMetrics()
    sets = {"aime": SetState(accuracy=0.25, reward=0.5, pass_at={"4": 0.75})}
    status = DriverStatus(eval=0.5, eval_pass_at={"4": 1.0}, eval_sets=sets)
    set_gauges(metrics, status, stats=STATS, members={})
    named = {"set": "aime"}
    value = metrics.registry.get_sample_value
    assert value("asyncflow_driver_eval_accuracy_ratio") == 0.5
    assert value("asyncflow_driver_eval_pass_ratio", {"k": "4"}) == 1.0
    assert value("asyncflow_driver_eval_set_accuracy_ratio", named) == 0.25
    assert value("asyncflow_driver_eval_set_reward", named) == 0.5
    assert value("asyncflow_driver_eval_set_pass_ratio", {**named, "k": "4"}) == 0.75


def test_what_prometheus_scrapes_of_the_job_is_what_the_status_says() -> None:
    metrics = DriverMetrics()
    parts, idle = {"right": 0.5}, {"trainer": 0.125}
    status = DriverStatus(step=3, steps=60, reward=0.75, reward_components=parts, eval_reward=0.25, idle_share=idle)
    stats = structs.replace(STATS, staged=5, live=12, wanted=2, bytes=77)
    value = metrics.registry.get_sample_value
    for desired, shown in ((None, 4), (0, 0), (6, 6)):
        set_gauges(
            metrics, status.model_copy(update={"desired_rollouts": desired}), stats=stats, members={"rollout": 4}
        )
        assert value("asyncflow_driver_desired_rollouts") == shown
    assert value("asyncflow_driver_step") == 3
    assert value("asyncflow_driver_target_step") == 60
    assert value("asyncflow_driver_reward_mean") == 0.75
    assert value("asyncflow_driver_reward_component_mean", {"component": "right"}) == 0.5
    assert value("asyncflow_driver_eval_reward") == 0.25
    rows = {"ready train/rollout": 8, "staged": 5, "live": 12, "wanted": 2}
    assert {state: value("asyncflow_driver_queue_rows", {"state": state}) for state in rows} == rows
    assert value("asyncflow_driver_queue_bytes") == 77
    assert value("asyncflow_driver_idle_share_ratio", {"of": "trainer"}) == 0.125
    assert value("asyncflow_driver_members", {"of": "rollout"}) == 4


def test_each_step_is_counted_by_its_samples_its_tokens_and_their_staleness() -> None:
    metrics = DriverMetrics()
    line = {"samples": 4, "tokens": 100, "response_tokens": 40, "staleness_start_max": 3, "staleness_end_max": 1}
    count_step(metrics, line | {"wall_s": 2.0})
    count_step(metrics, line | {"wall_s": 0.5, "observation_tokens": 10})
    value = metrics.registry.get_sample_value
    kinds = {"prompt": 60 + 50, "response": 80, "observation": 10}
    assert {kind: value("asyncflow_driver_tokens_trained_total", {"kind": kind}) for kind in kinds} == kinds
    assert value("asyncflow_driver_samples_total", {"outcome": "trained"}) == 8
    assert value("asyncflow_driver_step_seconds_sum") == 2.5
    ages = {"oldest": 6, "newest": 2}
    assert {token: value("asyncflow_driver_staleness_steps_sum", {"token": token}) for token in ages} == ages


def test_a_status_says_how_the_newest_step_and_evaluation_were_by_the_clock_of_those_who_read_it(
    tmp_path: Path,
) -> None:
    progress = RunProgress(tmp_path, steps=60, now=0.0)
    nothing = build_status(progress, **NOTHING)  # type: ignore[arg-type]
    assert (nothing.reward, nothing.eval, nothing.last_step_at, nothing.version) == (None, None, None, 0)
    assert (nothing.staleness, nothing.checkpoint, nothing.best) == (Staleness(), None, None)
    stale = {"staleness_start_max": 3, "staleness_end_max": 2, "staleness_token_mean": 2.5}
    for step, reward in ((1, 0.25), (2, 0.75)):
        progress.step({**line_of(REPORT, at=10.0 * step), "step": step, "reward": reward, **stale})
        named = {"hard": SetResult(prompts=1, accuracy=step / 8, greedy=None, pass_at={"2": step / 4})}
        figures = {"greedy": step / 4, "reward": -reward, "pass_at": {"4": step / 2}, "sets": named}
        progress.evaluated(EvaluationResult(step=step, prompts=8, accuracy=step / 4, **figures), at=1.0)
    known = {"newest": 2, "checkpoint": (1, 12.0), "best": Best(step=1, by="reward", value=-0.25), "clock_ahead_s": 3.0}
    status = build_status(progress, **NOTHING | known)  # type: ignore[arg-type]
    assert (status.step, status.steps, status.reward, status.version) == (2, 60, 0.75, 2)
    assert (status.eval, status.eval_greedy, status.eval_reward, status.eval_pass_at) == (0.5, 0.5, -0.75, {"4": 1.0})
    assert status.eval_sets == {"hard": SetState(accuracy=0.25, pass_at={"2": 0.5})}
    assert status.staleness == Staleness(start=3, end=2, mean=2.5)
    assert status.last_step_at == "1970-01-01T00:00:23Z"
    assert status.checkpoint == CheckpointState(step=1, at="1970-01-01T00:00:15Z")
    assert status.best == BestState(step=1, by="reward", value=-0.25)


def test_the_depth_of_the_queue_is_what_the_trainer_may_take_and_what_rollouts_make(tmp_path: Path) -> None:
    stats = structs.replace(
        STATS,
        ready={"train/train": 6, "train/rollout": 8, "eval/rollout": 1},
        leased={"train/rollout": 4, "eval/rollout": 2, "train/train": 16},
        staged=5,
        bytes=77,
        limit=100,
    )
    progress = RunProgress(tmp_path, steps=60, now=0.0)
    status = build_status(progress, **NOTHING | {"stats": stats})  # type: ignore[arg-type]
    assert status.queue == QueueDepth(ready=6, leased=6, staged=5, bytes=77, limit=100)
    assert build_status(progress, **NOTHING).queue == QueueDepth()  # type: ignore[arg-type]


def test_what_a_driver_leaves_of_its_status_is_never_cut_by_a_kubelet() -> None:
    most, figure = (1 << 53) - 1, 0.12345678901234567
    status = DriverStatus(
        phase="Succeeded",
        step=most,
        steps=most,
        reward=-figure,
        eval=figure,
        eval_sets={f"{index:0>63}": SetState(accuracy=figure, pass_at={"4": 0.75}) for index in range(16)},
        tokens_per_second=1e9 * figure,
        staleness=Staleness(start=figure),
        version=most,
        last_step_at="2026-01-01T00:00:00.000000Z",
        checkpoint=CheckpointState(step=most, at="2026-01-01T00:00:00.000000Z"),
        best=BestState(step=most, by="accuracy", value=figure),
        waiting_for="x" * 1024,
    )
    said = last_words(status)
    assert len(said.encode()) <= 4096
    left = DriverStatus.model_validate_json(said)
    assert (left.step, left.best, left.eval_sets.keys()) == (most, status.best, status.eval_sets.keys())


def test_importance_weights_are_shown_where_the_job_has_them(tmp_path: Path) -> None:
    line = line_of(REPORT, at=1.0)
    with_them = {**line, "step": 2, "correction_ess": 0.75, "correction_high": 0.125, "correction_low": 0.0625}
    progress = RunProgress(tmp_path, steps=60, now=0.0)
    shown = []
    for each in (line, with_them):
        progress.step(each)
        shown.append(build_status(progress, **NOTHING).correction)  # type: ignore[arg-type]
    assert shown == [None, CorrectionFigures(effective_share=0.75, bounded_share=0.1875)]


def test_a_figure_that_is_not_finite_is_left_out_and_the_step_read_back(tmp_path: Path) -> None:
    odd = {"loss": float("nan"), "kl": float("inf"), "logprob_gap_p99": float("nan"), "entropy": 0.5}
    line = line_of(describe(StepTally(), odd, **OF_STEP_1, **TIMES), at=1.0)  # type: ignore[arg-type]
    assert ("loss" in line, "kl" in line, line["logprob_gap_p99"], line["entropy"]) == (False, False, None, 0.5)
    RunProgress(tmp_path, steps=60, now=0.0).step(line)
    assert RunProgress(tmp_path, steps=60, now=3.0).done == REPORT.step


def test_components_of_the_reward_are_shown_where_it_has_them(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=60, now=0.0)
    shown = []
    for line in (line_of(REPORT, at=1.0), {**line_of(REPORT, at=2.0, components={"right": 0.5}), "step": 2}):
        progress.step(line)
        shown.append(build_status(progress, **NOTHING).reward_components)  # type: ignore[arg-type]
    assert shown == [{}, {"right": 0.5}]
    again = RunProgress(tmp_path, steps=60, now=3.0)
    status = build_status(again, **NOTHING)  # type: ignore[arg-type]
    assert status.reward_components == {"right": 0.5}, "a driver that begins again reads them back"
    metrics = DriverMetrics()
    set_gauges(metrics, status, stats=STATS, members={})
    assert metrics.registry.get_sample_value("asyncflow_driver_reward_component_mean", {"component": "right"}) == 0.5
