"""Tests of what to fetch next, from whom, how much at once and how long to wait."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.versions import next_version
from asyncflow.identity import Version
from asyncflow.weights.host_transport import Pace
from asyncflow.weights.messages import CatalogueView, VersionView, newest_step
from asyncflow.weights.transfer import preference


def view(*available: tuple[int, int], required=()) -> CatalogueView:
    versions = tuple(
        VersionView(version=Version(*v).packed, digest="d", available=True, nbytes=1) for v in sorted(available)
    )
    return CatalogueView(required=tuple(required), releasable=(), versions=versions)


def choose(known, *, held=(), unfinished=None, asked=(), wanted=None) -> Version | None:
    held = {Version(*version) for version in held}
    return next_version(known, held=held, unfinished=unfinished and Version(*unfinished), asked=asked, wanted=wanted)


def test_the_wanted_step_is_fetched_in_its_newest_attempt_unless_held():
    known = view((0, 4), (1, 4), (0, 5))
    assert choose(known, wanted=4) == Version(1, 4)
    assert choose(known, wanted=4, held=[(0, 4)]) == Version(1, 4)
    assert choose(known, wanted=4, held=[(1, 4)]) is None
    assert choose(known, wanted=6) is None
    assert choose(known, wanted=None) is None
    assert choose(view(), wanted=newest_step(view())) is None


def test_somebody_who_waits_comes_first_and_any_attempt_serves_him():
    known = view((0, 2), (0, 5))
    assert choose(known, wanted=5, asked=[2]) == Version(0, 2)
    assert choose(known, wanted=5, asked=[2], unfinished=(0, 5)) == Version(0, 2)
    assert choose(known, wanted=5, asked=[3]) == Version(0, 5)
    assert choose(view((1, 2), (1, 5)), wanted=5, asked=[2], held=[(0, 2)]) == Version(1, 5)


def test_a_newer_version_replaces_an_unfinished_one_that_no_step_requires():
    assert choose(view((0, 4), (0, 5)), wanted=5, unfinished=(0, 4)) == Version(0, 5)
    assert choose(view((0, 4), (0, 5), required=[4]), wanted=5, unfinished=(0, 4)) == Version(0, 4)
    assert choose(view((0, 5), required=[4]), wanted=5, unfinished=(0, 4)) == Version(0, 5)
    assert choose(view((0, 4), (1, 4), (1, 5), required=[4]), wanted=5, unfinished=(0, 4)) == Version(1, 5)


def test_a_version_older_than_what_is_held_is_fetched_only_if_needed():
    assert choose(view((0, 4)), wanted=4, held=[(0, 5)]) is None
    assert choose(view((0, 4), required=[4]), wanted=4, held=[(0, 5)]) == Version(0, 4)
    assert choose(view((0, 4)), asked=[4], held=[(0, 5)]) == Version(0, 4)
    assert choose(view((1, 3)), wanted=3, held=[(0, 5)]) == Version(1, 3)


def test_receivers_spread_over_holders_and_avoid_those_that_failed():
    workers = [f"holder-{index}" for index in range(4)]
    firsts = Counter(
        preference(workers, version=Version(0, 1), receiver=f"r{index}", faults={})[0] for index in range(400)
    )
    assert set(firsts) == set(workers)
    assert min(firsts.values()) > 60
    order = preference(workers, version=Version(0, 1), receiver="r", faults={"holder-0": 2, "holder-2": 1})
    assert order[2:] == ["holder-2", "holder-0"]


@given(st.floats(100.0, 1e9), st.integers(1, 8))
def test_patience_outlasts_any_steady_link(rate, window):
    pace, now = Pace(most=1 << 20, window=window, patience_s=5.0, now=0.0), 0.0
    for _ in range(50):
        chunk = pace.chunk
        now += chunk / rate
        pace.arrived(chunk, sent=chunk, now=now)
        assert pace.chunk <= 1 << 20
        assert pace.patience >= max(5.0, 2 * window * pace.chunk / rate)


def test_chunks_grow_with_the_rate_and_shrink_when_the_link_slows_down():
    pace = Pace(most=1 << 20, window=4, patience_s=5.0, now=0.0)
    assert pace.chunk < 1 << 18
    for tick in range(20):
        pace.arrived(pace.chunk, sent=pace.chunk, now=tick * 0.001)
    assert pace.chunk == 1 << 20
    for tick in range(60):
        pace.arrived(pace.chunk, sent=pace.chunk, now=1.0 + tick * 10.0)
    assert pace.chunk < 1 << 18


@given(st.floats(1e3, 1e9), st.sampled_from([0.0, 0.01, 0.125, 1.0]))
def test_a_chunk_that_travels_whole_is_waited_for_after_many_that_did_not(rate, share):
    pace, now = Pace(most=1 << 20, window=4, patience_s=0.0, now=0.0), 0.0
    for _ in range(40):
        sent = int(share * pace.chunk)
        now += max(sent / rate, pace.chunk / rate / 8)
        pace.arrived(pace.chunk, sent=sent, now=now)
    assert pace.patience >= 0.99 * 4 * pace.chunk / rate
