"""Whatever numbers the driver's files hold when it starts, it says a status, writes a summary and ends no run."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_progress import AUDIT, step_line

from asyncflow import clock
from asyncflow.api.status import DriverStatus, RewardState
from asyncflow.api.versions import VersionsState
from asyncflow.driver import journal
from asyncflow.driver.ending import summarize
from asyncflow.driver.evaluation import EvaluationResult
from asyncflow.driver.groups import RewardTally, Totals
from asyncflow.driver.journal import StateFile
from asyncflow.driver.lives import Life, Lives
from asyncflow.driver.progress import RunProgress
from asyncflow.driver.status import build_status

STEPS = 16
MADE = 5
ODD = [
    *(math.nan, math.inf, -math.inf, 1e18, 1e308, -1e308, 5e-324, 1.5, -1.0),
    *(-1, 0, 1, MADE, 45, 2**53, 2**63, 10**30, 10**400),
    *(None, True, "", "x", "x" * 3000, [], {}, {"x" * 99: 1}, {str(kind): 1 for kind in range(40)}),
]


def sound() -> dict[str, Any]:
    """Return what the files of a run say after five steps and an evaluation, as JSON."""
    now = clock.now() - 60.0
    life = {"started": now, "seen": now + 50.0, "busy_seen": now + 50.0, "held_s": 5.0, "held_since": now, "tokens": 9}
    return {
        journal.METRICS: [
            step_line(step, at=now + 2 * step, skipped=0.0, logprob_gap_p99=0.1) for step in range(1, MADE + 1)
        ],
        journal.EVENTS: [
            {"event": "driver started", "at": now},
            {"event": "first dispatch", "at": now},
            {"event": "step made again", "at": now, "step": MADE},
            {"event": "evaluation", "at": now, "step": 0, "prompts": 8, "accuracy": 0.5, "greedy": 1.0, "reward": 0.5},
        ],
        journal.LIVES: {role: {"role": role, "busy_s": 1.0, **life} for role in ("rollout", "trainer")},
        journal.REWARDS: {
            "scored": 20,
            "failed": {"raised": 2},
            "first_failure": "raised: KeyError",
            "alike": {"right": 3, "wrong": 1},
        },
    }


def written(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        if name.endswith(".jsonl"):
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in value))
        else:
            (folder / name).write_text(json.dumps(value))


def started(folder: Path) -> tuple[RunProgress, DriverStatus, dict[str, Any]]:
    """Start what a driver starts with; return its lines, its status and its summary."""
    progress = RunProgress(folder, steps=STEPS, now=clock.now())
    done = progress.done >= progress.steps
    lives = Lives(opened=progress.at("first dispatch"), closed=progress.last_step_at if done else None)
    lives.restore(StateFile(folder / journal.LIVES).read(dict[str, Life]) or {})
    rewards = RewardTally(needed=4, keep=lambda _: None)
    rewards.restore(StateFile(folder / journal.REWARDS).read(Totals))
    status = build_status(
        progress,
        phase="Running",
        attempt=1,
        newest=None,
        versions=VersionsState(),
        fleets={},
        rollouts=(),
        stats=None,
        checkpoint=None,
        best=None,
        idle_share=lives.idle_shares(clock.now()),
        recent=None,
        desired_rollouts=None,
        rewards=rewards.state,
        tasks={},
        prompts_skipped=0,
        step_progress=None,
        waiting_for="",
        clock_ahead_s=-3600.0,
    )
    summary = summarize(
        progress,
        audit=AUDIT,
        phase="Succeeded",
        finished=clock.now(),
        lives=lives,
        rewards=rewards.state,
        devices=1,
        prompts_skipped=0,
        best=None,
        exports={},
    )
    return progress, status, summary


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_value_that_cannot_be_is_set_aside(data: st.DataObject) -> None:
    files = sound()
    name = data.draw(st.sampled_from(sorted(files)))
    value = files[name]
    line = (
        value
        if name == journal.REWARDS
        else value[data.draw(st.sampled_from(sorted(value)))]
        if isinstance(value, dict)
        else data.draw(st.sampled_from(value))
    )
    line[data.draw(st.sampled_from(sorted(line)))] = data.draw(st.sampled_from(ODD))
    with TemporaryDirectory() as place:
        folder = Path(place)
        written(folder, files)
        progress, status, summary = started(folder)
        json.dumps([json.loads(status.model_dump_json()), summary], allow_nan=False)
        assert progress.done <= STEPS
        assert all(0.0 <= share <= 1.0 for share in status.idle_share.values())
        progress.step(step_line(MADE + 1, attempt=1, at=clock.now()))
        assert progress.done == MADE + 1
        progress.close()


@pytest.mark.parametrize(
    "odd", [{"step": 45}, {"reward": math.nan}, {"wall_s": math.inf}, {"at": 1e18}, {"tokens": 2**60}, {"skipped": "x"}]
)
def test_a_step_that_cannot_be_costs_its_own_line(tmp_path: Path, odd: dict[str, Any]) -> None:
    files = sound()
    files[journal.METRICS][-1] |= odd
    written(tmp_path, files)
    progress, status, _ = started(tmp_path)
    assert status.step == progress.done == MADE - 1
    assert len((tmp_path / f"{journal.METRICS}{journal.ASIDE}").read_text().splitlines()) == 1


def test_an_evaluation_of_a_step_that_the_run_has_not_is_none(tmp_path: Path) -> None:
    files = sound()
    files[journal.EVENTS].append({**files[journal.EVENTS][-1], "step": STEPS + 1, "accuracy": 0.9})
    files[journal.EVENTS].append({**files[journal.EVENTS][-1], "step": 1, "accuracy": 9.0})
    written(tmp_path, files)
    progress, status, _ = started(tmp_path)
    assert list(progress.evaluations) == [0]
    assert (status.eval, status.eval_greedy) == (0.5, 1.0)
    assert isinstance(progress.evaluations[0], EvaluationResult)


def test_totals_that_cannot_be_are_counted_again(tmp_path: Path) -> None:
    for odd in ({"scored": -1}, {"failed": {"raised": -3}}, {"scored": 2**53}, {"alike": {"half": 1}}):
        files = sound()
        files[journal.REWARDS] |= odd
        written(tmp_path, files)
        _, status, _ = started(tmp_path)
        assert status.rewards == RewardState()
        assert (tmp_path / f"{journal.REWARDS}{journal.ASIDE}").exists()


def test_a_line_of_a_thousand_brackets_is_set_aside(tmp_path: Path) -> None:
    files = sound()
    written(tmp_path, files)
    with (tmp_path / journal.METRICS).open("a") as lines:
        lines.write("[" * 200_000 + "\n")
    progress, _, _ = started(tmp_path)
    assert progress.done == MADE
