"""Pictures of a timeline: the page and its data, the trace, and the command that writes them."""

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from asyncflow import cli
from asyncflow.telemetry.spans import Spans
from asyncflow.timeline.causes import attribute
from asyncflow.timeline.gantt import drawing, page, script
from asyncflow.timeline.perfetto import trace
from asyncflow.timeline.tracks import Mark, Span, Timeline, Track


def timeline() -> Timeline:
    def track(role: str, *main: Span, beside: tuple[Span, ...] = (), attempt: int = 0) -> Track:
        return Track(role=role, index=0, attempt=attempt, main=main, beside=beside)

    made = Timeline(
        tracks=[
            track("storage", Span(kind="idle", waits="calls", begin=1000, end=1010)),
            track(
                "rollout",
                Span(kind="generate", begin=1001, end=1005, step=1, version=0),
                Span(kind="idle", waits="lost", begin=1005, end=1007),
                beside=(
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


def test_the_data_of_the_chart_is_what_its_shape_says():
    data = json.loads(json.dumps(drawing(timeline())))
    assert (data["zero"], data["begin"], data["end"]) == (1000, 0, 10)
    assert [row["name"] for row in data["rows"]] == ["trainer-0", "rollout-0", "storage-0"]
    main = data["rows"][1]["main"]
    spans = [main[at : at + 6] for at in range(0, len(main), 6)]
    assert [(begin * data["unit"], end * data["unit"]) for begin, end, *_ in spans] == [(1, 5), (5, 7), (7, 10)]
    assert [(data["kinds"][kind], step, version) for _, _, kind, step, version, _ in spans] == [
        ("generate", 1, 0),
        ("idle", -1, -1),
        ("generate", 2, 1),
    ]
    assert data["whys"][spans[1][5]] == ["lost", "", "lost"]
    assert len(data["rows"][1]["beside"]) == 12
    assert data["marks"][0] == {"at": 5, "what": "killed", "of": "rollout-0"}
    trainer = data["shares"][0]
    assert (trainer["name"], trainer["seconds"], trainer["kinds"]) == ("trainer-0", 10, {"compute": 4})
    assert sum(sum(by.values()) for by in trainer["idle"].values()) == 6


def test_the_page_needs_nothing_else_and_is_escaped():
    made = page(timeline(), title="<b>a run</b></script>")
    assert "<b>a run" not in made
    assert made.count("</script>") == 1
    assert not re.search(r"\b(src|href|import|fetch|XMLHttpRequest|url)\s*[=(]", made)
    assert "http" not in made
    assert script() in made


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium")
def test_a_browser_draws_the_page(tmp_path):
    (tmp_path / "page.html").write_text(page(timeline(), title="a run"))
    check = "<script>document.title = [view.words(600, 70), view.range.length].join(';')</script>"
    with (tmp_path / "page.html").open("a") as file:
        file.write(check)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    address = (tmp_path / "page.html").as_uri()
    shown = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True)
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", shown.stdout)
    assert cells[:2] == ["process", "seconds"]
    assert cells[cells.index("trainer-0") + 1] == "10.0"
    assert "40.0 %" in cells
    assert "idle: lost" in shown.stdout
    (title,) = re.findall(r"<title>([^<]*)</title>", shown.stdout)
    assert re.match(r"rollout-0: (generate, step \d|idle: lost)", title)
    assert title.endswith(";2")


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
    assert "drawTimeline" in (tmp_path / "out" / "timeline.html").read_text()
    assert cli.invoke(["timeline", str(tmp_path / "out")]) == cli.USAGE
    assert "no spans were recorded there" in capsys.readouterr().err
