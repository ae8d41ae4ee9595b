"""The view without a terminal: what is new in a moment of a run, as plain lines. Pure.

Invariant: a line of ``news`` says something that the line before of its kind did not. Where nothing is new for a while,
``still`` says how far things are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncflow.api.status import DriverStatus
from asyncflow.plan.describe import duration
from asyncflow.substrates.local.events import Ended, Event, Restarting, Started, Stopping
from asyncflow.substrates.local.exits import ExitStatus
from asyncflow.substrates.local.record import Placed
from asyncflow.view.words import amount, evaluated, failures, score

_OVER = ("Succeeded", "Suspended", "Failed")
_FIGURE = re.compile(r"[0-9]+(\.[0-9]+)?")


def news(before: DriverStatus, now: DriverStatus, *, ending: bool = False) -> list[str]:
    """Return a line for each of phase, step, evaluation and what is waited for that changed between two answers.

    ending: everything was told to end, so nothing is waited for any more.
    """
    ending = ending or now.phase in _OVER
    lines = []
    if now.phase != before.phase:
        lines.append(f"phase {now.phase.lower()}")
    if now.step != before.step:
        lines.append(step_line(now))
    if now.eval is not None and _evaluation(now) != _evaluation(before):
        lines.extend(f"eval  {line}" for line in evaluated(now))
    if now.prompts_skipped and not before.prompts_skipped:
        lines.append("prompts are skipped: they are too long (promptsSkipped of /v1/status counts them)")
    if now.rewards.failed and not before.rewards.failed:
        lines.append(f"a sample has no reward: {now.rewards.first_failure}")
    if now.waiting_for and not ending and _FIGURE.sub("", now.waiting_for) != _FIGURE.sub("", before.waiting_for):
        lines.append(f"waiting for {now.waiting_for}")
    return lines


def still(status: DriverStatus | None) -> str:
    """Return how far things are, where nothing happened for a while. status: the driver's last answer."""
    if status is None:
        return "the driver does not answer yet"
    return status.words


def _evaluation(status: DriverStatus) -> tuple[float | None, ...]:
    figures = [*status.eval_pass_at.values(), *(each.accuracy for each in status.eval_sets.values())]
    return status.eval, status.eval_greedy, status.eval_reward, *figures


def metrics_line(placed: Sequence[Placed]) -> str:
    """Return the line that says where each process serves its metrics."""
    return "metrics: " + ", ".join(f"{each.role}-{each.index} {each.http}/metrics" for each in placed if each.http)


def step_line(status: DriverStatus) -> str:
    """Return the line of the newest step."""
    failed = f"  rewards failed {failures(status.rewards.failed)}" if status.rewards.failed else ""
    return (
        f"step {status.step}/{status.steps}  reward {score(status.reward)}  "
        f"{amount(status.tokens_per_second)} tokens/s  staleness {amount(status.staleness.start)}  "
        f"ready {status.queue.ready}  ETA {duration(status.eta_seconds)}{failed}"
    )


def event_line(event: Event) -> str | None:
    """Return the line of what happened to a process; None for what goes without saying."""
    match event:
        case Started(attempt=0) | Ended(wanted=True) | Ended(status=ExitStatus(ok=True)):
            return None
        case Started():
            return f"{event.seat} started, attempt {event.attempt}, pid {event.pid}"
        case Ended():
            return f"{event.seat} ended: {event.status}"
        case Restarting(restart=restart):
            seats = ", ".join(map(str, restart.seats))
            return f"{seats}: again in {restart.delay_s:.1f} s, as attempt {restart.attempt}"
        case Stopping():
            return f"ending everything: {event.reason}"
