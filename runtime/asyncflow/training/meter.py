"""Accounting of a rank's time: seconds by cause, for reports and metrics, and spans.

Invariants: every counted interval is recorded as a span of the same length. The causes of a rank never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.timeline.tracks import Kind

Cause = Literal["compute", "optimizer", "checkpoint", "publish", "wait"]
_WAITS: Final = ("publish", "wait")
_EXISTING: Final = ("publish", "checkpoint")
"""Causes that process an existing version; all other causes belong to the computation of the next version."""


class RankMeter:
    """Counts and records a rank's time. busy: forward, backward, optimizer, and time blocked by checkpoints; waits:
    time spent waiting for samples or for a publication.
    """

    def __init__(self, spans: Spans = NO_SPANS) -> None:
        self.busy = BusyClock()
        self.waits = BusyClock()
        self.spans = spans

    @contextmanager
    def __call__(self, cause: Cause, *, step: int) -> Iterator[None]:
        """Count and record the duration of the block. step: the step that is computed, saved or published."""
        clock = self.waits if cause in _WAITS else self.busy
        kind: Kind = "idle" if cause == "wait" else cause
        waits, version = "claim" if cause == "wait" else "", step if cause in _EXISTING else step - 1
        with clock(cause), self.spans.main(kind, waits=waits, step=step, version=version):
            yield
