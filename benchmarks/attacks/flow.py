"""Producers and consumers that move rows through an open partition during an attack, and check each row's delivery."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jobs import Harmed

from asyncflow.errors import AsyncFlowError, StaleHandle
from asyncflow.queue.blocking import BlockingPartition, BlockingQueue

PARTITION, TASK = "flow", "count"
_CALL_S = 60.0
_FLOW_S = 300.0
_QUIET_S = 6.0
"""Seconds without a ready row after which all rows have been consumed: two leases."""


class Flow:
    """Producers and consumers of one queue. connect: creates a client for each of them."""

    def __init__(self, connect: Callable[[], BlockingQueue]) -> None:
        self._connect = connect
        self._stop = threading.Event()
        self._all_put = threading.Event()
        self._lock = threading.Lock()
        self.put: set[int] = set()
        self.doubtful: set[int] = set()
        self.completed: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()

    def run(self, meanwhile: Callable[[], None], *, producers: int = 2, consumers: int = 2) -> None:
        """Move rows while ``meanwhile`` runs and until all are consumed. Raises Harmed unless each is consumed once."""
        self.partition().declare(TASK, needs=["n"], lease_s=3.0)
        with ThreadPoolExecutor(producers + consumers) as threads:
            made = [threads.submit(self._produce, 1_000_000 * (1 + number)) for number in range(producers)]
            used = [threads.submit(self._consume) for _ in range(consumers)]
            try:
                meanwhile()
            finally:
                self._stop.set()
            try:
                for producer in made:
                    producer.result()
            finally:
                self._all_put.set()
            for consumer in used:
                consumer.result()
        self._judge()

    def partition(self) -> BlockingPartition:
        """Return the partition, with a client of its own."""
        return BlockingPartition(self._connect(), PARTITION)

    def _produce(self, first: int) -> None:
        scores = self.partition()
        while not self._stop.is_set():
            values = list(range(first, first + 1 + first % 5))
            first += len(values)
            try:
                scores.put({"n": values}, timeout=_CALL_S)
                known = self.put
            except AsyncFlowError as error:
                self._note(error)
                known = self.doubtful
            with self._lock:
                known |= set(values)
            time.sleep(0.001)

    def _consume(self) -> None:
        scores = self.partition()
        quiet_since = started = time.monotonic()
        while time.monotonic() - quiet_since < _QUIET_S:
            if time.monotonic() - started > _FLOW_S:
                raise Harmed(f"rows still came, or claims failed, after {_FLOW_S:g} s: {dict(self.errors)}")
            values: list[int] = []
            try:
                rows = scores.claim(TASK, 16, timeout=1.0)
                if not rows:
                    quiet_since = quiet_since if self._all_put.is_set() else time.monotonic()
                    continue
                values = [int(value) for value in scores.get(rows, ["n"], timeout=_CALL_S)["n"]]
                done = scores.complete(rows, timeout=_CALL_S)
                with self._lock:
                    self.completed.update(value for value, ok in zip(values, done, strict=True) if ok)
            except StaleHandle as error:
                self._note(error)
            except AsyncFlowError as error:
                self._note(error)
                with self._lock:
                    self.doubtful |= set(values)
            quiet_since = time.monotonic()

    def _note(self, error: AsyncFlowError) -> None:
        with self._lock:
            self.errors[type(error).__name__] += 1

    def _judge(self) -> None:
        lost = [value for value in self.put - self.doubtful if not self.completed[value]]
        doubled = [value for value, times in self.completed.items() if times > 1]
        if lost or doubled:
            raise Harmed(
                f"of {len(self.put)} rows {len(lost)} are lost, {len(doubled)} came twice: {lost[:3] + doubled[:3]}"
            )
        if len(self.put) < 100:
            raise Harmed(f"only {len(self.put)} rows were put: {dict(self.errors)}")
