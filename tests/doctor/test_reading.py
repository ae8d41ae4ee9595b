"""A run is read from what lies in its folder, whatever is missing or torn; a driver tells nothing that is secret."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from count_work import bytecodes
from runs_seen import EXAMPLES, life, steps

from asyncflow.api.load import load_job, to_yaml
from asyncflow.doctor import reading
from asyncflow.doctor.checks import examine
from asyncflow.doctor.evidence import surviving
from asyncflow.doctor.reading import EvidenceReply, address_of, read, spent_of
from asyncflow.driver.presence import MOST_LINES, evidence_of
from asyncflow.errors import ManifestError
from asyncflow.timeline.tracks import Span, Timeline, Track


def written(folder: Path, *, lines: list[dict[str, object]]) -> Path:
    (folder / "job.yaml").write_text(to_yaml(load_job(EXAMPLES / "quickstart.yaml")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text(json.dumps({"event": "first dispatch", "at": 1000.0}) + "\n")
    (folder / "lives.json").write_bytes(msgspec.json.encode({"rollout-0-a": life("rollout", busy=0.9)}))
    (folder / "rewards.json").write_text('{"scored": 10, "failed": {"raised": 10}, "first_failure": "ValueError: no"}')
    return folder


def names(folder: Path) -> list[str]:
    return [finding.name for finding in examine(read(str(folder)))]


def test_a_killed_run_is_read_from_its_files(tmp_path: Path) -> None:
    assert names(written(tmp_path, lines=steps(wait=0.9))) == ["rewards-fail", "trainer-starved"]


def test_a_step_that_was_made_again_replaces_those_after_it(tmp_path: Path) -> None:
    again = [line | {"attempt": 1, "skipped": 0.0} for line in steps()[3:]]
    lines = [line | {"skipped": 1.0} for line in steps()[3:]]
    assert "skipped-steps" not in names(written(tmp_path, lines=[*lines, *again]))


def test_a_long_run_costs_no_more_work_for_each_line_nor_for_its_last_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(count: int) -> tuple[float, int]:
        spans = [Span(kind="idle", waits="claim", begin=at, end=at + 1) for at in range(count)]
        tracks = [Track(role="rollout", index=0, attempt=0, main=spans)]
        monkeypatch.setattr(reading, "read_timeline", lambda _: Timeline(tracks=tracks, begin=0, end=count))
        lines = [{"step": step} for step in range(count)]
        assert spent_of(tmp_path, last_s=30)["rollout-0"].seconds == 30
        return bytecodes(lambda: surviving(lines)) / count, bytecodes(lambda: spent_of(tmp_path, last_s=30))

    (line, recent), (later_line, later_recent) = work(100), work(400)
    assert later_line < 1.1 * line
    assert later_recent < 1.1 * recent


def test_files_that_are_torn_or_missing_cost_their_figures_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, lines=steps(wait=0.9))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"at": 3, "other": 1}\nnonsense\n{"at": 2000, "step": 13, "att')
    (tmp_path / "rewards.json").unlink()
    (tmp_path / "lives.json").write_text("{")
    assert len(read(str(tmp_path)).steps) == 12
    damaged, unreadable = caplog.messages
    assert damaged == f"{tmp_path}/metrics.jsonl: 1 of 14 lines are damaged and are skipped"
    assert unreadable.startswith(f"{tmp_path}/lives.json cannot be read")
    assert names(tmp_path) == []


def test_a_folder_without_a_run_and_what_is_neither_are_refused(tmp_path: Path) -> None:
    for target, words in (
        (str(tmp_path), "there is no run"),
        (str(tmp_path / "nowhere"), "there is no such folder"),
        ("tcp://127.0.0.1:5571", "this is not the address of a driver's HTTP"),
        ("127.0.0.1:99999", "this is not the address of a driver's HTTP"),
        ("[::1:9571", "this is not the address of a driver's HTTP"),
        ("me@127.0.0.1:9571", "this is not the address of a driver's HTTP"),
        ("two words:9571", "no driver of a job answers there"),
        ("no..name:9571", "no driver of a job answers there"),
    ):
        with pytest.raises(ManifestError, match=words):
            read(target)
    assert address_of("127.0.0.1:9571") == address_of("http://127.0.0.1:9571") == "http://127.0.0.1:9571"
    assert address_of("[::1]:9571") == "http://[::1]:9571"


def test_nobody_at_the_address_is_one_clear_error() -> None:
    with pytest.raises(ManifestError, match=r"no driver of a job answers there.*port-forward"):
        read("127.0.0.1:1")


def test_what_a_driver_tells_of_the_manifest_has_no_free_settings_and_is_a_manifest_still() -> None:
    secret = [
        "reward.config={token: hush}",
        "rollout.template={env: [{name: KEY, value: hush}]}",
        "rollout.engine.options={key: hush}",
    ]
    told = evidence_of(
        load_job(EXAMPLES / "quickstart.yaml", secret),
        steps=[{"at": float(number)} for number in range(MOST_LINES + 5)],
        events=[],
        lives={},
        rewards={"scored": 1},
    )
    answer = msgspec.json.decode(msgspec.json.encode(told), type=EvidenceReply)
    assert "hush" not in json.dumps(told)
    assert len(answer.steps) == MOST_LINES
    assert answer.steps[-1] == {"at": MOST_LINES + 4.0}
    assert answer.job["spec"]["schedule"]["maxStaleness"] == 1
