"""Effect of a stopped controller on the tasks of the other controllers: p99 of their claims, compared with no stop.

Three controllers have one task each. Each task has a consumer process, which claims and acknowledges one row at a time.
Each controller in turn runs for one window and is stopped (SIGSTOP) for the next. The result is the median, over the
windows of a kind, of the p99 of the two other consumers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import statistics
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from report import SECURED
from samples import emit
from servers import Handle, Servers, servers

from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

P = "controllers"
TASKS = ["first", "second", "third"]
CONTROLLERS = 3
BATCH = 5000
CALL_S = 60.0


def consume(handle: Handle, task: str, pause_s: float, over: Event, file: Path) -> None:
    """Claim rows until ``over`` is set; save the start and duration of each claim to ``file``, in seconds."""
    began: list[float] = []
    took: list[float] = []
    with handle.connect() as queue:
        while not over.is_set():
            start = time.monotonic()
            claimed = queue.claim(partition=P, task=task, max_rows=1, timeout=CALL_S)
            began.append(start)
            took.append(time.monotonic() - start)
            assert claimed.rows, "there were too few rows"
            assert queue.complete(claimed.rows, {}, timeout=CALL_S) == [True]
            time.sleep(pause_s)
    np.save(file, np.array([began, took]))


def fill(queue: BlockingQueue, rows: int) -> list[int]:
    """Declare the tasks and put the rows; return the controller of each task."""
    specs = [TaskSpec(partition=P, name=name, needs=["x"], lease_s=30.0) for name in TASKS]
    queue.declare(specs, timeout=CALL_S)
    for start in range(0, rows, BATCH):
        count = min(BATCH, rows - start)
        queue.put(P, {"x": Jagged.from_rows(np.arange(count).reshape(-1, 1), "int64")}, timeout=CALL_S)
    return [1, 2, 0]


def windows(made: Servers, rounds: int, window_s: float) -> list[tuple[int, bool, float]]:
    """Stop each controller in turn.

    Return, for each window, the controller, whether it was stopped, and the start of the window.
    """
    seen = []
    for _ in range(rounds):
        for victim in range(CONTROLLERS):
            process = made.processes[f"controller{victim}"]
            for stopped in (False, True):
                if stopped:
                    process.send_signal(signal.SIGSTOP)
                seen.append((victim, stopped, time.monotonic()))
                time.sleep(window_s)
            process.send_signal(signal.SIGCONT)
            time.sleep(window_s / 2)
    return seen


def ratios(
    seen: list[tuple[int, bool, float]], files: list[Path], places: list[int], window_s: float
) -> dict[str, object]:
    """Return the p99 of claims in running and stopped windows, and their ratio, for each stopped controller."""
    claims = [np.load(file) for file in files]
    result: dict[str, object] = {}
    everything: dict[bool, list[float]] = {False: [], True: []}
    for victim in range(CONTROLLERS):
        p99: dict[bool, list[float]] = {False: [], True: []}
        for controller, stopped, start in seen:
            if controller != victim:
                continue
            for place, (began, took) in zip(places, claims, strict=True):
                inside = took[(began >= start) & (began < start + window_s)]
                if place != victim:
                    assert len(inside) > 100, f"controller {victim} stopped: {place} granted {len(inside)} claims"
                    p99[stopped].append(float(np.quantile(inside, 0.99)))
        for stopped in p99:
            everything[stopped] += p99[stopped]
        running, stopped_ = statistics.median(p99[False]), statistics.median(p99[True])
        result[f"stopped{victim}"] = {
            "running_ms": round(1e3 * running, 3),
            "stopped_ms": round(1e3 * stopped_, 3),
            "ratio": round(stopped_ / running, 3),
        }
    result["ratio"] = round(statistics.median(everything[True]) / statistics.median(everything[False]), 3)
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--window", type=float, default=2.0, help="seconds")
    options.add_argument("--pause", type=float, default=0.002, help="seconds between two claims of a consumer")
    options.add_argument("implementation")
    chosen = options.parse_args()
    seconds = chosen.rounds * CONTROLLERS * 2.5 * chosen.window + 10
    spawn = multiprocessing.get_context("spawn")
    with servers(controllers=CONTROLLERS, secured=chosen.implementation == SECURED) as made:
        with made.handle.connect() as queue:
            places = fill(queue, rows=int(seconds / (chosen.pause + 0.0005)))
        over, files = spawn.Event(), [made.folder / f"{task}.npy" for task in TASKS]
        consumers = [
            spawn.Process(target=consume, args=(made.handle, task, chosen.pause, over, file))
            for task, file in zip(TASKS, files, strict=True)
        ]
        for consumer in consumers:
            consumer.start()
        time.sleep(5.0)
        seen = windows(made, chosen.rounds, chosen.window)
        over.set()
        for consumer in consumers:
            consumer.join(CALL_S)
            assert consumer.exitcode == 0
        measured = ratios(seen, files, places, chosen.window)
        audit = made.audit()
        assert audit.ok, audit.problems
    case = {"case": "stopped controller", "implementation": chosen.implementation, "rounds": chosen.rounds}
    emit({**case, **measured})


if __name__ == "__main__":
    main()
