"""Figures and events of a run since an earlier look, read from its files. Files in, JSON values out.

Invariants: whoever passes on the cursor of the last answer gets each line of ``metrics.jsonl`` and ``events.jsonl``
once; where a file was replaced, the answer begins anew and says so; an answer is bounded: of very many steps every n-th
is in it, and n is said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from asyncflow.api.job import RLJob
from asyncflow.driver.journal import EVENTS, METRICS, SUMMARY, read_summary
from asyncflow.driver.sample_files import SAMPLES, Purpose, sample_files
from asyncflow.telemetry.lines import new_lines

MOST_STEPS: Final = 4000
"""Steps of one answer."""
_TIMES: Final = ("at", "started", "ended")
_COMPONENTS: Final = "reward_components"


class ReadUpTo(msgspec.Struct, frozen=True, array_like=True):
    """Place up to which somebody has read: inode and bytes of each file, and when samples were last added.

    samples: modification time of their folder, nanoseconds.
    """

    metrics_file: int = 0
    metrics: int = 0
    events_file: int = 0
    events: int = 0
    samples: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` wrote; the beginning for anything else."""
        try:
            return msgspec.convert([int(part) for part in text.split("-")], cls)
        except (ValueError, msgspec.ValidationError):
            return cls()

    def __str__(self) -> str:
        return "-".join(map(str, msgspec.to_builtins(self)))


def changes(folder: Path, since: str) -> dict[str, Any]:
    """Return what the files of a run have that a reader at the cursor ``since`` has not seen ("": all of it).

    ``anew``: forget what was read before; ``steps``: by figure, its values in the order of the lines, None where a line
    lacks it; ``every``: of how many steps one is there; ``events``: lines; ``samples``: by purpose, the steps of which
    texts are kept, absent where nothing was added; ``summary``: None before the end.
    """
    before = ReadUpTo.parse(since)
    files = _inode(folder / METRICS), _inode(folder / EVENTS)
    anew = (before.metrics_file, before.events_file) != files
    if anew:
        before = ReadUpTo(metrics_file=files[0], events_file=files[1])
    steps, metrics = new_lines(folder / METRICS, before.metrics)
    events, told = new_lines(folder / EVENTS, before.events)
    added = _changed(folder / SAMPLES)
    every = -(-len(steps) // MOST_STEPS) or 1
    answer: dict[str, Any] = {
        "cursor": str(ReadUpTo(files[0], metrics, files[1], told, added)),
        "anew": anew,
        "steps": columns(steps[::-1][::every][::-1]),
        "every": every,
        "events": [event for event in events if isinstance(event.get("event"), str)],
        "summary": read_summary(folder / SUMMARY),
    }
    if added != before.samples:
        answer["samples"] = kept(folder)
    return answer


def columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return the numbers of ``lines`` by their name, those of components as ``component NAME``, in six digits."""
    rows = [dict(_numbers(line)) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def kept(folder: Path) -> dict[Purpose, list[int]]:
    """Return the steps of which samples are kept, by purpose."""
    found: dict[Purpose, list[int]] = {"train": [], "eval": []}
    for file in sample_files(folder):
        if file.step not in found[file.purpose][-1:]:
            found[file.purpose].append(file.step)
    return found


def facts(job: RLJob) -> dict[str, Any]:
    """Return in a few words what the job trains, and how."""
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


def _changed(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
