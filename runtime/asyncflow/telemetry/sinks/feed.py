"""The process that feeds one sink: it reads the files of a run, and writes new lines to the sink.

``metrics.jsonl`` and ``events.jsonl`` are the only source, so a sink can be fed during the run, after it, or again
after a failure. The position in the files is stored in ``sinks/KIND/cursor.json``.

Invariants: a line is read once it is complete, in chronological order over both files. Flushed lines are not written
again, except lines of a process that was killed before it stored its position. At most one process at a time feeds a
sink of a run.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncflow.api.job import RLJob
from asyncflow.durable import make_folder, write_whole
from asyncflow.errors import AsyncFlowError
from asyncflow.plugins import read_options
from asyncflow.telemetry.lines import new_lines
from asyncflow.telemetry.sinks.base import WHERE, MetricSink, SinkRun, sink_class
from asyncflow.telemetry.sinks.names import evaluation_values, step_values

METRICS, EVENTS, SUMMARY = "metrics.jsonl", "events.jsonl", "summary.json"
AGAIN, EVALUATION = "step made again", "evaluation"
CURSOR = "cursor.json"


class Cursor(Struct):
    """Position of a sink. metrics, events: bytes read of each file; step: the newest step written."""

    metrics: int = 0
    events: int = 0
    step: int = 0


class SinkFeed:
    """Feeds ``sink``. samples: number per prompt in an evaluation, without the greedy one."""

    def __init__(self, sink: MetricSink, *, run: SinkRun, samples: int) -> None:
        self._sink = sink
        self._run = run
        self._samples = samples
        self._file = run.own / CURSOR
        self._cursor = _read(self._file)

    def more(self) -> int:
        """Write the new lines, and return their number."""
        folder, cursor = self._run.folder, self._cursor
        steps, cursor.metrics = new_lines(folder / METRICS, cursor.metrics)
        events, cursor.events = new_lines(folder / EVENTS, cursor.events)
        known = [line for line in events if line.get("event") in (AGAIN, EVALUATION)]
        in_order = sorted([*known, *steps], key=lambda line: float(line["at"]))
        for line in in_order:
            self._write(line)
        if in_order:
            self._sink.flush()
            write_whole(self._file, msgspec.json.encode(cursor))
        return len(in_order)

    def _write(self, line: dict[str, Any]) -> None:
        step, at, cursor = int(line["step"]), float(line["at"]), self._cursor
        if line.get("event") == AGAIN:
            if step <= cursor.step:
                self._sink.rewind(step)
                cursor.step = step - 1
        elif line.get("event") == EVALUATION:
            self._sink.write(step, evaluation_values(line, samples=self._samples), at=at)
        elif step > cursor.step:
            self._sink.write(step, step_values(line), at=at)
            cursor.step = step


def feed(job: RLJob, *, kind: str, folder: Path, follow: bool) -> int:
    """Write the new lines in the folder of a run to one sink of its job; return their number.

    follow: repeat this at each line of standard input, until its end. Raises AsyncFlowError if another process feeds
    the same sink, and any error of the sink.
    """
    spec = next(sink for sink in job.spec.telemetry.sinks if sink.kind == kind)
    run = SinkRun.of(job, kind=kind, folder=folder)
    make_folder(run.own)
    with _locked(run.own / "lock"):
        kind_class = sink_class(kind)
        sink = kind_class(read_options(spec.options, kind_class.Options, where=WHERE), run=run)
        evaluation = job.spec.evaluation
        feeding = SinkFeed(sink, run=run, samples=evaluation.samples if evaluation is not None else 0)
        written = feeding.more()
        while follow and sys.stdin.buffer.readline():
            written += feeding.more()
        written += feeding.more()
        sink.close(_phase(folder / SUMMARY))
    return written


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        hint = "The sink is fed while the run is active; try again after its end"
        raise AsyncFlowError("another process writes to this sink", where=str(lock.parent), hint=hint) from error
    finally:
        os.close(descriptor)


def _read(path: Path) -> Cursor:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Cursor)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Cursor()


def _phase(path: Path) -> str:
    try:
        return str(msgspec.json.decode(path.read_bytes())["phase"])
    except (FileNotFoundError, msgspec.MsgspecError, KeyError, TypeError):
        return ""
