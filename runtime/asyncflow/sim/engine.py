"""A processor-sharing engine in virtual time: same behaviour as ``rollout.engines.simulated``, without an event loop.

Invariants: at most ``slots`` sequences run concurrently. Running sequences advance at one common rate and pause while
weights are loaded. With n running sequences, one token of each takes token_s + share_s * (n - 1).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from asyncflow.sim.models import EngineModel
from asyncflow.sim.rows import SimulatedRow

_ROUNDING = 1e-9


class Engine:
    """The sequences of one instance. Its clock counts the seconds that a sequence would take if it ran alone."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._share = model.share
        self._running: list[tuple[float, int, SimulatedRow]] = []
        self._waiting: deque[SimulatedRow] = deque()
        self._started = 0
        self._clock = 0.0
        self._at = 0.0
        self._stopped = False

    def start(self, row: SimulatedRow, now: float) -> None:
        """Run a sequence, or queue it for a slot."""
        if len(self._running) < self._model.slots:
            self._advance(now)
            self._run(row)
        else:
            self._waiting.append(row)

    @property
    def next_end(self) -> float | None:
        """Time at which the next sequence ends if nothing changes, None if none ends."""
        if not self._running or self._stopped:
            return None
        return self._at + max(0.0, self._running[0][0] - self._clock) * self._slowdown

    def ended(self, now: float) -> list[SimulatedRow]:
        """Return the sequences that have ended by now, and give their slots to waiting sequences."""
        self._advance(now)
        rows = []
        while self._running and self._running[0][0] <= self._clock + _ROUNDING:
            rows.append(heapq.heappop(self._running)[2])
        for _ in range(min(len(rows), len(self._waiting))):
            self._run(self._waiting.popleft())
        return rows

    def stop(self, now: float) -> None:
        """Pause all sequences."""
        self._advance(now)
        self._stopped = True

    def resume(self, now: float) -> None:
        """Resume all sequences."""
        self._at, self._stopped = now, False

    def rows(self) -> Iterator[SimulatedRow]:
        """Yield all running and waiting sequences."""
        yield from (row for _, _, row in self._running)
        yield from self._waiting

    def generated(self, row: SimulatedRow, now: float) -> int:
        """Return the number of tokens of a sequence now; the last one is never counted before the end."""
        self._advance(now)
        if row.ends <= row.started:
            return row.generated
        share = (self._clock - row.started) / (row.ends - row.started)
        return row.generated + min(
            row.response_tokens - row.generated - 1, int((row.response_tokens - row.generated) * share)
        )

    def recompute_s(self, now: float) -> float:
        """Return the seconds to recompute the caches of all running sequences."""
        if not self._model.recompute_s or not self._running:
            return 0.0
        tokens = sum(row.tokens + self.generated(row, now) for _, _, row in self._running)
        return self._model.recompute_s * tokens

    def _run(self, row: SimulatedRow) -> None:
        model = self._model
        left = row.response_tokens - row.generated
        row.started = self._clock
        row.ends = self._clock + model.prefill_s + row.generated * model.recompute_s + left * model.token_s
        self._started += 1
        heapq.heappush(self._running, (row.ends, self._started, row))

    def _advance(self, now: float) -> None:
        if now > self._at:
            if not self._stopped and self._running:
                self._clock += (now - self._at) / self._slowdown
            self._at = now

    @property
    def _slowdown(self) -> float:
        return 1 + self._share * max(0, len(self._running) - 1)
