"""The timeline as the page draws it: no second is lost by joining, cutting, or by keeping causes that are settled."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from track_flaws import flaw_of

from asyncflow.timeline.causes import attribute, shares
from asyncflow.timeline.tracks import KINDS, Kind, Span, Timeline, Track
from asyncflow.view.page import spans as module
from asyncflow.view.page.spans import Timelines, attributed, role_shares, shown

WAITS = ("claim", "weights", "reward")


@st.composite
def tracks(draw: st.DrawFn, role: str, index: int) -> Track:
    lengths = draw(st.lists(st.floats(0.001, 20.0), min_size=1, max_size=30))
    times = list(accumulate(lengths, initial=draw(st.floats(1000.0, 1030.0))))
    kinds: list[Kind] = [draw(st.sampled_from(KINDS)) for _ in lengths]
    main = [
        Span(kind=kind, begin=begin, end=end, version=place % 3, waits=WAITS[place % 3] if kind == "idle" else "")
        for place, (kind, (begin, end)) in enumerate(zip(kinds, pairwise(times), strict=True))
    ]
    background = [Span(kind="receive", begin=begin, end=begin + 1.0) for begin in times[::4]]
    return Track(role=role, index=index, attempt=0, main=main, background=background)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    found = [draw(tracks(role, index)) for role, index in (("trainer", 0), ("rollout", 0), ("rollout", 1))]
    return Timeline(tracks=found, begin=1000.0, end=max(track.end for track in found))


@settings(max_examples=25)
@given(timelines(), st.floats(0.0, 50.0), st.floats(0.01, 400.0), st.floats(0.001, 30.0))
def test_what_is_joined_and_cut_sums_to_the_life_in_the_window(
    timeline: Timeline, after: float, length: float, width: float
) -> None:
    low, high = timeline.begin + after, min(timeline.begin + after + length, timeline.end)
    found = shown(timeline, begin=low, end=high, width=width)
    by_name = {(track["role"], track["index"]): track for track in found["tracks"]}
    for track in timeline.tracks:
        life = min(track.end, high) - max(track.begin, low)
        if life <= 0:
            assert (track.role, track.index) not in by_name
            continue
        main = by_name[track.role, track.index]["main"]
        assert sum(main["d"]) == pytest.approx(life, abs=1e-3 * (1 + len(main["d"])))
        ends = [begin + length for begin, length in zip(main["t"], main["d"], strict=True)]
        assert all(abs(begin - end) < 1e-3 for begin, end in zip(main["t"][1:], ends, strict=False))
        assert len(main["t"]) <= 2 * life / found["width"] + 3
        assert all(spans >= 1 for spans in main["n"])


@settings(max_examples=25)
@given(timelines(), st.floats(0.0, 100.0))
def test_causes_that_are_kept_break_no_track(timeline: Timeline, late: float) -> None:
    earlier = Timeline(
        tracks=[_until(track, timeline.end - late) for track in timeline.tracks if track.begin < timeline.end - late],
        begin=timeline.begin,
        end=timeline.end - late,
    )
    with_causes = attributed(timeline, known=attribute(earlier) if earlier.tracks else None)
    for track, was in zip(with_causes.tracks, timeline.tracks, strict=True):
        assert flaw_of(track) == ""
        assert (track.begin, track.end) == (was.begin, was.end)
        assert [(span.kind, span.end) for span in track.main if span.kind != "idle"] == [
            (span.kind, span.end) for span in was.main if span.kind != "idle"
        ]
        assert all(bool(span.cause) == (span.kind == "idle") for span in track.main)


@settings(max_examples=25)
@given(timelines(), st.floats(0.0, 100.0))
def test_the_causes_of_the_last_seconds_need_only_the_spans_of_these_seconds(timeline: Timeline, late: float) -> None:
    begin = timeline.end - late
    recent, whole = (shares(attribute(each), begin=begin) for each in (timeline.since(begin), timeline))
    assert recent.keys() == whole.keys()
    for name, process in recent.items():
        assert process.idle == pytest.approx(whole[name].idle)
        assert process.kinds == pytest.approx(whole[name].kinds)


@settings(max_examples=25)
@given(timelines())
def test_shares_of_roles_sum_to_the_lives_of_their_processes(timeline: Timeline) -> None:
    found = role_shares(attribute(timeline))
    for role in ("trainer", "rollout"):
        lives = sum(track.end - track.begin for track in timeline.tracks if track.role == role)
        assert sum(part[3] for part in found[role]) == pytest.approx(lives, abs=0.05)


def test_causes_come_with_the_second_answer_and_are_kept_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reads = [0.0], []
    main = [Span(kind="generate", begin=0.0, end=9.0), Span(kind="idle", waits="claim", begin=9.0, end=10.0)]
    timeline = Timeline(tracks=[Track(role="rollout", index=0, attempt=0, main=main)], begin=0.0, end=10.0)
    used = iter(range(100))
    monkeypatch.setattr(module, "read_timeline", lambda folder: reads.append(folder) or timeline)
    monkeypatch.setattr(module.time, "thread_time", lambda: float(next(used)))
    known = Timelines(tmp_path, clock=lambda: now[0])
    for at, count, causes in ((0.0, 1, False), (0.0, 2, True), (19.0, 2, True), (20.0, 3, True)):
        now[0] = at
        found = known.shown()
        assert found["tracks"][0]["main"]["d"] == [9.0, 1.0]
        assert (len(reads), found["explained"], bool(found["shares"])) == (count, causes, causes)


def test_a_folder_without_spans_has_an_empty_timeline(tmp_path: Path) -> None:
    found = Timelines(tmp_path).shown()
    assert (found["tracks"], found["shares"]) == ([], {})


def _until(track: Track, end: float) -> Track:
    main = [
        Span(kind=s.kind, begin=s.begin, end=min(s.end, end), version=s.version, waits=s.waits)
        for s in track.main
        if s.begin < end
    ]
    return Track(role=track.role, index=track.index, attempt=0, main=main, background=track.background)
