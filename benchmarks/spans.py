"""Measure the cost of recording spans: CPU time for the spans of a step, relative to the time of a step, and memory.

    python benchmarks/spans.py [RUN] [--bar 0.01]

RUN is the folder of a run, by default a new run of the quickstart. The program measures the CPU time of a main span and
of a span beside, each written to a file. The number of spans per step comes from the run's files, for the process with
the highest cost. Prints one line of JSON; the exit status is 1 if the share is above the limit, or if memory grew.

Invariant: the cost of a span is CPU time, so other work on the machine does not matter. The time of a step is the
median of the run, so its first steps, which load and compile, do not matter.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncflow.telemetry.span_file import read_recording
from asyncflow.telemetry.spans import ENDING, FOLDER, Spans

_EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
_SPANS = 20_000
_ROUNDS = 5


def cost_s(folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of a main span and of a span beside: medians of several rounds, each with a new file."""
    mains, besides = [], []
    for number in range(_ROUNDS):
        spans = Spans(folder / f"{number}{ENDING}", role="rollout")
        began = time.process_time()
        for step in range(_SPANS):
            spans.enter("generate", step=step)
        middle = time.process_time()
        for step in range(_SPANS):
            with spans.background("fetch", step=step):
                pass
        ended = time.process_time()
        spans.close()
        mains.append((middle - began) / _SPANS)
        besides.append((ended - middle) / _SPANS)
    return statistics.median(mains), statistics.median(besides)


def growth_bytes(folder: Path) -> int:
    """Return the growth in bytes of the process and its file while spans overwrite the full file several times."""
    spans, path = Spans(folder / f"flat{ENDING}", role="rollout", most_bytes=1 << 20), folder / f"flat{ENDING}"

    def fill(many: int) -> int:
        for step in range(many):
            spans.enter("generate", step=step)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + path.stat().st_size

    before = fill(30_000)
    return fill(260_000) - before


def main() -> int:
    """Run the benchmark, print the result and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--bar", type=float, default=0.01)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run = options.run or folder / "run"
        if options.run is None:
            command = [sys.executable, "-m", "asyncflow", "run", str(_EXAMPLE), "--output", str(run)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        step_s = statistics.median(line["wall_s"] for line in steps)
        main_s, beside_s = cost_s(folder)
        costs = {}
        for path in sorted((run / FOLDER).glob(f"*{ENDING}")):
            if (read := read_recording(path)) is not None:
                spent = len(read.track.main) * main_s + len(read.track.background) * beside_s
                costs[read.track.name] = costs.get(read.track.name, 0.0) + spent / len(steps)
        grown = growth_bytes(folder)
    most = max(costs, key=lambda name: costs[name])
    figures = {
        "step_s": round(step_s, 4),
        "main_us": round(main_s * 1e6, 2),
        "beside_us": round(beside_s * 1e6, 2),
        "process": most,
        "share_of_a_step": round(costs[most] / step_s, 5),
        "share_of_a_step_all_processes": round(sum(costs.values()) / step_s, 5),
        "grown_bytes": grown,
    }
    print(json.dumps(figures))
    return int(costs[most] / step_s > options.bar or grown > 1 << 20)


if __name__ == "__main__":
    sys.exit(main())
