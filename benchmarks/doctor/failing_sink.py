"""A sink whose server is unreachable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow.telemetry.sinks.base import MetricSink, SinkRun


class Failing(MetricSink):
    """A sink that fails when it is opened."""

    def __init__(self, _options: Any, *, run: SinkRun) -> None:
        raise ConnectionError(f"no server takes the figures of {run.name}")

    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Never be called."""

    def rewind(self, step: int) -> None:
        """Never be called."""

    def flush(self) -> None:
        """Never be called."""

    def close(self, phase: str) -> None:
        """Never be called."""
