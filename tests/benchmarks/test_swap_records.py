"""Tests of what the benchmark of the delayed update reads out of logs, from lines as the roles write them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from asyncflow.identity import Version
from asyncflow.rollout.worker import SwapInterval
from asyncflow.telemetry.logs import LineFormatter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from swap_records import changes, published, worker_of


def line(at, words, *args):
    record = logging.LogRecord("asyncflow.rollout.worker", logging.INFO, "", 0, words, args, None)
    record.created, record.msecs = 1000.0 + at, at % 1 * 1000
    return LineFormatter("rollout-0").format(record) + "\n"


def pulled(at, step, seconds):
    return line(at, "weights: %s: %d bytes in %.2f s", Version(0, step), 64, seconds)


def swapped(at, step, wall_s, stall_s, idle_s):
    return line(at, "swapped to %s in %.3f s; %s", Version(0, step), 0.01, SwapInterval(wall_s, stall_s, idle_s))


def test_a_stall_belongs_to_the_version_that_it_ended_with():
    log = line(0.5, "attempt %d, worker %s, pid %d", 0, "rollout-0-ab", 7) + pulled(1, 0, 1.0) + swapped(1, 0, 1, 0, 1)
    log += pulled(6.5, 1, 5.0) + swapped(10, 1, 9, 0.25, 0.5) + "--- the supervisor's line\n" + pulled(16, 2, 5.25)
    log += swapped(19, 2, 9, 0, 0)
    first, second = changes(log)
    assert (first.version, first.transfer_s, first.stall_s, first.idle_s) == (1, 5.0, 0.25, 0.5)
    assert first.staged == pytest.approx(1006.5)
    assert (second.version, second.transfer_s, second.since_s, second.stall_s) == (2, 5.25, 9, 0)
    assert worker_of(log) == "rollout-0-ab"


def test_going_back_for_rows_counts_to_the_next_new_version():
    log = pulled(1, 0, 1) + swapped(1, 0, 1, 0, 1) + pulled(6, 1, 5) + swapped(10, 1, 9, 0.25, 0.25)
    log += swapped(11, 0, 1, 0.5, 0.5) + swapped(12, 1, 1, 0.5, 0.5) + pulled(16, 2, 5) + swapped(20, 2, 8, 0.25, 0.25)
    assert [(change.version, change.since_s, change.stall_s) for change in changes(log)] == [
        (1, 9, 0.25),
        (2, 10, 1.25),
    ]


def test_a_version_is_published_when_it_was_first():
    words = "weights %s: part %d of %d published"
    log = (
        line(1, words, Version(0, 1), 1, 1) + line(2, words, Version(1, 1), 1, 1) + line(3, words, Version(0, 2), 1, 1)
    )
    assert published(log) == {1: 1001.0, 2: 1003.0}
