"""Causes of idle seconds, on timelines made by hand and at random; and how seconds add up."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from track_flaws import flaw_of

from asyncflow.timeline.causes import attribute, shares
from asyncflow.timeline.tracks import KINDS, WAITS, Span, Timeline, Track


def track_of(
    name: str, *spans: tuple[object, ...], attempt: int = 0, background: tuple[tuple[object, ...], ...] = ()
) -> Track:
    """Return a track: ``ROLE-INDEX``, and its spans (kind or ``idle: WAITS``, begin, end[, step])."""
    role, _, index = name.rpartition("-")

    def made(what: str, begin: float, end: float, step: int = -1) -> Span:
        kind, _, waits = what.partition(": ")
        return Span(kind=kind, waits=waits, begin=begin, end=end, step=step)

    return Track(
        role=role,
        index=int(index),
        attempt=attempt,
        main=[made(*span) for span in spans],
        background=[made(*span) for span in background],
    )


def why(*tracks: Track, of: str) -> list[tuple[float, float, str, str]]:
    """Return the parts of the idle spans of a process: begin, end, cause, by."""
    timeline = Timeline(tracks=tracks, begin=0, end=100)
    found = attribute(timeline)
    assert [flaw_of(track) for track in found.tracks] == [""] * len(tracks)
    track = next(track for track in found.tracks if track.name == of)
    return [(span.begin, span.end, span.cause, span.by) for span in track.main if span.kind == "idle"]


def test_a_trainer_is_starved_then_waits_for_the_tail_then_for_rewards_then_for_the_bytes():
    found = why(
        track_of("trainer-0", ("idle: claim", 0, 40, 1), ("compute", 40, 50, 1), background=(("fetch", 38, 40),)),
        track_of("rollout-0", ("generate", 0, 30, 1), ("idle: reward", 30, 35), ("idle: claim", 35, 50)),
        track_of("rollout-1", ("generate", 0, 20, 1), ("idle: claim", 20, 50), background=(("reward", 19, 21),)),
        track_of("rollout-2", ("generate", 0, 10, 1), ("idle: claim", 10, 50)),
        of="trainer-0",
    )
    assert found == [
        (0, 20, "starved", "rollout"),
        (20, 30, "tail", "rollout-0"),
        (30, 35, "reward", ""),
        (35, 40, "data plane", ""),
    ]


def test_a_rollout_without_prompts_waits_for_the_others_last_ones_or_for_the_trainer():
    tracks = (
        track_of("trainer-0", ("idle: claim", 0, 20, 1), ("compute", 20, 50, 1), background=(("publish", 50, 55),)),
        track_of("rollout-0", ("generate", 0, 10, 1), ("idle: claim", 10, 60)),
        track_of("rollout-1", ("generate", 0, 20, 1), ("generate", 20, 30, 2), ("idle: claim", 30, 60)),
    )
    assert why(*tracks, track_of("driver-0", ("idle: admission", 0, 60)), of="rollout-0") == [
        (10, 20, "tail", "rollout-1"),
        (20, 50, "back-pressure", "trainer-0"),
        (50, 55, "sync", "trainer-0"),
        (55, 60, "data plane", ""),
    ], "from 20 on the trainer makes an older step than the one that is generated"
    found = why(*tracks, track_of("driver-0", ("idle: version", 0, 60)), of="rollout-0")
    assert found[1] == (20, 55, "sync", "trainer-0")
    last = why(*tracks, track_of("driver-0", ("idle: dispatched", 0, 60)), of="rollout-0")
    assert last[:2] == [(10, 30, "tail", "rollout-1"), (30, 50, "tail", "trainer-0")]
    assert why(*tracks, of="rollout-0")[1] == (20, 50, "back-pressure", "trainer-0"), "of a simulation without a driver"


@pytest.mark.parametrize(
    ("waits", "cause", "by"),
    [
        ("weights", "sync", "trainer-0"),
        ("permit", "sync", "rollout"),
        ("reward", "reward", ""),
        ("fetch", "data plane", ""),
        ("delivery", "data plane", ""),
        ("queue", "data plane", ""),
        ("lost", "lost", ""),
        ("start", "starting", ""),
        ("end", "data plane", ""),
    ],
)
def test_what_a_process_knows_itself_is_believed(waits, cause, by):
    found = why(
        track_of("rollout-0", (f"idle: {waits}", 0, 9)), track_of("trainer-0", ("compute", 0, 9, 1)), of="rollout-0"
    )
    assert found == [(0, 9, cause, by)]


def test_what_is_not_there_keeps_others_waiting():
    rollout = track_of("rollout-0", ("starting", 0, 5), ("swap", 5, 6), ("idle: claim", 6, 20))
    trainer = track_of("trainer-0", ("idle: claim", 0, 20, 1))
    assert why(rollout, trainer, of="trainer-0") == [
        (0, 5, "starting", "rollout-0"),
        (5, 6, "sync", "rollout"),
        (6, 20, "data plane", ""),
    ]
    due = track_of("driver-0", ("idle: admission", 0, 20), background=(("evaluation", 0, 20),))
    assert why(rollout, trainer, due, of="trainer-0")[::2] == [
        (0, 5, "starting", "rollout-0"),
        (6, 20, "evaluation", ""),
    ], "an evaluation that nobody can serve yet is not what it waits for"
    assert why(rollout, trainer, due, of="driver-0")[0] == (0, 5, "starting", "rollout-0")
    killed = track_of("rollout-0", ("generate", 0, 5, 1), ("idle: lost", 5, 20))
    assert why(killed, trainer, of="trainer-0") == [(0, 5, "starved", "rollout-0"), (5, 20, "lost", "rollout-0")]
    unit = track_of("storage-0", ("idle: calls", 0, 5), ("idle: lost", 5, 20))
    assert why(rollout, trainer, unit, of="trainer-0")[1:] == [(5, 20, "lost", "storage-0")]
    due = track_of("rollout-0", ("idle: start", 0, 5), ("idle: claim", 5, 20))
    assert why(due, trainer, of="trainer-0") == [(0, 5, "starting", "rollout-0"), (5, 20, "data plane", "")]
    gone = track_of("trainer-0", ("compute", 0, 5, 1), ("idle: lost", 5, 9), ("starting", 9, 20))
    assert why(gone, track_of("rollout-0", ("idle: claim", 0, 20)), of="rollout-0")[1:] == [
        (5, 9, "lost", "trainer-0"),
        (9, 20, "starting", "trainer-0"),
    ]


def test_evaluations_and_other_tasks_keep_the_trainer_waiting():
    assert why(
        track_of("trainer-0", ("idle: claim", 0, 30, 1), ("idle: end", 30, 40)),
        track_of(
            "rollout-0", ("evaluation", 0, 10), ("generate", 10, 15, 1), ("idle: claim", 15, 30), ("evaluation", 30, 35)
        ),
        track_of("reference-0", ("idle: claim", 0, 15), ("compute", 15, 30), ("idle: claim", 30, 40)),
        track_of("driver-0", ("idle: calls", 0, 40), background=(("evaluation", 28, 38),)),
        of="trainer-0",
    ) == [
        (0, 10, "evaluation", ""),
        (10, 15, "starved", "rollout-0"),
        (15, 30, "starved", "reference-0"),
        (30, 38, "evaluation", ""),
        (38, 40, "data plane", ""),
    ]
    assert why(
        track_of("trainer-0", ("compute", 0, 10, 1)),
        track_of("rollout-0", ("idle: claim", 0, 10)),
        track_of("reference-0", ("idle: claim", 0, 10)),
        of="reference-0",
    ) == [(0, 10, "back-pressure", "trainer-0")]


def test_a_rank_without_samples_is_not_held_back_by_another_one_that_trains():
    ranks = track_of("trainer-0", ("compute", 0, 10, 1)), track_of("trainer-1", ("idle: claim", 0, 10, 1))
    assert why(*ranks, track_of("rollout-0", ("idle: claim", 0, 10)), of="trainer-1") == [(0, 10, "data plane", "")]


@pytest.mark.parametrize(
    ("rollout", "cause"),
    [
        (track_of("rollout-0", ("idle: claim", 0, 10), background=(("receive", 0, 10),)), "sync"),
        (track_of("rollout-0", ("idle: weights", 0, 10)), "sync"),
        (track_of("rollout-0", ("idle: fetch", 0, 10), background=(("receive", 0, 10),)), "data plane"),
        (track_of("rollout-0", ("idle: delivery", 0, 10), background=(("receive", 0, 10),)), "data plane"),
    ],
)
def test_a_trainer_waits_for_bytes_of_samples_before_it_waits_for_those_of_weights(rollout, cause):
    (found,) = why(track_of("trainer-0", ("idle: claim", 0, 10, 1)), rollout, of="trainer-0")
    assert found[2] == cause
    (found,) = why(rollout, track_of("rollout-1", ("idle: claim", 0, 10)), of="rollout-1")
    assert found[2] == "sync", "a rollout without prompts makes no samples"


def test_who_serves_is_idle_while_others_work():
    assert why(
        track_of("controller-0", ("idle: calls", 0, 30)),
        track_of("trainer-0", ("starting", 0, 10), ("compute", 10, 20, 1), ("idle: lost", 20, 30)),
        of="controller-0",
    ) == [(0, 10, "starting", "trainer-0"), (10, 20, "starved", ""), (20, 30, "lost", "trainer-0")]


WORDS = st.one_of(
    st.sampled_from([kind for kind in KINDS if kind != "idle"]),
    st.sampled_from(WAITS).map(lambda waits: f"idle: {waits}"),
)


@st.composite
def timelines(draw):
    tracks = []
    for name in ("trainer-0", "rollout-0", "rollout-1", "driver-0", "storage-0", "task-x-0"):
        times = sorted(draw(st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True)))
        main = [(draw(WORDS), begin, end, draw(st.integers(-1, 3))) for begin, end in pairwise(times)]
        kinds = st.sampled_from(["fetch", "publish", "reward", "receive", "evaluation"])
        ends = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)
        background = tuple((draw(kinds), *draw(ends)) for _ in range(draw(st.integers(0, 2))))
        tracks.append(track_of(name, *main, background=background))
    return Timeline(tracks=tracks, begin=draw(st.integers(0, 10)), end=draw(st.integers(20, 40)))


@given(timeline=timelines())
@settings(max_examples=40, deadline=None)
def test_each_idle_second_has_one_cause_and_the_seconds_sum_to_the_time_in_the_window(timeline):
    found = attribute(timeline)
    for before, after in zip(timeline.tracks, found.tracks, strict=True):
        assert not flaw_of(after)
        assert (before.begin, before.end) == (after.begin, after.end)
        assert all(bool(span.cause) == (span.kind == "idle") for span in after.main)
        assert [span for span in after.main if span.kind != "idle"] == [s for s in before.main if s.kind != "idle"]
        for one, other in pairwise(after.main):
            same = one.kind == other.kind == "idle" and (one.waits, one.step) == (other.waits, other.step)
            whole = {span.end for span in before.main}
            assert not same or one.end in whole or (one.cause, one.by) != (other.cause, other.by)
    spent, middle = shares(found), (timeline.begin + timeline.end) / 2
    halves = shares(msgspec.structs.replace(found, end=middle)), shares(found, begin=middle)
    for track in timeline.tracks:
        lived = max(0, min(track.end, timeline.end) - max(track.begin, timeline.begin))
        share = spent.get(track.name)
        assert (share.seconds if share else 0) == pytest.approx(lived)
        parts = [half[track.name].seconds for half in halves if track.name in half]
        assert sum(parts) == pytest.approx(lived)
        if share:
            assert "idle" not in share.kinds
            assert all(share.idle)
            assert sum(share.kinds.values()) + sum(share.idle.values()) == pytest.approx(lived)
            assert {cause: sum(by.values()) for cause, by in share.by.items()} == pytest.approx(share.idle)
