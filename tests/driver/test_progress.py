"""Progress is what the files of lines say, also after the driver was killed in the middle of a line."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from count_work import bytecodes

from asyncflow.api.status import RewardState
from asyncflow.driver.ending import summarize
from asyncflow.driver.evaluation import EvaluationResult, SetResult
from asyncflow.driver.lives import Lives
from asyncflow.driver.progress import RunProgress
from asyncflow.errors import Fenced
from asyncflow.queue.protocol.messages import AuditReport

AUDIT = AuditReport(
    dispatched=8,
    trained=8,
    filtered=0,
    dropped=0,
    unfinished=0,
    lost=0,
    duplicated=0,
    last_committed_step=2,
    attempts=1,
    redeliveries=0,
    closed=True,
    problems=[],
)


def step_line(step: int, *, attempt: int = 0, at: float = 0.0, **fields: Any) -> dict[str, Any]:
    line = {
        "step": step,
        "attempt": attempt,
        "at": at,
        "reward": 0.5,
        "samples": 4,
        "tokens": 100,
        "response_tokens": 40,
        "staleness_start_max": 1,
        "staleness_start_mean": 1.0,
        "staleness_end_max": 1,
        "staleness_token_mean": 1.0,
        "logprob_gap_p99": None,
        "wall_s": 2.0,
        "wait_s": 0.5,
    }
    return line | fields


def test_a_restarted_driver_sees_the_same_figures(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=100.0)
    progress.note("first dispatch", at=101.0)
    for step in range(1, 5):
        progress.step(step_line(step, at=100.0 + 2 * step))
    progress.evaluated(EvaluationResult(step=0, prompts=8, accuracy=0.25, greedy=None), at=104.0)
    again = RunProgress(tmp_path, steps=10, now=500.0)
    assert again.started == 100.0
    assert again.done == 4
    assert again.lines == progress.lines
    assert again.evaluations == progress.evaluations
    assert again.tokens_per_second() == pytest.approx(50.0)
    assert again.eta_seconds() == pytest.approx(12.0)


EVALUATED = {"event": "evaluation", "at": 1.0, "prompts": 8, "accuracy": 0.5, "greedy": None}


@pytest.mark.parametrize(
    "bad",
    [
        *("{", "[]", '{"step":3}', '{"event":"evaluation","at":1.0,"step":2}', '{"at":1}'),
        pytest.param(json.dumps(step_line(11)), id="a step that the run has not"),
        pytest.param(json.dumps(EVALUATED | {"step": 11}), id="an evaluation of one"),
    ],
)
def test_a_line_that_says_nothing_costs_its_figures_alone(tmp_path: Path, bad: str) -> None:
    progress = RunProgress(tmp_path, steps=10, now=100.0)
    for step in range(1, 5):
        progress.step(step_line(step, at=100.0 + 2 * step))
    progress.evaluated(EvaluationResult(step=0, prompts=8, accuracy=0.25, greedy=None), at=104.0)
    progress.close()
    for name in ("metrics.jsonl", "events.jsonl"):
        first, rest = (tmp_path / name).read_text().split("\n", 1)
        (tmp_path / name).write_text(f"{first}\n{bad}\n{rest}")
    again = RunProgress(tmp_path, steps=10, now=500.0)
    assert (again.lines, again.evaluations) == (progress.lines, progress.evaluations)
    assert again.started == 100.0


def test_what_the_lines_lack_the_ledger_knows(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=0.0)
    for step in (1, 2):
        progress.step(step_line(step, at=float(step)))
    again = RunProgress(tmp_path, steps=10, now=10.0)
    again.catch_up(4, attempt=0)
    assert again.done == 4
    assert not again.step(step_line(5, at=11.0))
    assert again.done == 5
    behind = RunProgress(tmp_path, steps=10, now=20.0)
    behind.catch_up(2, attempt=1)
    assert behind.done == 5
    assert behind.step(step_line(3, attempt=1, at=21.0))
    assert behind.done == 3


def test_a_clock_that_is_set_back_changes_no_duration(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=10_000.0)
    for step in range(1, 5):
        progress.step(step_line(step, at=10_000.0 - 3600.0 * step))
    assert progress.step_seconds() == [2.0, 2.0, 2.0]
    assert (progress.eta_seconds(), progress.step_p95(), progress.tokens_per_second()) == (12.0, 2.0, 50.0)


def test_figures_are_those_of_the_last_ten_steps_and_a_pace_is_of_one_attempt(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=60, now=0.0)
    assert (progress.eta_seconds(), progress.step_p95(), progress.samples_needed()) == (None, None, None)
    assert (progress.tokens_per_second(), progress.wait_share(), progress.last_step_at) == (0.0, 0.0, None)
    for step in range(1, 41):
        progress.step(step_line(step, at=float(step), wall_s=float(step), wait_s=step / 4))
    recent = sum(range(31, 41))
    assert progress.eta_seconds() == pytest.approx(recent / 10 * 20)
    assert progress.tokens_per_second() == pytest.approx(1000 / recent)
    assert progress.wait_share() == pytest.approx(1 / 4)
    assert progress.samples_needed() == pytest.approx(40 / (recent * 3 / 4))
    assert progress.step_p95() == 39, "of 39 steps that followed another, the second slowest"
    assert progress.last_step_at == 40
    progress.step(step_line(41, attempt=1, wall_s=1000.0, wait_s=1000.0))
    assert progress.tokens_per_second() == pytest.approx(1000 / recent), "nothing is known of what it loaded"
    assert progress.wait_share() == pytest.approx((1000 + (recent - 31) / 4) / (1000 + recent - 31))


def test_the_work_of_a_line_or_a_figure_does_not_grow_with_the_number_of_steps(tmp_path: Path) -> None:
    def work(steps: int) -> tuple[float, int]:
        folder = tmp_path / str(steps)
        folder.mkdir()
        lines = [step_line(step) for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        read = bytecodes(lambda: RunProgress(folder, steps=steps, now=0.0))
        progress = RunProgress(folder, steps=steps + 1, now=0.0)

        def figures() -> None:
            assert progress.done == steps
            assert (progress.eta_seconds(), progress.step_p95(), progress.wait_share()) == (2.0, 2.0, 0.25)
            assert (progress.tokens_per_second(), progress.samples_needed(), progress.last_step_at) == (50, 4 / 1.5, 0)
            assert not progress.step(step_line(steps + 1))

        return read / steps, bytecodes(figures)

    (line, figures), (later_line, later_figures) = work(100), work(400)
    assert later_line < 1.1 * line
    assert later_figures < 1.1 * figures


def test_a_step_made_again_replaces_it_and_all_that_followed(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=0.0)
    for step in (1, 2, 3):
        progress.step(step_line(step, at=float(step)))
    progress.step(step_line(2, attempt=1, at=9.0))
    assert [(line["step"], line["attempt"]) for line in progress.lines] == [(1, 0), (2, 1)]
    assert progress.done == 2


def test_a_step_that_is_reported_again_for_want_of_an_answer_has_one_line(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=100.0)
    progress.step(step_line(1, at=102.0))
    assert not progress.step(step_line(1, at=103.0))
    progress.close()
    restarted = RunProgress(tmp_path, steps=10, now=110.0)
    assert not restarted.step(step_line(1, at=111.0))
    assert not restarted.step(step_line(2, at=112.0))
    assert not restarted.step(step_line(1, at=113.0)), "a report that was late on its way"
    assert [line["step"] for line in restarted.lines] == [1, 2]
    restarted.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_late_report_of_an_attempt_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=100.0)
    for step, attempt in ((1, 0), (2, 0), (2, 1), (3, 1)):
        progress.step(step_line(step, attempt=attempt))
    progress.evaluated(EvaluationResult(step=3, prompts=8, accuracy=0.25, greedy=None), at=104.0)
    for late in (2, 3, 4):
        with pytest.raises(Fenced, match="attempt 0 of the trainer was replaced by attempt 1"):
            progress.step(step_line(late, attempt=0))
    assert [(line["step"], line["attempt"]) for line in progress.lines] == [(1, 0), (2, 1), (3, 1)]
    assert set(progress.evaluations) == {3}


def test_evaluations_of_weights_that_did_not_survive_are_forgotten_for_good(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=0.0)
    for step in (1, 2, 3):
        assert not progress.step(step_line(step, at=float(step)))
    for step in (0, 2, 3):
        progress.evaluated(EvaluationResult(step=step, prompts=1, accuracy=1.0, greedy=None), at=4.0)
    assert not progress.step(step_line(3, at=4.0)), "a report that is told twice makes nothing again"
    assert sorted(progress.evaluations) == [0, 2, 3]
    assert progress.step(step_line(3, attempt=1, at=5.0))
    assert sorted(progress.evaluations) == [0, 2]
    progress.evaluated(EvaluationResult(step=3, prompts=1, accuracy=0.5, greedy=None), at=6.0)
    again = RunProgress(tmp_path, steps=10, now=7.0)
    assert again.evaluations == progress.evaluations
    assert again.step(step_line(1, attempt=2, at=8.0))
    assert sorted(RunProgress(tmp_path, steps=10, now=9.0).evaluations) == [0]


def test_the_summary_counts_what_was_measured(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=2, now=100.0)
    progress.note("first dispatch", at=110.0)
    progress.evaluated(EvaluationResult(step=0, prompts=8, accuracy=0.25, greedy=0.5), at=112.0)
    progress.step(
        step_line(1, at=115.0, reward=0.3, staleness_start_max=0, staleness_start_mean=0.0, logprob_gap_p99=1e-6)
    )
    progress.step(step_line(2, at=120.0, reward=0.9))
    named = SetResult(prompts=4, accuracy=0.5, greedy=None, reward=0.25, pass_at={"2": 0.625})
    last = EvaluationResult(step=2, prompts=8, accuracy=0.75, greedy=1.0, pass_at={"2": 0.875}, sets={"aime": named})
    progress.evaluated(last, at=125.0)
    assert RunProgress(tmp_path, steps=2, now=126.0).evaluations == progress.evaluations
    lives = Lives(opened=110.0, closed=120.0)
    lives.observe("driver", role="driver", started=100.0, now=104.0)
    lives.observe("a", role="rollout", started=101.0, now=114.0, busy_s=2.0, tokens=60)
    lives.observe("b", role="rollout", started=118.0, now=130.0, tokens=30)
    summary = summarize(
        progress,
        audit=AUDIT,
        phase="Succeeded",
        finished=130.0,
        lives=lives,
        rewards=RewardState(
            scored=8, failed={"raised": 1}, first_failure="raised: KeyError", groups_all_right=3, groups_all_wrong=2
        ),
        devices=2,
        prompts_skipped=0,
        best=None,
        exports={},
    )
    assert summary["steps"] == 2
    assert summary["wall_s"] == 26.0, "nobody was there from 114 to 118"
    assert summary["training_s"] == 6.0
    assert summary["tokens_generated"] == 90
    assert (summary["eval_accuracy_first"], summary["eval_accuracy_last"]) == (0.25, 0.75)
    assert (summary["eval_greedy_first"], summary["eval_greedy_last"]) == (0.5, 1.0)
    assert (summary["eval_pass_at_first"], summary["eval_pass_at_last"]) == ({}, {"2": 0.875})
    assert (summary["eval_sets_first"], summary["eval_sets_last"]) == ({}, {"aime": asdict(named)})
    assert (summary["reward_first"], summary["reward_last"]) == (0.3, 0.9)
    assert summary["tpspd"] == pytest.approx(200 / 6 / 2)
    assert (summary["staleness_start_max"], summary["staleness_start_mean"]) == (1, 0.5)
    assert summary["logprob_gap_p99"] == 1e-6
    assert (summary["rewards_failed"], summary["first_failed_reward"]) == ({"raised": 1}, "raised: KeyError")
    assert (summary["groups_all_right"], summary["groups_all_wrong"]) == (3, 2)
    assert (summary["samples_dispatched"], summary["samples_lost"], summary["samples_duplicated"]) == (8, 0, 0)


def test_a_driver_whose_lines_are_gone_begins_where_the_ledger_says(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=0.0)
    progress.catch_up(6, attempt=0)
    assert (progress.done, progress.lines, progress.last_step_at) == (6, [], None)
    assert not progress.step(step_line(6)), "the report that the last driver did not hear"
    assert not progress.step(step_line(7))
    assert progress.done == 7


def test_a_step_that_only_the_ledger_knew_can_be_made_again(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, steps=10, now=0.0)
    progress.catch_up(6, attempt=0)
    progress.evaluated(EvaluationResult(step=6, prompts=8, accuracy=0.5, greedy=None), at=1.0)
    assert progress.step(step_line(5, attempt=1))
    assert (progress.done, progress.evaluations) == (5, {})
    first = RunProgress(tmp_path / "first", steps=10, now=0.0)
    first.catch_up(1, attempt=0)
    assert first.step(step_line(1, attempt=1))


def test_lines_that_no_disk_took_are_written_when_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.write_text("in the place of the folder")
    progress = RunProgress(folder, steps=10, now=100.0)
    progress.step(step_line(1))
    folder.unlink()
    progress.write()
    again = RunProgress(folder, steps=10, now=200.0)
    assert (again.lines, again.started) == (progress.lines, 100.0)
