"""Pictures of a timeline: the trace, and the command that writes it and the chart."""

import json
import os
from itertools import pairwise
from pathlib import Path

from asyncflow import cli
from asyncflow.telemetry.spans import Spans
from asyncflow.timeline.causes import attribute
from asyncflow.timeline.perfetto import trace
from asyncflow.timeline.tracks import Mark, Span, Timeline, Track


def timeline() -> Timeline:
    def track(role: str, *main: Span, background: tuple[Span, ...] = (), attempt: int = 0) -> Track:
        return Track(role=role, index=0, attempt=attempt, main=main, background=background)

    made = Timeline(
        tracks=[
            track("storage", Span(kind="idle", waits="calls", begin=1000, end=1010)),
            track(
                "rollout",
                Span(kind="generate", begin=1001, end=1005, step=1, version=0),
                Span(kind="idle", waits="lost", begin=1005, end=1007),
                background=(
                    Span(kind="reward", begin=1002, end=1004),
                    Span(kind="receive", begin=1003, end=1004.5, version=1),
                ),
            ),
            track("rollout", Span(kind="generate", begin=1007, end=1010, step=2, version=1), attempt=1),
            track(
                "trainer",
                Span(kind="idle", waits="claim", begin=1000, end=1006, step=1),
                Span(kind="compute", begin=1006, end=1010, step=1, version=0),
            ),
        ],
        marks=[Mark(at=1005, what="killed", of="rollout-0"), Mark(at=1009, what="evaluation", of="step 1")],
        begin=1000,
        end=1010,
    )
    return attribute(made)


def test_events_of_the_trace_follow_one_another_on_their_threads():
    events = json.loads(json.dumps(trace(timeline())))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    for place in {(event["pid"], event["tid"]) for event in spans}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == place)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {"trainer-0", "rollout-0", "rollout-0: reward", "rollout-0: receive", "storage-0"}
    (lost,) = [event for event in spans if event["args"].get("waits") == "lost"]
    assert (lost["ts"], lost["dur"], lost["cat"]) == (5e6, 2e6, "idle")
    assert [event["name"] for event in events if event["ph"] == "i"] == ["killed rollout-0", "evaluation step 1"]


def test_the_command_prints_shares_and_writes_both_files(tmp_path: Path, capsys):
    for role, kinds in (("trainer", ["idle", "compute"]), ("rollout", ["generate"])):
        now = [100.0]
        spans = Spans(tmp_path / "spans" / f"{role}-0-0.spans", role=role, now=lambda now=now: now[0])
        for kind in kinds:
            spans.enter(kind, waits="claim" if kind == "idle" else "", step=1)
            now[0] += 10 / len(kinds)
        spans.close()
    assert cli.invoke(["timeline", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["trainer-0"]["by"] == {"starved": {"rollout-0": 5.0}}
    assert not (tmp_path / "timeline.html").exists()
    assert cli.invoke(["timeline", str(tmp_path), "--output", str(tmp_path / "out"), "--training"]) == 0
    said = capsys.readouterr().out
    assert "starved (rollout-0) 50.0 %" in said
    assert json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    assert '"title":"' in (tmp_path / "out" / "timeline.html").read_text()
    (copy := tmp_path / os.fsdecode(b"not UTF-8 \xff")).mkdir()
    (tmp_path / "spans").rename(copy / "spans")
    assert cli.invoke(["timeline", str(copy), "--output", str(tmp_path / "out")]) == 0
    assert '"title":"not UTF-8 \N{REPLACEMENT CHARACTER}: ' in (tmp_path / "out" / "timeline.html").read_text()
    assert cli.invoke(["timeline", str(tmp_path / "out")]) == cli.USAGE
    assert "no spans were recorded there" in capsys.readouterr().err
