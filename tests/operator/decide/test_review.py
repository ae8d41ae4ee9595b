"""The decision log: written, bounded, told, and decided again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from model import World
from model_samples import DESIRED, JOB, START, job_of

from asyncflow.api.names import LABEL_ATTEMPT
from asyncflow.errors import ManifestError
from asyncflow_operator.actions import Apply, DriverOrder, Note, Plan
from asyncflow_operator.decisions import NEWEST, OLDER, DecisionLog, files_of, read_decisions
from asyncflow_operator.main import app
from asyncflow_operator.observed import Denial, JobState, Ref
from asyncflow_operator.references import Key
from asyncflow_operator.review import decide_again, differences, sentences, settings_of

NOTED = Plan(notes=(Note(type="Normal", reason="Seen", message="seen"),))
KEY = Key("RLJob", "team", JOB.name)


def log_in(folder: Path, *, limit: int = 16 << 20) -> DecisionLog:
    return DecisionLog(folder, limit=limit, key=b"k" * 16, settings=settings_of(DESIRED.settings))


class LoggedWorld(World):
    """A cluster in memory whose decisions are written down."""

    log: DecisionLog | None = None

    def reconcile(self, ref: Ref, *, killed_after: int | None = None) -> Plan:
        if ref in self.seen_resources and self.log is not None:
            state, plan = self.observe(ref), self.decide(ref)
            self.log.record(Key(ref.kind, "team", ref.name), state, plan, now=self.now, denied=self.denied.get(ref, ()))
        return super().reconcile(ref, killed_after=killed_after)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a job that was disturbed, scaled, suspended, and ended."""
    folder = tmp_path_factory.mktemp("decisions")
    world = LoggedWorld(job_of(trainer={"replicas": 2}))
    world.log = log_in(folder)
    world.settle()
    world.end(world.with_role("trainer")[1], code=137)
    world.settle()
    world.edit(rollout={"replicas": 1})
    world.settle()
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    world.succeed()
    world.settle()
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_decisions(files_of(folder)))


def test_every_decision_is_the_same_when_it_is_made_again(lived: Path) -> None:
    found = lines(lived)
    assert {line["object"][0] for line in found} >= {"RLJob", "TransferQueue"}
    for line in found:
        assert list(differences(*decide_again(line))) == []
    done = CliRunner().invoke(app, ["decide-again", str(lived)], standalone_mode=False)
    assert done.return_value == 0, done.output
    assert f"{len(found)} decisions repeated, 0 differ" in done.output


def test_a_decision_that_would_be_another_one_today_is_found(lived: Path, tmp_path: Path) -> None:
    line = next(line for line in lines(lived) if line["object"][0] == "RLJob" and line["decided"]["status"])
    line["state"]["pods"] = line["state"].get("pods", [])[1:]
    line["decided"]["notes"] = [["Normal", "Other", "was"]]
    (tmp_path / NEWEST).write_text(json.dumps(line) + "\n")
    done = CliRunner().invoke(app, ["decide-again", str(tmp_path / NEWEST)], standalone_mode=False)
    assert done.return_value == 1
    assert "1 decisions repeated, 1 differ" in done.output
    assert "notes" in done.output
    line["state"]["job"]["spec"]["rollout"] = {"replicas": "many"}
    (tmp_path / NEWEST).write_text(json.dumps(line) + "\n")
    with pytest.raises(ManifestError, match="decision 1 cannot be repeated: "):
        CliRunner().invoke(app, ["decide-again", str(tmp_path / NEWEST)], standalone_mode=False, catch_exceptions=False)


def explained(folder: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *words, "--decisions", str(folder)], standalone_mode=False)
    return done.return_value, done.output


def test_why_a_pod_was_deleted_is_told(lived: Path) -> None:
    status, said = explained(lived, "team/demo", "demo-trainer-1")
    assert status == 0
    assert "made Pod/demo-trainer-1 (attempt 0)" in said
    why = "attempt 1 of trainer starts when all pods of older attempts are deleted"
    assert f"deleted Pod/demo-trainer-1: {why}. It was Failed on node-1, attempt 0, exit code 137" in said
    assert "event Warning TrainerFailed: demo-trainer-1 ended with exit code 137" in said
    assert "the job is suspended" in said
    rollouts = [explained(lived, "demo", f"demo-rollout-{index}")[1] for index in (0, 1)]
    assert sorted("fewer rollouts are wanted" in each for each in rollouts) == [False, True]
    assert "trainer-1 ended" not in rollouts[0]
    assert explained(lived, "demo", "demo-rollout-77")[0] == 1
    assert explained(lived, "other/demo")[0] == 1


def test_each_deletion_of_a_pod_has_an_event_with_its_reason(lived: Path) -> None:
    for line in lines(lived):
        told = " ".join(message for _, _, message in line["decided"]["notes"])
        for action in (action for stage in line["decided"]["stages"] for action in stage):
            if action["do"] == "delete" and action["kind"] == "Pod":
                assert action["why"] in told
                assert action["name"] in told


def test_an_observation_is_written_once_while_it_stays(tmp_path: Path) -> None:
    world, log = World(job_of()), log_in(tmp_path)
    world.see_all()
    state = world.observe(JOB)
    assert isinstance(state, JobState)
    for now in (1.0, 2.0):
        log.record(KEY, state, NOTED, now=now)
    log.record(KEY, replace(state, problem="x"), NOTED, now=3.0)
    log.record(KEY, state, Plan(), now=4.0)
    written = [json.loads(line) for line in (tmp_path / NEWEST).read_text().splitlines()]
    assert ["state" in line for line in written] == [True, False, True]
    assert [line["state"].get("problem") for line in lines(tmp_path)] == [None, None, "x"]


def test_the_log_is_bounded_and_each_file_can_be_read_alone(tmp_path: Path) -> None:
    world, limit = World(job_of()), 1 << 17
    world.see_all()
    state, log = world.observe(JOB), log_in(tmp_path, limit=limit)
    for now in range(400):
        log.record(KEY, replace(state, problem=f"x{now // 3}"), NOTED, now=float(now))
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= limit
    assert [path.name for path in files_of(tmp_path)] == [OLDER, NEWEST]
    newest = list(read_decisions([tmp_path / NEWEST]))
    assert newest[-1]["at"] == 399.0
    assert newest[-1]["state"]["problem"] == "x133"
    assert [line["at"] for line in lines(tmp_path)] == sorted(line["at"] for line in lines(tmp_path))


def test_a_line_that_was_cut_off_and_a_disk_that_fails_cost_lines(tmp_path: Path) -> None:
    world, log = World(job_of()), log_in(tmp_path / "log")
    world.see_all()
    log.record(KEY, world.observe(JOB), NOTED, now=1.0)
    with (tmp_path / "log" / NEWEST).open("ab") as file:
        file.write(b'{"format":1,"at":')
    assert [line["at"] for line in lines(tmp_path / "log")] == [1.0]
    (tmp_path / "file").write_text("")
    log_in(tmp_path / "file").record(KEY, world.observe(JOB), NOTED, now=1.0)


def test_a_log_of_another_format_and_no_log_are_refused(tmp_path: Path) -> None:
    runner = CliRunner()
    none = runner.invoke(app, ["decide-again", str(tmp_path)], standalone_mode=False).exception
    assert "no decision log" in str(none)
    (tmp_path / NEWEST).write_text('{"format":9,"version":"8.0","object":["RLJob","a","b"]}\n')
    wrong = runner.invoke(app, ["decide-again", str(tmp_path)], standalone_mode=False).exception
    assert "format 9 is not 1, use version 8.0" in str(wrong)


SECRET = "hunter2-hunter2"


def test_no_secret_is_in_the_log_and_a_job_with_one_is_decided_again(tmp_path: Path) -> None:
    rollout = {"replicas": 2, "template": {"env": [{"name": "HF_TOKEN", "value": SECRET}]}}
    world = LoggedWorld(job_of(rollout=rollout))
    world.log = log_in(tmp_path)
    world.settle()
    world.edit(suspend=True)
    world.settle()
    written = "".join(path.read_text() for path in files_of(tmp_path))
    assert "redacted-" in written
    assert SECRET not in written
    done = CliRunner().invoke(app, ["decide-again", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 0, done.output
    assert "secrets were left out" in done.output


def test_what_was_refused_is_told_beside_what_was_tried_and_a_server_that_failed_is_no_refusal(tmp_path: Path) -> None:
    world, log, pod = World(job_of()), log_in(tmp_path), Ref("Pod", "demo-rollout-1")
    world.see_all()
    manifest = {"kind": pod.kind, "metadata": {"name": pod.name, "labels": {LABEL_ATTEMPT: "3"}}}
    denied = [Denial(pod, "exceeded quota", missing=True), Denial(Ref("Pod", "demo-rollout-12"), "no", missing=True)]
    denied.append(Denial(pod, "connection refused", missing=True, failed=True))
    plan = Plan(stages=((Apply(manifest=manifest), DriverOrder(path="/v1/suspend")),))
    log.record(KEY, world.observe(JOB), plan, now=START, denied=denied, errors=["no answer"], left=[pod])
    assert list(sentences(lines(tmp_path), name="demo", namespace="team", pod=pod.name)) == [
        "2027-01-15T08:00:00Z  RLJob team/demo",
        "  made Pod/demo-rollout-1 (attempt 3)",
        "  not retried yet after an earlier failed write: Pod/demo-rollout-1",
        "  the API server refused Pod/demo-rollout-1: exceeded quota",
        "  the API server failed at Pod/demo-rollout-1: connection refused",
        "  failed: no answer",
    ]
    whole = list(sentences(lines(tmp_path), name="demo", namespace=None, pod=None))
    assert "  sent to the driver: POST /v1/suspend" in whole
