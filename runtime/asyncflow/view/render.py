"""Pure rendering of a run for the user: numbers as text, lines, the live screen, and the summary.

A ``Frame`` is the state of a run at one time. ``screen`` renders it for a terminal. Without a terminal,
``progress_lines`` returns plain lines about the changes since the last status, and ``still`` a line about the current
state if nothing has changed. ``summary_table`` renders the figures of ``summary.json``.

Invariants:

* Every figure comes from the driver (its status, its state of the members and its summary), from the spans or from the
  record of placements. An absent number is shown as a dash.
* A line of ``progress_lines`` always differs from the previous line of its kind.
* Control characters in messages of users' functions are escaped, so they have no effect on the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncflow.api.status import DriverStatus, SetState
from asyncflow.driver.presence import MemberState, TaskDepth
from asyncflow.local.lifecycle import Event, ExitStatus, ProcessEnded, ProcessStarted, Restarting, Scaled, Stopping
from asyncflow.local.record import Placed
from asyncflow.plan.describe import ABSENT, duration, size
from asyncflow.timeline.causes import Shares
from asyncflow.view.pace import ProcessPace

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Return ``text`` with its control characters escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def amount(number: float | None) -> str:
    """Return a number with about three significant digits: ``7``, ``0.31``, ``12.4k``, ``3.1M``."""
    if number is None:
        return ABSENT
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}" if number == int(number) or abs(number) >= 100 else f"{number:.3g}"


def failures(counts: Mapping[str, int]) -> str:
    """Return counts by kind of failure, the most frequent first: ``12 raised, 3 timeout``; ``none`` without any."""
    by_count = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {failure}" for failure, count in by_count) or "none"


def share(part: float | None) -> str:
    """Return a share between 0 and 1 in percent."""
    return ABSENT if part is None else f"{100 * part:.0f}%"


def evaluated(status: DriverStatus) -> list[str]:
    """Return the results of the last evaluation: a line for the main set, and one for each named set."""
    main = SetState(
        accuracy=status.eval or 0.0,
        greedy=status.eval_greedy,
        reward=status.eval_reward,
        pass_at=status.eval_pass_at,
    )
    return [_set_result(main), *(f"{name}: {_set_result(each)}" for name, each in status.eval_sets.items())]


def _set_result(result: SetState) -> str:
    reward = "" if result.reward in (None, result.accuracy) else f"  reward {score(result.reward)}"
    chances = "".join(f"  pass@{k} {score(passing)}" for k, passing in result.pass_at.items())
    return f"accuracy {score(result.accuracy)}  greedy {score(result.greedy)}{reward}{chances}"


def score(value: float | None) -> str:
    """Return a reward or an accuracy with three decimals."""
    return ABSENT if value is None else f"{value:.3f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """State of a run at one time.

    name: name of the job; folder: folder of its files; elapsed_s: seconds since the start of the run; status: the
    driver's last status, None before the first; reachable: whether the driver answers now; placed: the processes, in
    plan order; members: the states of the running members; paces: paces by (role, index) between the last two
    observations; queue: depths by task; causes: recent causes of idleness, as text by process name.
    """

    name: str
    folder: str
    elapsed_s: float
    status: DriverStatus | None
    reachable: bool
    placed: Sequence[Placed]
    members: Sequence[MemberState] = ()
    paces: Mapping[tuple[str, int], ProcessPace] = field(default_factory=dict)
    queue: Mapping[str, TaskDepth] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)


OVER = ("Succeeded", "Suspended", "Failed")
_FIGURE = re.compile(r"[0-9]+(\.[0-9]+)?")


def progress_lines(before: DriverStatus, now: DriverStatus, *, ending: bool = False) -> list[str]:
    """Return lines about the changes between two statuses, such as a new phase, step, evaluation or wait.

    ending: whether all processes are being ended, so that waits are not reported.
    """
    ending = ending or now.phase in OVER
    lines = []
    if now.phase != before.phase:
        lines.append(f"phase {now.phase.lower()}")
        if now.phase == "Paused" and now.rewards.first_failure:
            lines.append(f"the first sample without a reward: {now.rewards.first_failure}")
    if now.step != before.step:
        lines.append(step_line(now))
    if now.eval is not None and _eval_figures(now) != _eval_figures(before):
        lines.extend(f"eval  {line}" for line in evaluated(now))
    if now.prompts_skipped and not before.prompts_skipped:
        lines.append("prompts are skipped: they are too long (promptsSkipped of /v1/status counts them)")
    if now.rewards.failed and not before.rewards.failed:
        lines.append(f"a sample has no reward: {now.rewards.first_failure}")
    for name, task in now.tasks.items():
        known = before.tasks.get(name)
        if task.failed and not (known is not None and known.failed):
            lines.append(f"task {name} has failed for a sample: {task.first_failure}")
    if now.waiting_for and not ending and _FIGURE.sub("", now.waiting_for) != _FIGURE.sub("", before.waiting_for):
        lines.append(f"waiting for {now.waiting_for}")
    return [plain(line) for line in lines]


def still(status: DriverStatus | None) -> str:
    """Return a line about the current state, for times without changes. status: the driver's last status."""
    if status is None:
        return "the driver does not answer yet"
    return plain(status.words)


def _eval_figures(status: DriverStatus) -> tuple[float | None, ...]:
    figures = [*status.eval_pass_at.values(), *(each.accuracy for each in status.eval_sets.values())]
    return status.eval, status.eval_greedy, status.eval_reward, *figures


def metrics_line(placed: Sequence[Placed]) -> str:
    """Return the line with the metrics address of each process."""
    return "metrics: " + ", ".join(f"{each.role}-{each.index} {each.http}/metrics" for each in placed if each.http)


def step_line(status: DriverStatus) -> str:
    """Return the line about the newest step."""
    failed = f"  rewards failed {failures(status.rewards.failed)}" if status.rewards.failed else ""
    return (
        f"step {status.step}/{status.steps}  reward {score(status.reward)}{_components(status)}  "
        f"{amount(status.tokens_per_second)} tokens/s  staleness {amount(status.staleness.start)}  "
        f"ready {status.queue.ready}  ETA {duration(status.eta_seconds)}{failed}"
    )


def _components(status: DriverStatus) -> str:
    """Return the means of the components of the reward, in parentheses; "" if it has none."""
    means = ", ".join(f"{name} {score(value)}" for name, value in status.reward_components.items())
    return f" ({means})" if means else ""


def event_line(event: Event) -> str | None:
    """Return the line about an event of a process; None for an expected event."""
    match event:
        case ProcessStarted(attempt=0) | ProcessEnded(wanted=True) | ProcessEnded(status=ExitStatus(ok=True)):
            return None
        case ProcessStarted():
            return f"{event.replica} started, attempt {event.attempt}, pid {event.pid}"
        case ProcessEnded():
            return f"{event.replica} ended: {event.status}; see logs/{event.replica}.log"
        case Restarting(restart=restart):
            replicas = ", ".join(map(str, restart.replicas))
            return f"{replicas}: restart in {restart.delay_s:.1f} s, as attempt {restart.attempt}"
        case Scaled():
            return f"{event.role}: {event.after} wanted, not {event.before}: {event.why}"
        case Stopping():
            return f"ending all processes: {event.reason}"


_ROWS: tuple[tuple[str, Callable[[Any], str], tuple[str, ...]], ...] = (
    ("steps", amount, ("steps",)),
    ("time", duration, ("wall_s",)),
    ("accuracy, first → last", score, ("eval_accuracy_first", "eval_accuracy_last")),
    ("greedy, first → last", score, ("eval_greedy_first", "eval_greedy_last")),
    ("eval reward, first → last", score, ("eval_reward_first", "eval_reward_last")),
    ("reward, first → last", score, ("reward_first", "reward_last")),
    ("tokens generated", amount, ("tokens_generated",)),
    ("tokens trained", amount, ("tokens_trained",)),
    ("tokens / s / device", amount, ("tpspd",)),
    ("staleness at start, mean / max", amount, ("staleness_start_mean", "staleness_start_max")),
    ("staleness at end, max", amount, ("staleness_end_max",)),
    ("prompts too long, skipped", str, ("prompts_skipped",)),
    ("samples dispatched", str, ("samples_dispatched",)),
    ("trained / filtered", str, ("samples_trained", "samples_filtered")),
    ("groups all right / all wrong", str, ("groups_all_right", "groups_all_wrong")),
    ("dropped / unfinished", str, ("samples_dropped", "samples_unfinished")),
    ("rewards failed", failures, ("rewards_failed",)),
    ("lost / duplicated", str, ("samples_lost", "samples_duplicated")),
    ("steps without an update", str, ("steps_skipped",)),
    ("log-prob gap, p99", amount, ("logprob_gap_p99",)),
)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Render the driver's summary."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    for title, render, keys in _ROWS:
        separator = " → " if "→" in title else " / "
        values = [summary.get(key) for key in keys]
        table.add_row(title, separator.join(ABSENT if value is None else render(value) for value in values))
    first, last = _evaluated(summary, "first"), _evaluated(summary, "last")
    for title, value in last.items():
        table.add_row(f"{title}, first → last", f"{score(first.get(title))} → {score(value)}")
    if isinstance(best := summary.get("best"), Mapping):
        table.add_row("best checkpoint", f"step {best['step']}, {best['by']} {score(best['value'])}")
    if isinstance(exports := summary.get("exports"), Mapping) and exports:
        table.add_row("exported models", ", ".join(f"{name}: θ{step}" for name, step in exports.items()))
    idle = summary.get("idle_share")
    if isinstance(idle, Mapping):
        table.add_row("idle share", "  ".join(f"{role} {share(part)}" for role, part in sorted(idle.items())))
    return table


def _evaluated(summary: Mapping[str, Any], which: str) -> dict[str, float]:
    """Return pass@k and the results of named sets, of the first or the last evaluation, by title."""
    figures = {f"pass@{k}": value for k, value in summary.get(f"eval_pass_at_{which}", {}).items()}
    for name, result in summary.get(f"eval_sets_{which}", {}).items():
        figures[f"{name}: accuracy"] = result["accuracy"]
        figures |= {f"{name}: pass@{k}": value for k, value in result["pass_at"].items()}
    return figures


def files_line(folder: str, names: list[str]) -> str:
    """Return the line about the files of a run. names: existing entries of the folder."""
    return f"files in {folder}: {', '.join(names)}" if names else f"files in {folder}"


_STATES = {"running": "green", "waiting": "yellow", "ending": "yellow", "down": "red", "done": "dim", "ended": "dim"}
_MOST_ROWS = 24


def screen(frame: Frame) -> RenderableType:
    """Render a frame: headline, progress, figures, processes."""
    status = frame.status or DriverStatus()
    parts: list[RenderableType] = [_headline(frame, status), _progress(frame, status), _figures(status), _Roles(frame)]
    if frame.queue:
        parts.insert(3, _queue(frame.queue))
    if status.waiting_for:
        parts.insert(2, Text(f"waiting for {plain(status.waiting_for)}", style="yellow"))
    if status.step_progress is not None:
        parts.insert(2, Text(status.step_progress.words, style="dim"))
    if status.phase == "Paused" and status.rewards.first_failure:
        first = plain(status.rewards.first_failure)
        parts.append(Text(f"the first sample without a reward: {first}", style="yellow"))
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
        ("reward", f"{score(status.reward)}{_components(status)}", "tokens/s", amount(status.tokens_per_second)),
        ("eval", _evaluation(status), "version", f"θ{status.version}"),
        ("staleness", f"start {amount(status.staleness.start)} end {amount(status.staleness.end)}", "idle", idle),
        (
            "queue",
            f"ready {queue.ready} in work {queue.leased} staged {queue.staged}",
            "held",
            f"{size(queue.bytes)} of {size(queue.limit)}",
        ),
        ("checkpoint", _checkpoint(status), "rewards failed", failures(status.rewards.failed)),
        *_correction(status),
    )
    for name, value, other, other_value in rows:
        table.add_row(Text(name, style="dim"), value, Text(other, style="dim"), other_value)
    return table


def _correction(status: DriverStatus) -> list[tuple[str, str, str, str]]:
    if (figures := status.correction) is None:
        return []
    return [("effective samples", share(figures.effective_share), "weights bounded", share(figures.bounded_share))]


def _evaluation(status: DriverStatus) -> str:
    return ABSENT if status.eval is None else "\n".join(evaluated(status))


def _checkpoint(status: DriverStatus) -> str:
    best = f", best step {status.best.step}" if status.best else ""
    return f"step {status.checkpoint.step}{best}" if status.checkpoint else ABSENT


def _queue(tasks: Mapping[str, TaskDepth]) -> Table:
    """Render the tasks of the queue, one column each."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("task", style="dim")
    for name in tasks:
        table.add_column(name, justify="right")
    table.add_row("ready", *(str(depth.ready) for depth in tasks.values()))
    table.add_row("in work", *(str(depth.leased) for depth in tasks.values()))
    return table


@dataclass(frozen=True)
class _Roles:
    """The table of processes; in a terminal of less than ``_WIDE`` columns without their pids and metrics addresses."""

    frame: Frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield _roles(self.frame, wide=options.max_width >= _WIDE)


def _roles(frame: Frame, *, wide: bool) -> Table:
    serving = {rollout.index: rollout for rollout in frame.status.rollouts} if frame.status else {}
    members = {(member.role, member.index): member for member in frame.members}
    optional = {"pid": wide, "metrics": wide, "idle": bool(frame.causes), **dict.fromkeys(_PACES, bool(members))}
    columns = [column for column in _COLUMNS if optional.get(column, True)]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        justify: JustifyMethod = "right" if column in _PACES else "left"
        table.add_column(column, justify=justify, no_wrap=column in _WHOLE)
    for placed in frame.placed[:_MOST_ROWS]:
        place = (placed.role, placed.index)
        rollout = serving.get(placed.index) if placed.role == "rollout" else None
        state = f"{rollout.state} θ{rollout.version} {rollout.inflight} in flight" if rollout else ""
        member = members.get(place)
        missing = members and member is None and placed.state == "running" and placed.role != "driver"
        description = ", ".join(filter(None, (state, member.state if member is not None else "")))
        cells: dict[str, str | Text] = {
            "role": f"{placed.role}-{placed.index}",
            "pid": str(placed.pid or ABSENT),
            "attempt": str(placed.attempt),
            "process": Text(placed.state, style=_STATES.get(placed.state, "")),
            **dict(zip(_PACES, _pace(member, frame.paces.get(place)), strict=True)),
            "idle": frame.causes.get(f"{placed.role}-{placed.index}", ""),
            "metrics": placed.http and f"{placed.http}/metrics",
            "state": Text("not registered with the driver", style="yellow") if missing else description,
        }
        table.add_row(*(cells[column] for column in columns))
    if len(frame.placed) > _MOST_ROWS:
        table.add_row(f"and {len(frame.placed) - _MOST_ROWS} more", *[""] * (len(table.columns) - 1))
    return table


def idle_words(spent: Shares) -> str:
    """Return the main causes of a process's idle time, the largest first, as shares of its time."""
    idle = sorted(((seconds / spent.seconds, cause) for cause, seconds in spent.idle.items()), reverse=True)
    return ", ".join(f"{cause} {share(part)}" for part, cause in idle[:_MOST_CAUSES] if part >= _LEAST_CAUSE)


_MOST_CAUSES, _LEAST_CAUSE = 3, 0.01
_PACES = ("running", "tokens/s", "busy")
_COLUMNS = ("role", "pid", "attempt", "process", *_PACES, "idle", "metrics", "state")
_WHOLE = ("role", "process", "metrics")
"""Columns that are not cut off in favour of others."""
_WIDE = 130


def _pace(member: MemberState | None, pace: ProcessPace | None) -> tuple[str, str, str]:
    """Return the cells of ``_PACES``."""
    running = f"{member.running}/{member.slots}" if member is not None and member.slots else ABSENT
    generates = pace is not None and member is not None and member.role == "rollout"
    return running, amount(pace.tokens_per_second) if pace and generates else ABSENT, share(pace.busy if pace else None)
