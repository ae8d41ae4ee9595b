import io
import os
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncflow.api.status import (
    CheckpointState,
    CorrectionFigures,
    DriverStatus,
    QueueDepth,
    RewardState,
    RolloutState,
    SetState,
    Staleness,
    StepProgress,
    TaskState,
)
from asyncflow.driver.presence import MemberState
from asyncflow.local.lifecycle import (
    ExitStatus,
    LocalReplica,
    ProcessEnded,
    ProcessStarted,
    Restart,
    Restarting,
    Stopping,
)
from asyncflow.local.record import Placed
from asyncflow.view import live, watch
from asyncflow.view.console import make_console, make_table
from asyncflow.view.render import Frame, amount, event_line, progress_lines, score, screen, share, still, summary_table

REPLICA = LocalReplica("rollout", 1)
KILLED = ExitStatus(signal=9)
RUNNING = DriverStatus(
    phase="Running",
    step=12,
    steps=60,
    reward=0.4125,
    eval=0.5,
    eval_greedy=0.625,
    tokens_per_second=15321.0,
    eta_seconds=133.0,
    staleness=Staleness(start=1, end=0, mean=0.7),
    version=11,
    queue=QueueDepth(ready=32, leased=64, staged=128, bytes=1_500_000, limit=512_000_000),
    idle_share={"rollout": 0.04, "trainer": 0.31},
    rollouts=(RolloutState(id="abc", index=1, state="ready", version=11, inflight=7),),
    checkpoint=CheckpointState(step=10),
)


INSIDE = StepProgress(step=13, samples=128, generated=50, trained=20, running=64, tokens_per_second=900)


def rendered(renderable, *, width=140):
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=False)
    console.print(renderable)
    return console.export_text()


def frame(status, *, reachable=True):
    placed = [
        Placed(role="rollout", index=i, attempt=i, state="running", pid=100 + i, http=f"http://127.0.0.1:1900{i}")
        for i in range(2)
    ]
    return Frame(name="quick", folder="/runs/q", elapsed_s=75, status=status, reachable=reachable, placed=placed)


def test_a_narrow_screen_shows_names_and_states_instead_of_parts_of_addresses():
    members = [MemberState(role="rollout", index=i, state="generating", running=3, slots=8) for i in range(2)]
    causes = {"rollout-1": "starved 51%, starting 42%"}
    shown = replace(frame(RUNNING), members=members, causes=causes)
    narrow, wide = rendered(screen(shown), width=80), rendered(screen(shown))
    assert "http://127.0.0.1:19001/metrics" in wide
    assert "http" not in narrow
    for words in ("rollout-0", "rollout-1", "running", "starved", "generating"):
        assert words in narrow


def test_the_screen_shows_every_figure():
    text = rendered(screen(frame(RUNNING)))
    for words in (
        "quick  running  1m15s  /runs/q",
        "step 12/60",
        "ETA 2m13s",
        "0.412",
        "accuracy 0.500  greedy 0.625",
        "15.3k",
        "staleness",
        "start 1 end 0",
        "θ11",
        "ready 32 in work 64 staged 128",
        "1.431 MiB of 488.3 MiB",
        "rollout 4% trainer 31%",
        "step 10",
        "ready θ11 7 in flight",
        "http://127.0.0.1:19001/metrics",
    ):
        assert words in text
    rows = [line.split() for line in text.splitlines() if line.startswith("rollout-1")]
    assert rows[0][:4] == ["rollout-1", "101", "1", "running"]


def test_the_screen_says_what_is_missing():
    assert "starting" in rendered(screen(frame(None)))
    assert "the driver does not answer" in rendered(screen(frame(RUNNING, reachable=False)))
    waiting = RUNNING.model_copy(update={"waiting_for": "2 rollouts to register"})
    assert "waiting for 2 rollouts to register" in rendered(screen(frame(waiting)))


def test_the_screen_shows_what_a_correction_leaves():
    assert "effective samples" not in rendered(screen(frame(RUNNING)))
    figures = CorrectionFigures(effective_share=0.875, bounded_share=0.043)
    lines = rendered(screen(frame(RUNNING.model_copy(update={"correction": figures})))).splitlines()
    (row,) = (line for line in lines if line.startswith("effective samples"))
    assert row.split()[2:] == ["88%", "weights", "bounded", "4%"]


def test_names_with_markup_are_shown_as_they_are():
    waiting = RUNNING.model_copy(update={"waiting_for": "[bold]x[/]"})
    assert "[bold]x[/]" in rendered(screen(frame(waiting)))


def test_plain_lines_say_what_is_new_and_only_that():
    before = DriverStatus()
    lines = progress_lines(before, RUNNING)
    assert lines[0] == "phase running"
    assert lines[1] == "step 12/60  reward 0.412  15.3k tokens/s  staleness 1  ready 32  ETA 2m13s"
    assert lines[2] == "eval  accuracy 0.500  greedy 0.625"
    rewarded = RUNNING.model_copy(update={"eval_reward": 0.75})
    assert progress_lines(RUNNING, rewarded) == ["eval  accuracy 0.500  greedy 0.625  reward 0.750"]
    sets = {"aime": SetState(accuracy=0.25, greedy=None, reward=0.3, pass_at={"4": 0.5})}
    detailed = RUNNING.model_copy(update={"eval_pass_at": {"4": 0.75}, "eval_sets": sets})
    assert progress_lines(RUNNING, detailed) == [
        "eval  accuracy 0.500  greedy 0.625  pass@4 0.750",
        "eval  aime: accuracy 0.250  greedy –  reward 0.300  pass@4 0.500",
    ]
    assert progress_lines(detailed, detailed) == []
    assert "aime: accuracy 0.250" in rendered(screen(frame(detailed)))
    skipping = RUNNING.model_copy(update={"prompts_skipped": 1})
    assert [line.partition(":")[0] for line in progress_lines(RUNNING, skipping)] == ["prompts are skipped"]
    assert progress_lines(skipping, skipping.model_copy(update={"prompts_skipped": 9})) == []
    assert progress_lines(RUNNING, RUNNING) == []


def test_a_wait_is_told_once_although_its_seconds_change():
    first = RUNNING.model_copy(update={"waiting_for": "rollout 1 (3.5 s)"})
    later = RUNNING.model_copy(update={"waiting_for": "rollout 1 (4.0 s)"})
    assert progress_lines(RUNNING, first) == ["waiting for rollout 1 (3.5 s)"]
    assert progress_lines(first, later) == []
    assert progress_lines(RUNNING, first, ending=True) == []
    over = first.model_copy(update={"phase": "Succeeded"})
    assert progress_lines(RUNNING, over) == ["phase succeeded"]


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (None, "the driver does not answer yet"),
        (DriverStatus(phase="Starting"), "starting"),
        (DriverStatus(phase="Starting", waiting_for="1 trainer"), "starting; still waiting for 1 trainer"),
        (RUNNING, "running"),
        (RUNNING.model_copy(update={"step_progress": INSIDE}), INSIDE.words),
        (
            RUNNING.model_copy(update={"step_progress": INSIDE, "waiting_for": "1 rollout"}),
            f"{INSIDE.words}; still waiting for 1 rollout",
        ),
    ],
)
def test_after_a_while_without_changes_it_is_said_how_far_things_are(status, line):
    assert still(status) == line


@pytest.mark.parametrize("answers", [True, False])
def test_nothing_is_silent_for_more_than_ten_seconds(monkeypatch, tmp_path, answers):
    """The driver answers the same all the time, or does not, as slowly as it may."""
    now = 0.0

    def passed(seconds):
        nonlocal now
        now += seconds

    def ask(*_):
        passed(2 * live.ANSWER_S)
        return RUNNING.model_copy(update={"step_progress": INSIDE}) if answers else None

    def collect(_):
        passed(live._PERIOD_S)
        return now < 100.0, []

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(live.RunView, "_ask", ask)
    monkeypatch.setattr(live.RunView, "_collect", collect)
    out = io.StringIO()
    live.RunView(name="q", folder=tmp_path, http_port=1, placed=list, console=Console(file=out))._show_lines()
    stamps = [0.0, *(float(line.split()[0]) for line in out.getvalue().splitlines()), now]
    assert max(after - before for before, after in pairwise(stamps)) <= 10.0
    assert out.getvalue().count(INSIDE.words if answers else still(None)) < 30, "nor is it said all the time"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (ProcessStarted(replica=REPLICA, attempt=0, pid=7), None),
        (ProcessStarted(replica=REPLICA, attempt=2, pid=7), "rollout-1 started, attempt 2, pid 7"),
        (
            ProcessEnded(replica=REPLICA, attempt=0, status=KILLED, wanted=False),
            "rollout-1 ended: SIGKILL; see logs/rollout-1.log",
        ),
        (ProcessEnded(replica=REPLICA, attempt=0, status=ExitStatus(), wanted=False), None),
        (ProcessEnded(replica=REPLICA, attempt=0, status=KILLED, wanted=True), None),
        (
            Restarting(restart=Restart(replicas=(REPLICA,), attempt=1, delay_s=0.25, culprit=REPLICA, status=KILLED)),
            "rollout-1: restart in 0.2 s, as attempt 1",
        ),
        (Stopping(reason="SIGINT"), "ending all processes: SIGINT"),
    ],
)
def test_events_in_words(event, line):
    assert event_line(event) == line


def test_the_summary_shows_what_was_measured_and_dashes_for_the_rest():
    text = rendered(
        summary_table({"steps": 60, "wall_s": 142.0, "eval_accuracy_first": 0.31, "eval_accuracy_last": 0.9})
    )
    assert "0.310 → 0.900" in text
    assert "2m22s" in text
    assert "– / –" in text
    evaluated = {
        "eval_pass_at_last": {"4": 0.5},
        "eval_sets_first": {"aime": {"accuracy": 0.1, "pass_at": {}}},
        "eval_sets_last": {"aime": {"accuracy": 0.2, "pass_at": {"4": 0.25}}},
    }
    lines = [" ".join(line.split()) for line in rendered(summary_table(evaluated)).splitlines()]
    assert "pass@4, first → last – → 0.500" in lines
    assert "aime: accuracy, first → last 0.100 → 0.200" in lines
    assert "aime: pass@4, first → last – → 0.250" in lines


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (7, "7"), (0.313, "0.313"), (99.4, "99.4"), (12345, "12.3k"), (3.1e6, "3.1M")]
)
def test_numbers_as_people_read_them(number, text):
    assert amount(number) == text


def test_what_is_absent_is_a_dash():
    assert [amount(None), share(None), score(None)] == ["–"] * 3
    assert (share(0.256), score(1)) == ("26%", "1.000")


def test_components_of_the_reward_stand_behind_it():
    summed = RUNNING.model_copy(update={"step": 13, "reward_components": {"right": 0.5, "length": -0.125}})
    (line,) = progress_lines(RUNNING, summed)
    assert line.startswith("step 13/60  reward 0.412 (right 0.500, length -0.125)  15.3k tokens/s")
    assert "0.412 (right 0.500, length -0.125)" in rendered(screen(frame(summed)))


def test_a_key_is_seen_behind_another_one(monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with watch.keys_pressed() as pressed:
            os.write(ours, b"xq")
            assert pressed(10.0) == "xq"
            assert pressed(0.0) == ""
    os.close(ours)


def test_what_a_reward_function_raised_gives_the_terminal_no_orders():
    failing = RUNNING.model_copy(update={"rewards": RewardState(failed={"raised": 1}, first_failure="\x1b]0;mine\x07")})
    task = TaskState(failed={"raised": 1}, first_failure="raised: \x1b[2J")
    paused = failing.model_copy(update={"phase": "Paused", "tasks": {"mark": task}, "waiting_for": "you \x1b[8m"})
    for said in (*progress_lines(RUNNING, failing), *progress_lines(RUNNING, paused), still(paused)):
        assert said.isprintable()
    shown = rendered(screen(frame(paused)))
    assert "\\x1b]0;mine\\x07" in shown
    assert "\x1b" not in shown


def test_a_job_that_pauses_shows_the_first_traceback():
    first = "raised: Traceback (most recent call last):\n  File 'mine.py', line 3, in score\nKeyError: 'x'"
    rewards = RewardState(failed={"raised": 9}, first_failure=first)
    failing = RUNNING.model_copy(update={"rewards": rewards})
    paused = failing.model_copy(update={"phase": "Paused", "waiting_for": "the reward to be fixed"})
    assert progress_lines(failing, paused) == [
        "phase paused",
        f"the first sample without a reward: {first}",
        "waiting for the reward to be fixed",
    ]
    assert progress_lines(paused, paused) == []
    shown = rendered(screen(frame(paused)))
    assert "line 3, in score" in shown
    assert "9 raised" in shown


def test_names_with_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table("[red]task")
    table.add_row("runs/[bold]a[/bold]")
    make_console().print(table)
    assert capsys.readouterr().out.split() == ["[red]task", "runs/[bold]a[/bold]"]
