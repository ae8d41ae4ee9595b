"""An engine as processor sharing, in virtual time: as ``rollout.engines.simulated``, without an event loop.

Invariants: at most ``slots`` sequences run at once; those that run advance at one common rate and stand still while
weights are loaded; n of them take token_s + share_s * (n - 1) for a token of each.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from asyncflow.sim.models import EngineModel
from asyncflow.sim.rows import SimulatedRow

_ROUNDING = 1e-9


class Engine:
    """The sequences of one instance. Its clock counts seconds as they would be for a sequence that runs alone."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._share = model.share
        self._running: list[tuple[float, int, SimulatedRow]] = []
        self._waiting: deque[SimulatedRow] = deque()
        self._begun = 0
        self._clock = 0.0
        self._at = 0.0
        self._stopped = False

    def begin(self, row: SimulatedRow, now: float) -> None:
        """Run a sequence, or have it wait for a slot."""
        if len(self._running) < self._model.slots:
            self._advance(now)
            self._run(row)
        else:
            self._waiting.append(row)

    @property
    def next_end(self) -> float | None:
        """When the next sequence ends if nothing changes, None where none does."""
        if not self._running or self._stopped:
            return None
        return self._at + max(0.0, self._running[0][0] - self._clock) * self._slowdown

    def ended(self, now: float) -> list[SimulatedRow]:
        """Return the sequences that have ended by now; their slots go to those that wait."""
        self._advance(now)
        rows = []
        while self._running and self._running[0][0] <= self._clock + _ROUNDING:
            rows.append(heapq.heappop(self._running)[2])
        for _ in range(min(len(rows), len(self._waiting))):
            self._run(self._waiting.popleft())
        return rows

    def stop(self, now: float) -> None:
        """Stand still."""
        self._advance(now)
        self._stopped = True

    def go_on(self, now: float) -> None:
        """Stand still no more."""
        self._at, self._stopped = now, False

    def rows(self) -> Iterator[SimulatedRow]:
        """Return all that runs or waits."""
        yield from (row for _, _, row in self._running)
        yield from self._waiting

    def made(self, row: SimulatedRow, now: float) -> int:
        """Return how many tokens a sequence has now; the last one is never there before the end."""
        self._advance(now)
        if row.ends <= row.began:
            return row.made
        share = (self._clock - row.began) / (row.ends - row.began)
        return row.made + min(row.response_tokens - row.made - 1, int((row.response_tokens - row.made) * share))

    def recompute_s(self, now: float) -> float:
        """Return the seconds in which the caches of all that runs are computed again."""
        if not self._model.recompute_s or not self._running:
            return 0.0
        tokens = sum(row.tokens + self.made(row, now) for _, _, row in self._running)
        return self._model.recompute_s * tokens

    def _run(self, row: SimulatedRow) -> None:
        model = self._model
        left = row.response_tokens - row.made
        row.began = self._clock
        row.ends = self._clock + model.prefill_s + row.made * model.recompute_s + left * model.token_s
        self._begun += 1
        heapq.heappush(self._running, (row.ends, self._begun, row))

    def _advance(self, now: float) -> None:
        if now > self._at:
            if not self._stopped and self._running:
                self._clock += (now - self._at) / self._slowdown
            self._at = now

    @property
    def _slowdown(self) -> float:
        return 1 + self._share * max(0, len(self._running) - 1)
