"""The live view of a terminal: a moment of a run as a rich renderable. Pure.

Invariant: every figure that a person may see comes from the driver's status or the record of placements.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncflow.api.status import DriverStatus
from asyncflow.plan.describe import ABSENT, duration, size
from asyncflow.view.frame import Frame
from asyncflow.view.words import amount, evaluated, failures, score, share

_STATES = {"running": "green", "waiting": "yellow", "ending": "yellow", "down": "red", "done": "dim", "ended": "dim"}
_MOST_ROWS = 24


def screen(frame: Frame) -> RenderableType:
    """Render a moment: headline, progress, figures, processes."""
    status = frame.status or DriverStatus()
    parts: list[RenderableType] = [_headline(frame, status), _progress(frame, status), _figures(status), _roles(frame)]
    if status.waiting_for:
        parts.insert(2, Text(f"waiting for {status.waiting_for}", style="yellow"))
    if status.step_progress is not None:
        parts.insert(2, Text(status.step_progress.words, style="dim"))
    return Group(*parts)


def _headline(frame: Frame, status: DriverStatus) -> Text:
    text = Text.assemble((frame.name, "bold"), "  ", status.phase.lower(), "  ", duration(frame.elapsed_s))
    if frame.status and not frame.reachable:
        text.append("  the driver does not answer", style="yellow")
    return text.append(f"  {frame.folder}", style="dim")


def _progress(frame: Frame, status: DriverStatus) -> Table:
    eta = duration(status.eta_seconds)
    table = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(status.steps, 1), completed=status.step, width=40)
    table.add_row(f"step {status.step}/{status.steps or ABSENT}", bar, f"ETA {eta}" if frame.status else "starting")
    return table


def _figures(status: DriverStatus) -> Table:
    queue = status.queue
    idle = " ".join(f"{role} {share(part)}" for role, part in sorted(status.idle_share.items())) or ABSENT
    table = Table.grid(padding=(0, 2))
    rows = (
        ("reward", score(status.reward), "tokens/s", amount(status.tokens_per_second)),
        ("eval", _evaluation(status), "version", f"θ{status.version}"),
        ("staleness", f"start {amount(status.staleness.start)} end {amount(status.staleness.end)}", "idle", idle),
        (
            "queue",
            f"ready {queue.ready} in work {queue.leased} staged {queue.staged}",
            "held",
            f"{size(queue.bytes)} of {size(queue.limit)}",
        ),
        ("checkpoint", _checkpoint(status), "rewards failed", failures(status.rewards.failed)),
    )
    for name, value, other, other_value in rows:
        table.add_row(Text(name, style="dim"), value, Text(other, style="dim"), other_value)
    return table


def _evaluation(status: DriverStatus) -> str:
    return ABSENT if status.eval is None else "\n".join(evaluated(status))


def _checkpoint(status: DriverStatus) -> str:
    best = f", best step {status.best.step}" if status.best else ""
    return f"step {status.checkpoint.step}{best}" if status.checkpoint else ABSENT


def _roles(frame: Frame) -> Table:
    serving = {rollout.index: rollout for rollout in frame.status.rollouts} if frame.status else {}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("role", "pid", "attempt", "process", "metrics", "state"):
        table.add_column(column)
    for placed in frame.placed[:_MOST_ROWS]:
        rollout = serving.get(placed.index) if placed.role == "rollout" else None
        state = f"{rollout.state} θ{rollout.version} {rollout.inflight} in flight" if rollout else ""
        table.add_row(
            f"{placed.role}-{placed.index}",
            str(placed.pid or ABSENT),
            str(placed.attempt),
            Text(placed.state, style=_STATES.get(placed.state, "")),
            placed.http and f"{placed.http}/metrics",
            state,
        )
    if len(frame.placed) > _MOST_ROWS:
        table.add_row(f"and {len(frame.placed) - _MOST_ROWS} more", "", "", "", "", "")
    return table
