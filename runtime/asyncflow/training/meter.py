"""The one place where a rank says what it does: its seconds by cause, for reports and metrics, and its spans.

Invariant: what is counted is recorded, as the same seconds; the causes of a rank never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from asyncflow.telemetry.metrics import BusyClock
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.timeline.tracks import Kind

Cause = Literal["compute", "optimizer", "checkpoint", "publish", "wait"]
_WAITS: Final = ("publish", "wait")
_WHOLE: Final = ("publish", "checkpoint")
"""Of a version that is there already; anything else makes the next one."""


class RankMeter:
    """Counts and records. busy: forward, backward, optimizer, and what checkpoints keep them waiting for; waits: for
    samples, and for a publication.
    """

    def __init__(self, spans: Spans = NO_SPANS) -> None:
        self.busy = BusyClock()
        self.waits = BusyClock()
        self.spans = spans

    @contextmanager
    def __call__(self, cause: Cause, *, step: int) -> Iterator[None]:
        """Count and record the body. step: that is being made, or saved, or published."""
        clock = self.waits if cause in _WAITS else self.busy
        kind: Kind = "idle" if cause == "wait" else cause
        waits, version = "claim" if cause == "wait" else "", step if cause in _WHOLE else step - 1
        with clock(cause), self.spans.main(kind, waits=waits, step=step, version=version):
            yield
