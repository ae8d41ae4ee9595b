"""The recorder of spans and its file: what a process did is read back, whatever became of it."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from track_flaws import flaw_of

from asyncflow import clock
from asyncflow.errors import ManifestError
from asyncflow.telemetry.span_file import Recording, read_recording
from asyncflow.telemetry.spans import NO_SPANS, Spans, read_timeline
from asyncflow.timeline.tracks import KINDS, WAITS

_RING = 4096
_RECORD = 40
ENTRIES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(WAITS), st.integers(-1, 2**31 - 1), st.floats(0.001, 100)),
    min_size=1,
    max_size=60,
)


class Ticks:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def played(path: Path, entries, *, records: int = 1 << 10, ticks: Ticks | None = None) -> Spans:
    ticks = ticks or Ticks()
    spans = Spans(path, role="rollout", index=3, attempt=2, most_bytes=_RING + records * _RECORD, now=ticks)
    for kind, waits, step, seconds in entries:
        spans.enter(kind, waits=waits if kind == "idle" else "", step=step)
        ticks.now += seconds
    return spans


@given(entries=ENTRIES, records=st.integers(3, 80), closes=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_was_recorded_is_read_back_and_sums_to_the_life(tmp_path_factory, entries, records, closes):
    path, ticks = tmp_path_factory.mktemp("spans") / "a.spans", Ticks()
    spans = played(path, entries, records=records, ticks=ticks)
    (spans.close if closes else spans.pulse)()
    read = read_recording(path)
    assert read is not None
    assert path.stat().st_size <= _RING + records * _RECORD
    assert not flaw_of(read.track)
    assert (read.track.name, read.track.attempt) == ("rollout-3", 2)
    assert (read.ended, read.track.killed) == (closes, not closes)
    assert read.seen == read.track.end == ticks.now
    life = sum(seconds for *_, seconds in entries)
    kinds = {name: spent for name, spent in read.seconds.items() if not name.startswith("idle: ")}
    running = 0.0 if closes else read.track.main[-1].seconds
    assert sum(kinds.values()) == pytest.approx(life - running, abs=1e-4), "exact, whatever the ring has let go of"
    idle = sum(spent for name, spent in read.seconds.items() if name.startswith("idle: "))
    assert idle == pytest.approx(kinds.get("idle", 0.0), abs=1e-4)
    assert read.wrapped == (read.track.begin > 1e9)
    kind, waits, step, seconds = entries[-1]
    last = read.track.main[-1]
    assert (last.kind, last.step) == (kind, step)
    assert last.waits == (waits if kind == "idle" else "")
    assert last.seconds >= seconds - 1e-4


@given(entries=ENTRIES, where=st.integers(0, 1 << 20), what=st.binary(min_size=1, max_size=100))
@settings(max_examples=60, deadline=None)
def test_a_torn_file_costs_what_was_torn_and_no_more(tmp_path_factory, entries, where, what):
    path = tmp_path_factory.mktemp("spans") / "a.spans"
    spans = played(path, entries)
    spans.pulse()
    before = read_recording(path)
    at = _RING + where % max(1, path.stat().st_size - _RING)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(what[: max(1, path.stat().st_size - at)])
    read = read_recording(path)
    assert before is not None
    assert read is not None
    assert not flaw_of(read.track)
    assert read.seconds == before.seconds
    assert read.track.end == before.track.end
    known = {(span.kind, span.begin, span.end) for span in before.track.main}
    new = [span for span in read.track.main if (span.kind, span.begin, span.end) not in known]
    assert all(span.waits == "lost" for span in new)


def test_one_state_of_two_is_always_whole(tmp_path):
    path, ticks = tmp_path / "a.spans", Ticks()
    spans, told = played(path, [("generate", "", 1, 2.0), ("idle", "claim", 2, 1.0)], ticks=ticks), []
    for _ in range(2):
        ticks.now += 1
        spans.pulse()
        told.append(read_recording(path))
    whole = path.read_bytes()

    def torn(*places: int) -> Recording | None:
        data = bytearray(whole)
        for at in places:
            data[at] ^= 1
        damaged = tmp_path / "torn.spans"
        damaged.write_bytes(data)
        return read_recording(damaged)

    found = [torn(at) for at in (2048, 3072)]
    assert sorted(found, key=lambda read: read.seen) == told
    assert [torn(at + 100) for at in (2048, 3072)] == found
    assert torn(2048, 3072) is None
    assert torn(20) is None
    (tmp_path / "b.spans").write_bytes(b"no such file")
    assert read_recording(tmp_path / "b.spans") is None


def test_what_runs_beside_is_one_span_of_a_kind_and_is_there_after_a_kill(tmp_path):
    path, ticks = tmp_path / "a.spans", Ticks()
    spans = played(path, [("generate", "", 4, 1.0)], ticks=ticks)
    with spans.background("reward", step=4):
        ticks.now += 1
        with spans.background("reward", step=5):
            ticks.now += 2
        ticks.now += 3
    spans.note("receive", begin=ticks.now - 4, end=ticks.now - 3, version=7)
    with spans.background("checkpoint"):
        ticks.now += 5
        spans.pulse()
        read = read_recording(path)
    assert read is not None
    background = {
        span.kind: (span.begin - 1e9, span.end - 1e9, span.step, span.version) for span in read.track.background
    }
    assert background == {"reward": (1, 7, 4, -1), "receive": (3, 4, -1, 7), "checkpoint": (7, 12, -1, -1)}


def test_a_section_goes_on_afterwards_with_what_was_before(tmp_path):
    path, ticks = tmp_path / "a.spans", Ticks()
    spans = played(path, [("idle", "queue", 3, 1.0)], ticks=ticks)
    with spans.main("compute", step=4, version=3):
        ticks.now += 1
        spans.enter("forward")
        ticks.now += 1
    ticks.now += 1
    spans.close()
    spans.enter("generate")
    read = read_recording(path)
    assert read is not None
    assert [(span.kind, span.waits, span.step, span.version, span.seconds) for span in read.track.main] == [
        ("idle", "queue", 3, -1, 1.0),
        ("compute", "", 4, 3, 1.0),
        ("forward", "", 4, 3, 1.0),
        ("idle", "queue", 3, -1, 1.0),
    ]


def test_the_work_of_a_server_is_its_cpu_time(tmp_path):
    spans = Spans(tmp_path / "a.spans", role="controller")
    spans.serve(waits="calls")
    while not _computed(spans, tmp_path / "a.spans"):
        sum(range(100_000))
    read = read_recording(tmp_path / "a.spans")
    assert read is not None
    assert [span.kind for span in read.track.main if span.kind != "starting"][-2:] == ["compute", "idle"]
    assert read.seconds["compute"] >= 0.02


def _computed(spans: Spans, path: Path) -> bool:
    spans.pulse()
    read = read_recording(path)
    return read is not None and "compute" in read.seconds


def test_a_full_disk_makes_the_ring_smaller_and_a_failing_one_ends_it(tmp_path, monkeypatch, caplog):
    written = os.pwrite
    limit = _RING + 5 * _RECORD

    def pwrite(file, data, at):
        if at + len(data) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, data, at)

    ticks = Ticks()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        spans = played(tmp_path / "a.spans", [("generate", "", step, 1.0) for step in range(20)], ticks=ticks)
        spans.pulse()
        read = read_recording(tmp_path / "a.spans")
        assert read is not None
        assert [span.step for span in read.track.main] == [14, 15, 16, 17, 18, 19]
        assert read.seconds == {"generate": 19.0}
        assert not caplog.records

    def broken(_file, _data, _at):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        spans.enter("swap")
        spans.enter("generate")
        spans.close()
    assert len(caplog.records) == 1
    assert "recording of the timeline ends" in caplog.text
    Spans(tmp_path / "a.spans" / "below" / "b.spans").enter("generate")
    assert "no timeline is recorded" in caplog.text


def test_a_recorder_without_a_file_records_nothing():
    NO_SPANS.enter("generate")
    with NO_SPANS.main("swap"), NO_SPANS.background("fetch"):
        NO_SPANS.pulse()
    NO_SPANS.note("receive", begin=0, end=1)
    NO_SPANS.close()


_KILLED = """
import os, signal, sys
from pathlib import Path
from asyncflow.telemetry.spans import Spans
spans = Spans.of(Path(sys.argv[1]), role="rollout", index=0, attempt=0, began=float(sys.argv[2]))
spans.enter("generate", step=7, version=6)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_was_killed_leaves_what_it_did(tmp_path):
    began = clock.now()
    done = subprocess.run([sys.executable, "-c", _KILLED, tmp_path, str(began)], check=False)
    assert done.returncode == -signal.SIGKILL
    read = read_recording(tmp_path / "spans" / "rollout-0-0.spans")
    assert read is not None
    assert not read.ended
    assert [span.kind for span in read.track.main] == ["starting", "generate"]
    assert (read.track.main[-1].kind, read.track.main[-1].step, read.track.main[-1].version) == ("generate", 7, 6)
    life(tmp_path, "driver", 0, began, read.seen + 9)
    life(tmp_path, "rollout", 1, read.seen + 2, read.seen + 8)
    timeline = read_timeline(tmp_path)
    first, second = [track for track in timeline.tracks if track.role == "rollout"]
    assert first.killed
    assert (first.main[-1].waits, first.main[-1].end) == ("lost", second.begin)
    assert {(mark.what, mark.of) for mark in timeline.marks} >= {
        ("killed", "rollout-0"),
        ("started again", "rollout-0"),
    }


def life(
    folder: Path,
    role: str,
    attempt: int,
    begin: float,
    end: float,
    *,
    index: int = 0,
    closes: bool = True,
    waits: str = "",
):
    """Record a life; waits: why it was idle in its last second."""
    ticks = Ticks()
    ticks.now = end - 1 if waits else end
    spans = Spans(
        folder / "spans" / f"{role}-{index}-{attempt}.spans",
        role=role,
        index=index,
        attempt=attempt,
        began=begin,
        now=ticks,
    )
    spans.enter("idle" if waits else "generate", waits=waits)
    ticks.now = end
    (spans.close if closes else spans.pulse)()


def test_a_time_in_which_nothing_of_the_job_was_there_is_nobodys(tmp_path):
    life(tmp_path, "driver", 0, 100, 200)
    life(tmp_path, "rollout", 0, 110, 150, closes=False)
    life(tmp_path, "driver", 1, 1000, 1100)
    life(tmp_path, "rollout", 1, 1010, 1100)
    life(tmp_path, "rollout", 2, 1070, 1090, index=1)
    (tmp_path / "events.jsonl").write_text(
        '{"event":"driver started","at":100}\n{"event":"first dispatch","at":120}\n{"event":"Suspended","at":195}\n'
        '{"event":"driver started","at":1000}\n{"event":"evaluation","at":1050,"step":4}\nnot a line\n'
        '{"event":"Succeeded","at":1099}\n'
    )
    timeline = read_timeline(tmp_path)
    assert (timeline.begin, timeline.end) == (100, 1099)
    rollout = [track for track in timeline.tracks if track.name == "rollout-0"]
    assert [(span.kind, span.waits, span.begin, span.end) for track in rollout for span in track.main] == [
        ("idle", "start", 100, 110),
        ("starting", "", 110, 150),
        ("idle", "lost", 150, 200),
        ("idle", "start", 1000, 1010),
        ("starting", "", 1010, 1100),
    ]
    marks = [(mark.at, mark.what, mark.of) for mark in timeline.marks]
    assert (150, "killed", "rollout-0") in marks
    assert (1050, "evaluation", "step 4") in marks
    assert (1090, "left", "rollout-1") in marks
    assert marks == sorted(marks, key=lambda mark: mark[0])


@pytest.mark.parametrize("waits", ["end", "lost"])
def test_the_time_until_a_rollout_that_left_comes_again_is_nobodys_and_that_of_one_that_failed_is_lost(tmp_path, waits):
    life(tmp_path, "driver", 0, 100, 300)
    life(tmp_path, "rollout", 0, 100, 151, waits=waits)
    life(tmp_path, "rollout", 1, 200, 290)
    timeline = read_timeline(tmp_path)
    main = [span for track in timeline.tracks if track.name == "rollout-0" for span in track.main]
    gap = [(span.waits, span.begin, span.end) for span in main if 151 <= span.begin < 200]
    assert gap == ([] if waits == "end" else [("lost", 151, 200)])
    marks = {(mark.at, mark.what) for mark in timeline.marks if mark.of == "rollout-0"}
    assert marks == ({(151, "left"), (200, "joined")} if waits == "end" else {(200, "started again")}) | {(290, "left")}


def test_a_rollout_that_left_with_its_job_starts_with_it_and_one_that_comes_after_it_joins(tmp_path):
    life(tmp_path, "driver", 0, 100, 200)
    life(tmp_path, "driver", 1, 1000, 1100)
    for index, again in enumerate((1040, 1070)):
        life(tmp_path, "rollout", 0, 100, 190, index=index, waits="end")
        life(tmp_path, "rollout", 1, again, 1100, index=index)
    absent = {
        (track.name, span.waits, span.begin, span.end)
        for track in read_timeline(tmp_path).tracks
        for span in track.main
        if span.waits in ("start", "lost") and track.role == "rollout"
    }
    assert absent == {("rollout-0", "start", 1000, 1040)}


def test_a_folder_without_spans_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="no spans were recorded there"):
        read_timeline(tmp_path)
