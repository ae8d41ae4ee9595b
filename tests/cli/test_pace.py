"""Paces between two heartbeats, and the screen that shows them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from asyncflow.api.status import DriverStatus
from asyncflow.driver.presence import MemberState, TaskDepth, member_state
from asyncflow.local.record import Placed
from asyncflow.rpc.membership import Member
from asyncflow.view.pace import Paces, ProcessPace
from asyncflow.view.render import Frame, screen


def rollout(
    age_s: float, *, tokens: int, busy_s: float | None = 0.0, silent_s: float = 0.0, attempt: int = 0
) -> MemberState:
    return MemberState(
        role="rollout", index=0, attempt=attempt, age_s=age_s, silent_s=silent_s, tokens=tokens, busy_s=busy_s, slots=8
    )


def test_a_pace_is_that_between_two_heartbeats() -> None:
    paces = Paces()
    assert paces.look([rollout(10, tokens=100, busy_s=5)]) == {}
    assert paces.look([rollout(12, tokens=300, busy_s=6)]) == {("rollout", 0): ProcessPace(100.0, 0.5)}


def test_a_look_between_two_heartbeats_changes_nothing() -> None:
    paces = Paces()
    paces.look([rollout(10, tokens=100)])
    first = paces.look([rollout(12, tokens=300)])
    assert paces.look([rollout(12.5, tokens=300, silent_s=0.5)]) == first


def test_another_incarnation_and_one_that_left_have_no_pace() -> None:
    paces = Paces()
    paces.look([rollout(10, tokens=100)])
    paces.look([rollout(12, tokens=300)])
    assert paces.look([rollout(1, tokens=0, attempt=1)]) == {}
    assert paces.look([rollout(3, tokens=50, attempt=1)]) == {("rollout", 0): ProcessPace(25.0, 0.0)}
    assert paces.look([]) == {}


def test_who_does_not_say_how_long_it_worked_has_no_busy_share() -> None:
    paces = Paces()
    paces.look([rollout(10, tokens=0, busy_s=None)])
    assert paces.look([rollout(11, tokens=0, busy_s=None)]) == {("rollout", 0): ProcessPace(0.0, None)}


def test_what_a_process_says_of_itself_is_a_few_words() -> None:
    trainer = Member(
        role="trainer", index=0, incarnation="trainer-0-a", attempt=2, address="tcp://h:1", http="http://h:2"
    )
    status: dict[str, Any] = {"step": 4, "publishing": 4, "saving": True, "busy_s": 1.5, "age_s": 9.0}
    told = member_state(trainer, status, silent_s=0.5)
    assert (told.attempt, told.step, told.busy_s, told.state) == (2, 4, 1.5, "publishing θ_4, writing a checkpoint")


def test_the_screen_shows_tasks_and_paces() -> None:
    shown = Frame(
        name="quick",
        folder="/runs/q",
        elapsed_s=75,
        status=DriverStatus(phase="Running", step=3, steps=9),
        reachable=True,
        placed=[
            Placed(role="rollout", index=0, attempt=0, state="running"),
            Placed(role="rollout", index=1, attempt=3, state="down"),
            Placed(role="rollout", index=2, attempt=0, state="running"),
            Placed(role="driver", index=0, attempt=0, state="running"),
        ],
        members=[MemberState(role="rollout", index=0, running=5, slots=8)],
        paces={("rollout", 0): ProcessPace(1234.0, 0.75)},
        queue={"train/rollout": TaskDepth(ready=17, leased=23)},
    )
    console = Console(width=140, record=True, file=io.StringIO(), force_terminal=False)
    console.print(screen(shown))
    text = console.export_text()
    for words in ("train/rollout", "17", "23", "5/8", "1.23k", "75%"):
        assert words in text
    gone = next(line for line in text.splitlines() if "rollout-1" in line)
    assert "down" in gone
    assert gone.count("–") >= 3
    assert [line.split()[0] for line in text.splitlines() if "not registered with the driver" in line] == ["rollout-2"]
