"""The judge of the fault test: what took too long, from diaries as the clients write them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "queue"))
from fault_outcomes import WITHIN_S, Fault, judge, too_late


def claimed(folder: Path, *times: float) -> None:
    lines = [{"t": at, "did": "claimed", "rows": [1], "ids": [1], "tries": [0]} for at in times]
    (folder / "rollout0-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def controller(action: str, at: float, seconds: float = 0.0) -> Fault:
    return Fault(kind="controller", action=action, member="controller", attempt=0, at=at, seconds=seconds)


@pytest.mark.parametrize(("took", "problems"), [(WITHIN_S - 1, 0), (WITHIN_S + 1, 1)])
def test_a_fault_that_came_alone_must_be_got_over_in_time(tmp_path: Path, took: float, problems: int) -> None:
    claimed(tmp_path, 99.0, 100.0 + took)
    outcomes = judge([controller("kill", 100.0)], tmp_path)
    assert outcomes[0].seconds == took
    assert len(too_late(outcomes)) == problems


def test_a_process_that_was_stopped_has_its_time_from_when_it_goes_on(tmp_path: Path) -> None:
    claimed(tmp_path, 100.0 + 2 * WITHIN_S)
    assert too_late(judge([controller("stop", 100.0, seconds=1.5 * WITHIN_S)], tmp_path)) == []
    (late,) = too_late(judge([controller("stop", 100.0, seconds=0.5 * WITHIN_S)], tmp_path))
    assert late.startswith("controller stop: rows are claimed again only after")


def test_faults_that_come_together_add_up(tmp_path: Path) -> None:
    claimed(tmp_path, 101.0 + WITHIN_S)
    assert too_late(judge([controller("kill", 100.0), controller("stop", 105.0, seconds=3.0)], tmp_path)) == []
