"""Figures and events of a run since an earlier request, read from its files as JSON values.

Invariants:

* A reader that passes the cursor of the previous answer gets each line of ``metrics.jsonl`` and ``events.jsonl`` once.
* If a file was replaced, the answer starts from the beginning and says so.
* An answer is bounded: of very many steps it contains every n-th one, and n.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from asyncflow.api.job import RLJob
from asyncflow.driver.journal import EVENTS, METRICS, SUMMARY, read_summary
from asyncflow.driver.sample_files import SAMPLES, kept_steps
from asyncflow.telemetry.lines import new_lines, some_new_lines

MOST_STEPS: Final = 4000
"""Most steps of one answer."""
_TIMES: Final = ("at", "started", "ended")
_COMPONENTS: Final = "reward_components"


class FileCursor(msgspec.Struct, frozen=True, array_like=True):
    """Cursor of a reader: inode and bytes read of each file, and the modification time of the folder of samples.

    samples: that modification time in nanoseconds.
    """

    metrics_file: int = 0
    metrics: int = 0
    events_file: int = 0
    events: int = 0
    samples: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of ``str``; return the initial cursor for any other text."""
        try:
            return msgspec.convert([int(part) for part in text.split("-")], cls)
        except (ValueError, msgspec.ValidationError):
            return cls()

    def __str__(self) -> str:
        return "-".join(map(str, msgspec.to_builtins(self)))


def changes(folder: Path, since: str) -> dict[str, Any]:
    """Return the changes in the files of a run since the cursor ``since`` ("": everything).

    The answer has the next ``cursor``, and a flag that tells the reader to discard its earlier data. ``steps``: the
    values of each figure in the order of lines, None if a line lacks it; ``every``: n, if only every n-th step is
    included; ``events``: event lines; ``samples``: the steps with kept texts, by purpose, absent if none were added;
    ``summary``: the summary, None before the end.
    """
    before = FileCursor.parse(since)
    files = _inode(folder / METRICS), _inode(folder / EVENTS)
    replaced = (before.metrics_file, before.events_file) != files
    if replaced:
        before = FileCursor(metrics_file=files[0], events_file=files[1])
    steps, metrics_end, every = some_new_lines(folder / METRICS, before.metrics, most=MOST_STEPS)
    events, events_end = new_lines(folder / EVENTS, before.events)
    modified = _modified(folder / SAMPLES)
    answer: dict[str, Any] = {
        "cursor": str(FileCursor(files[0], metrics_end, files[1], events_end, modified)),
        "anew": replaced,
        "steps": columns(steps),
        "every": every,
        "events": [event for event in events if isinstance(event.get("event"), str)],
        "summary": read_summary(folder / SUMMARY),
    }
    if modified != before.samples:
        answer["samples"] = kept_steps(folder)
    return answer


def columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return the numbers of ``lines`` by name, with six digits; components are named ``component NAME``."""
    rows = [dict(_numbers(line)) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def facts(job: RLJob) -> dict[str, Any]:
    """Return the main settings of a job."""
    spec = job.spec
    return {
        "name": job.metadata.name,
        "algorithm": spec.algorithm.name,
        "model": spec.model.source,
        "steps": spec.algorithm.steps,
        "prompts": spec.algorithm.prompts_per_step,
        "group": spec.algorithm.group_size,
        "mode": spec.schedule.mode,
        "staleness": spec.schedule.max_staleness,
        "rollouts": spec.rollout.replicas,
        "ranks": spec.trainer.ranks,
    }


def _numbers(line: Mapping[str, Any]) -> list[tuple[str, float]]:
    parts = line.get(_COMPONENTS)
    named = {f"component {name}": value for name, value in parts.items()} if isinstance(parts, dict) else {}
    return [
        (name, round(value, 3) if name in _TIMES else float(f"{value:.6g}"))
        for name, value in {**line, **named}.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _modified(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
