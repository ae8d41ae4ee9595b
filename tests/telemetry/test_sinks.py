"""Sinks: what is read of a run's files and under which names; TensorBoard, W&B and MLflow themselves."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinks_world import EXAMPLE, THIRD_PARTY, RunFolder, again, evaluation, job_with, step, third_party, wandb_records

from asyncflow.api.load import load_job
from asyncflow.commands.sinks import sinks as feed_sinks
from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow.telemetry.sinks.base import MetricSink, SinkRun, check_sink
from asyncflow.telemetry.sinks.feed import SinkFeed, feed
from asyncflow.telemetry.sinks.names import FIELD, evaluation_values, step_values
from asyncflow.telemetry.sinks.wandb import _id_of

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "outputs.md"


class Told(MetricSink):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        self.told.append(("eval" if "asyncflow/eval/accuracy" in values else "step", step))

    def rewind(self, step: int) -> None:
        self.told.append(("again", step))

    def flush(self) -> None:
        pass

    def close(self, phase: str) -> None:
        pass


def run_in(folder: Path) -> SinkRun:
    (folder / "own").mkdir(parents=True, exist_ok=True)
    return SinkRun(name="job", uid="", folder=folder, own=folder / "own", config={})


STEPS = [*map(step, (1, 2, 3)), step(3), *(step(n, attempt=1, at=3.6 + n) for n in (2, 3, 4))]
EVENTS = [
    {"event": "driver started", "at": 0.5},
    evaluation(0, at=0.9),
    evaluation(2, at=2.5),
    again(2, at=5.6),
    evaluation(2, at=5.7),
]
TOLD = [
    *(("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3)),
    *(("again", 2), ("step", 2), ("eval", 2), ("step", 3), ("step", 4)),
]


def test_a_step_that_is_made_again_is_told_before_it_comes_and_a_repeated_line_is_not_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", job_with([]))
    folder.steps(*STEPS)
    folder.events(*EVENTS)
    sink = Told()
    assert SinkFeed(sink, run=run_in(folder.path), samples=1).more() == len(STEPS) + len(EVENTS) - 1
    assert sink.told == TOLD


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 1000), st.booleans()), max_size=8))
def test_whenever_and_by_whomever_the_files_are_read_each_line_is_told_once(
    tmp_path_factory: pytest.TempPathFactory, looks: list[tuple[int, int, bool]]
) -> None:
    """The files grow by any number of bytes between two looks; some looks are those of a new process."""
    folder = tmp_path_factory.mktemp("run")
    steps = b"".join(json.dumps(step(number)).encode() + b"\n" for number in range(1, 9))
    events = b"".join(json.dumps(evaluation(number, at=number + 0.5)).encode() + b"\n" for number in (2, 4, 8))
    sink = Told()
    feeding = SinkFeed(sink, run=run_in(folder), samples=1)
    for by_steps, by_events, anew in [*looks, (len(steps), len(events), False)]:
        for name, data, more in (("metrics.jsonl", steps, by_steps), ("events.jsonl", events, by_events)):
            with (folder / name).open("ab") as file:
                file.write(data[file.tell() : file.tell() + more])
        if anew:
            feeding = SinkFeed(sink, run=run_in(folder), samples=1)
        feeding.more()
    assert sorted(sink.told) == sorted([("step", n) for n in range(1, 9)] + [("eval", n) for n in (2, 4, 8)])
    assert [number for kind, number in sink.told if kind == "step"] == list(range(1, 9))


def test_what_is_no_line_is_passed_over_and_other_files_are_read_from_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", job_with([]))
    sink, run = Told(), run_in(folder.path)
    (folder.path / "metrics.jsonl").write_bytes(
        b'\xff\nnull\n{"step": 1}\n' * 50 + json.dumps(step(1)).encode() + b'\n{"at"'
    )
    SinkFeed(sink, run=run, samples=1).more()
    (folder.path / "metrics.jsonl").write_bytes(b"")
    folder.steps(step(1), step(2))
    SinkFeed(sink, run=run, samples=1).more()
    assert sink.told == [("step", 1), ("step", 2)]


def test_each_figure_has_our_name_and_those_that_the_field_has_stand_beside_it() -> None:
    figures = {"clip_low": 0.1, "clip_high": 0.2, "clip_dual": 0.05, "compute_s": 2.0, "optimizer_s": 0.5, "kl": 0.01}
    values = step_values(step(3, wall_s=4.0, logprob_gap=float("nan"), **figures))
    assert values["asyncflow/reward"] == values["critic/score/mean"] == values["critic/rewards/mean"] == 0.3
    penalised = step_values(step(3, penalty_kl=0.01))
    assert penalised["critic/score/mean"] == 0.3
    assert "critic/rewards/mean" not in penalised, "verl's is the reward less the penalty"
    assert step_values(step(3, approx_kl=0.02))["rollout_corr/k3_kl"] == 0.02
    assert values["actor/pg_clipfrac"] == pytest.approx(0.3)
    assert values["timing_s/update_actor"] == 2.5
    assert (values["response_length/mean"], values["prompt_length/mean"]) == (8.0, 2.0)
    assert {"asyncflow/keys", "asyncflow/published", "asyncflow/at"}.isdisjoint(values)
    assert {"asyncflow/logprob_gap", "actor/lr", "rollout_corr/rollout_is_mean"}.isdisjoint(values)
    assert "prompt_length/mean" not in step_values(step(3) | {"samples": 0})
    observed = step_values(step(3) | {"observation_tokens": 3, "tokens": step(3)["tokens"] + 3, "value_loss": 0.5})
    assert (observed["prompt_length/mean"], observed["critic/vf_loss"]) == (values["prompt_length/mean"], 0.5)
    more = 3 / step(3)["samples"]
    assert observed["response_length/mean"] == values["response_length/mean"] + more, "verl counts observations"
    assert "critic/vf_loss" not in values


def test_an_evaluation_names_its_sets() -> None:
    assert evaluation_values(evaluation(4, at=1.0), samples=2) == {
        "training/global_step": 4.0,
        "asyncflow/eval/prompts": 4.0, "asyncflow/eval/accuracy": 0.5, "asyncflow/eval/reward": 0.25,
        "asyncflow/eval/pass@2": 0.75,
        "asyncflow/eval/hard/prompts": 4.0, "asyncflow/eval/hard/accuracy": 0.0, "asyncflow/eval/hard/reward": 0.25,
        "asyncflow/eval/hard/pass@2": 0.75,
        "val-core/main/acc/mean@2": 0.5, "val-core/main/reward/mean@2": 0.25, "val-core/main/acc/best@2/mean": 0.75,
        "val-core/hard/acc/mean@2": 0.0, "val-core/hard/reward/mean@2": 0.25, "val-core/hard/acc/best@2/mean": 0.75,
    }  # fmt: skip


def test_the_sink_of_the_page_works(tmp_path: Path) -> None:
    (code,) = (block for block in GUIDE.read_text().split("```python\n")[1:] if "class Lines" in block)
    page: dict[str, Any] = {"__name__": "my_sink"}
    exec(code.partition("```")[0], page)
    run = run_in(tmp_path / "run")
    sink = page["Lines"](page["Options"](file="rewards.txt"), run=run)
    folder = RunFolder(tmp_path / "other", job_with([]))
    folder.steps(*STEPS)
    folder.events(*EVENTS)
    SinkFeed(sink, run=replace(run, folder=folder.path), samples=1).more()
    sink.close("Succeeded")
    lines = (run.own / "rewards.txt").read_text().splitlines()
    assert lines[0] == "1 0.1"
    assert lines[3:5] == ["from 2 on again", "2 0.2"]


def test_the_page_has_the_table_of_names() -> None:
    text = GUIDE.read_text()
    assert {name for name in FIELD if f"`{name}`" not in text} == set()


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(third_party(tmp_path))
    for sink, said in (
        ({"kind": "pigeon"}, "no installed package offers 'pigeon' in asyncflow.metric_sinks"),
        ({"kind": "absent"}, r"sinks\[0\]: not installed: nowhere_at_all. Run pip install 'nowhere-at-all'"),
        ({"kind": "wandb", "options": {"api_key": "x"}}, "unknown option api_key"),
        ({"kind": "wandb", "options": {"base_url": "https://me:secret@host"}}, "base_url contains a password"),
        ({"kind": "mlflow", "options": {"tracking_uri": "https://me:secret@host"}}, "tracking_uri contains a password"),
    ):
        with pytest.raises(ManifestError, match=said) as refused:
            check_sink(*job_with([sink]).spec.telemetry.sinks, number=0)
        assert "me:secret" not in str(refused.value)
    for number, spec in enumerate(job_with([{"kind": "lines"}, {"kind": "tensorboard"}]).spec.telemetry.sinks):
        check_sink(spec, number=number)


def test_a_sink_that_is_fed_alone_is_named_by_its_number_in_the_job(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    made = job_with([{"kind": "lines"}, {"kind": "tensorboard", "options": {"colour": "red"}}])
    job.write_text(made.model_dump_json(by_alias=True, exclude_none=True))
    with pytest.raises(ManifestError, match=r"spec.telemetry.sinks\[1\].options: unknown option colour"):
        feed_sinks(tmp_path, kind="tensorboard", job=job, follow=False)


def test_a_sink_that_fails_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = third_party(tmp_path)
    (site / "faulty_sinks.py").write_text(THIRD_PARTY.replace("if self._fails:", "if {}['q']:"))
    points = site / "third_sinks-1.dist-info" / "entry_points.txt"
    points.write_text("[asyncflow.metric_sinks]\nfaulty = faulty_sinks:Lines\n")
    monkeypatch.syspath_prepend(site)
    run = RunFolder(tmp_path / "run", job_with([{"kind": "faulty"}]))
    run.steps(*STEPS)
    with pytest.raises(AsyncFlowError, match=r"sink faulty: KeyError: 'q' \(faulty_sinks\.py:\d+\)"):
        feed_sinks(run.path, kind="faulty", job=run.path / "job.yaml", follow=False)


def test_a_sink_is_told_nothing_that_may_be_secret(tmp_path: Path) -> None:
    env = '[{name: TOKEN, value: "hush"}]'
    job = load_job(EXAMPLE, [f"{place}={env}" for place in ("template.env", "rollout.template.env")])
    config = SinkRun.of(job, kind="lines", folder=tmp_path).config
    assert config["algorithm"]["groupSize"] == job.spec.algorithm.group_size
    assert b"hush" not in msgspec.json.encode(config)


def test_tensorboard_shows_the_history_that_survives(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = job_with([{"kind": "tensorboard"}])
    folder = RunFolder(tmp_path / "run", job)
    folder.steps(*STEPS[:3])
    folder.events(*EVENTS[:3])
    assert feed(job, kind="tensorboard", folder=folder.path, follow=False) == 5
    folder.steps(*STEPS[4:])
    folder.events(*EVENTS[3:])
    assert feed(job, kind="tensorboard", folder=folder.path, follow=False) == 5
    shown = EventAccumulator(str(folder.path / "sinks" / "tensorboard"))
    shown.Reload()
    attempts = [(event.step, event.value) for event in shown.Scalars("asyncflow/attempt")]
    assert attempts == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert [event.step for event in shown.Scalars("asyncflow/eval/accuracy")] == [0, 2]
    assert [event.value for event in shown.Scalars("critic/rewards/mean")] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert "torch" not in {name.partition(".")[0] for name in _loaded_by_tensorboard()}


def _loaded_by_tensorboard() -> list[str]:
    code = (
        "import sys, asyncflow.telemetry.sinks.feed as feed, asyncflow.telemetry.sinks.tensorboard as sink;"
        "import tensorboard.summary.writer.event_file_writer; print(*sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def sinks(folder: Path, **environment: str) -> str:
    """Run ``asyncflow sinks`` as a person does."""
    run = subprocess.run(
        [sys.executable, "-m", "asyncflow", "sinks", str(folder)],
        capture_output=True, text=True, timeout=140, env={**os.environ, **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def twice(folder: RunFolder, *, forgets: str = "", **environment: str) -> None:
    """SinkFeed all sinks of a run that is suspended, and goes on, maybe without a file."""
    folder.steps(*STEPS[:3])
    folder.events(*EVENTS[:3])
    folder.ended("Suspended")
    assert "5 lines written" in sinks(folder.path, **environment)
    for file in folder.path.glob(forgets or "nothing"):
        file.unlink()
    folder.steps(*STEPS[4:])
    folder.events(*EVENTS[3:])
    folder.ended("Succeeded")
    assert "5 lines written" in sinks(folder.path, **environment)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_wandb_has_one_run_offline_however_often_it_is_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", job_with([{"kind": "wandb", "options": {"mode": "offline", "tags": ["a"]}}]))
    twice(folder, WANDB_API_KEY="hush" * 10)
    files = sorted(folder.path.glob("sinks/wandb/wandb/offline-run-*/run-*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {(folder.path / "sinks" / "wandb" / "run-id").read_text()}
    assert {(run.project, run.display_name, *run.tags) for run in runs} == {("asyncflow", "counting", "a")}
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    points = [
        (point["asyncflow/step"], point["asyncflow/attempt"]) for point in history if "asyncflow/attempt" in point
    ]
    assert points == [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (4, 1)]
    assert [point["asyncflow/step"] for point in history if "asyncflow/eval/accuracy" in point] == [0, 2, 2]
    assert not any(b"hushhush" in file.read_bytes() for file in folder.path.rglob("*") if file.is_file())


def test_a_job_of_a_cluster_is_known_to_wandb_by_its_uid(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    known = _id_of(run)
    assert _id_of(run) == known
    (run.own / "run-id").unlink()
    assert _id_of(run) != known
    (run.own / "run-id").unlink()
    assert _id_of(replace(run, uid="5f0c-77")) == "5f0c-77"


@pytest.mark.process
@pytest.mark.timeout(300)
def test_mlflow_has_one_run_however_often_it_is_resumed(tmp_path: Path) -> None:
    job = job_with([{"kind": "mlflow"}])
    job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "5f0c-77"})})
    folder = RunFolder(tmp_path / "run", job)
    twice(folder, forgets="sinks/mlflow/run-id")
    with sqlite3.connect(folder.path / "sinks" / "mlflow" / "mlflow.db") as database:
        assert database.execute("select name, status from runs").fetchall() == [("counting", "FINISHED")]
        newest = "select step, value from metrics where key = ? order by step, timestamp"
        attempts = dict(database.execute(newest, ["asyncflow/attempt"]).fetchall())
        shown = dict(database.execute("select key, value from latest_metrics").fetchall())
        params = dict(database.execute("select key, value from params").fetchall())
        tags = dict(database.execute("select key, value from tags").fetchall())
    assert attempts == {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert (shown["critic/rewards/mean"], shown["asyncflow/eval/pass_at_2"]) == (0.4, 0.75)
    assert params["algorithm.groupSize"] == str(load_job(EXAMPLE).spec.algorithm.group_size)
    assert tags["asyncflow.made_again_from"] == "2"


def test_one_process_at_a_time_feeds_a_sink(tmp_path: Path) -> None:
    from asyncflow.telemetry.sinks.feed import _locked

    job = job_with([{"kind": "tensorboard"}])
    folder = RunFolder(tmp_path / "run", job)
    own = folder.path / "sinks" / "tensorboard"
    own.mkdir(parents=True)
    with _locked(own / "lock"), pytest.raises(AsyncFlowError, match="another process writes to this sink"):
        feed(job, kind="tensorboard", folder=folder.path, follow=False)
    assert feed(job, kind="tensorboard", folder=folder.path, follow=False) == 0
