"""Samples without a reward are counted by why, and when most of a step has none the job pauses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.load import load_job
from asyncflow.driver.components import ComponentMeans
from asyncflow.driver.groups import RewardTally, Totals
from asyncflow.driver.journal import REWARDS, StateFile
from asyncflow.telemetry.metrics import DriverMetrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
OUTCOMES = ["", "raised", "timeout", "invalid"]


def row(failure: str = "", detail: str = "") -> Any:
    tags = {"failure": failure, "detail": detail} if failure else {}
    return SimpleNamespace(meta=SimpleNamespace(tags=tags))


def tally(needed: int = 8, kept: list[Any] | None = None) -> RewardTally:
    return RewardTally(needed=needed, keep=(kept if kept is not None else []).append)


@given(st.lists(st.sampled_from(OUTCOMES), max_size=40), st.integers(1, 16))
def test_it_pauses_when_more_than_half_of_what_a_step_needs_and_got_have_failed(
    outcomes: list[str], needed: int
) -> None:
    made = tally(needed)
    for count, outcome in enumerate(outcomes, start=1):
        before = made.paused
        made.take(row(outcome, "Traceback\n  File\nKeyError: 'x'"), step=3)
        failed = sum(bool(each) for each in outcomes[:count])
        assert bool(made.paused) == (bool(before) or (bool(outcome) and 2 * failed > max(needed, count)))
    if made.paused:
        assert "samples of step 3 have none" in made.paused
        assert "KeyError: 'x'" in made.paused
    assert sum(made.outcomes().values()) == len(outcomes)


def test_the_share_that_may_fail_is_the_manifests() -> None:
    for share, failures in ((0.25, 3), (0.75, 7), (1.0, None)):
        made = RewardTally(needed=8, keep=lambda totals: None, most_failed=share)
        counts = []
        for count in range(1, 9):
            made.take(row("raised"), step=1)
            counts += [count] if made.paused else []
        assert (counts[0] if counts else None) == failures


def test_a_pause_shows_the_first_that_failed_as_most_did() -> None:
    made = tally(needed=4)
    made.take(row("timeout", "too slow"), step=1)
    assert made.first_failure == "timeout: too slow"
    for name in "abc":
        made.take(row("raised", f"Traceback\nKeyError: '{name}'"), step=1)
    assert made.paused
    assert made.first_failure == "raised: Traceback\nKeyError: 'a'"
    assert "The first: KeyError: 'a'" in made.paused


def test_a_pause_says_whether_the_reward_or_a_task_is_to_be_fixed() -> None:
    made = tally(needed=4)
    made.take(row("raised", "of the reward"), step=1)
    for _ in range(2):
        made.take(row("judge: raised", "of the task"), step=1)
    assert made.paused.startswith("the task judge to be fixed: 3 of 3 samples")
    assert "fix the task judge and resume" in made.paused
    assert made.first_failure == "judge: raised: of the task"


def test_a_timeout_that_the_manifest_values_is_counted_and_does_not_pause() -> None:
    made = RewardTally(needed=4, keep=lambda totals: None, timeouts_fail=False)
    for _ in range(8):
        made.take(row("timeout"), step=1)
    assert not made.paused
    assert made.failed == {"timeout": 8}
    for _ in range(9):
        made.take(row("raised"), step=1)
    assert made.paused.startswith("the reward to be fixed: 9 of 17 samples")
    assert "Suspend the job (on one machine: Ctrl-C)" in made.paused


def test_steps_are_judged_on_their_own_and_again_after_a_pause() -> None:
    made = tally(needed=4)
    for step in (1, 2):
        for _ in range(2):
            made.take(row("raised"), step=step)
    assert not made.paused
    made.take(row("raised"), step=1)
    assert made.paused.startswith("the reward to be fixed: 3 of 3 samples of step 1")
    made.resume()
    made.take(row("raised"), step=1)
    assert not made.paused
    assert made.failed == {"raised": 6}


def test_an_evaluation_pauses_nothing_however_much_of_it_fails() -> None:
    made = tally(needed=4)
    for _ in range(9):
        made.take(row("raised"))
    assert not made.paused
    assert made.outcomes() == {"scored": 0, "raised": 9}


def test_a_step_that_was_trained_is_judged_again_where_it_is_made_again() -> None:
    made = tally(needed=4)
    for outcome in ("", "", "", "", "", "", "raised", "raised"):
        made.take(row(outcome), step=1)
    made.forget(1)
    for _ in range(2):
        made.take(row("raised"), step=1)
    assert not made.paused
    made.take(row("raised"), step=1)
    assert made.paused.startswith("the reward to be fixed: 3 of 3 samples of step 1")


def test_totals_and_the_first_traceback_go_on_in_the_next_driver() -> None:
    kept: list[Any] = []
    made = tally(kept=kept)
    made.flush()
    made.take(row("raised", "Traceback: KeyError"), step=1)
    made.take(row("timeout", "too slow"), step=1)
    made.take(row(), step=1)
    made.flush()
    made.flush()
    assert len(kept) == 2
    again = tally()
    again.restore(kept[-1])
    assert again.outcomes() == {"scored": 1, "raised": 1, "timeout": 1}
    assert again.first_failure == "raised: Traceback: KeyError"


def test_equal_groups_are_counted_on_by_the_next_driver_and_shown_alike_everywhere(tmp_path: Path) -> None:
    file = StateFile(tmp_path / REWARDS)
    for life in (1, 2):
        driver = RewardTally.of(load_job(EXAMPLE).spec, file)
        driver.alike.update(right=2, wrong=1)
        driver.flush()
        metrics = DriverMetrics()
        metrics.watch_groups(driver.equal_groups)
        assert (driver.state.groups_all_right, driver.state.groups_all_wrong) == (2 * life, life)
        for how, count in (("right", 2 * life), ("wrong", life)):
            assert metrics.registry.get_sample_value("asyncflow_driver_equal_groups_total", {"all": how}) == count


def test_totals_of_a_run_that_counted_no_groups_yet_are_read(tmp_path: Path) -> None:
    (tmp_path / REWARDS).write_text('{"scored": 3, "failed": {"raised": 1}, "first_failure": "raised: KeyError"}')
    made = tally()
    made.restore(StateFile(tmp_path / REWARDS).read(Totals))
    assert (made.outcomes(), made.equal_groups()) == ({"scored": 3, "raised": 1}, {"right": 0, "wrong": 0})


def judged(**components: float) -> Any:
    return SimpleNamespace(
        meta=SimpleNamespace(tags={"reward": 1.0, **{f"reward/{k}": v for k, v in components.items()}})
    )


def test_components_are_averaged_over_the_samples_that_a_step_trains() -> None:
    means = ComponentMeans()
    means.take(1, 7, [judged(right=1.0, length=-1.0), judged(right=0.0, length=0.0)])
    means.take(1, 8, [judged(right=1.0), judged(right=1.0, length=-0.5)])
    means.take(2, 9, [judged(right=0.25)])
    assert means.of(1) == {"length": -0.5, "right": 0.75}
    means.take(1, 7, [judged(right=1.0)])
    assert means.of(1) == {"length": -0.5, "right": 1.0}, "a group that is decided again counts once"
    assert means.of(3) == {}
    means.take(3, 1, [judged()])
    assert means.of(3) == {}, "a reward of one function has no components"


def test_components_of_the_last_steps_are_remembered() -> None:
    means = ComponentMeans()
    for step in range(200):
        means.take(step, step, [judged(right=float(step))])
    assert means.of(199) == {"right": 199.0}
    assert means.of(199 - 63) == {"right": 199.0 - 63}
    assert means.of(199 - 64) == {}
