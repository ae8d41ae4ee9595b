"""TensorBoard sink: event files that ``tensorboard --logdir`` shows, written without torch and without TensorFlow.

Invariant: each process writes its own file, so no file is damaged by another process; if steps are repeated, the file
states from which step on the previous values are invalid, and TensorBoard omits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import msgspec

from asyncflow.telemetry.sinks.base import MetricSink, SinkRun


class TensorBoardOptions(msgspec.Struct, frozen=True):
    """directory: of the event files; by default ``sinks/tensorboard`` in the folder of the run."""

    directory: str = ""


class TensorBoardSink(MetricSink):
    """Writes event files."""

    Options = TensorBoardOptions
    needs = {"tensorboard": "asyncflow[tensorboard]"}  # noqa: RUF012

    def __init__(self, options: TensorBoardOptions, *, run: SinkRun) -> None:
        writers = import_module("tensorboard.summary.writer.event_file_writer")
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        directory = Path(options.directory) if options.directory else run.own
        self._writer = writers.EventFileWriter(str(directory))
        self._at = 0.0

    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Write one event with all figures."""
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[value(tag=name, simple_value=one) for name, one in values.items()])
        self._writer.add_event(self._events.Event(wall_time=at, step=step, summary=summary))
        self._at = at

    def rewind(self, step: int) -> None:
        """Write an event that makes TensorBoard discard this step and later ones."""
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=self._at, step=step, session_log=session))

    def flush(self) -> None:
        """Flush the file."""
        self._writer.flush()

    def close(self, phase: str) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()
