"""Measure the speedup of asynchronous modes: real driver, queue, ledger, trainer loop and weights, simulated engines.

    python benchmarks/bench_async                                            # the whole matrix: 240 runs, many hours
    python benchmarks/bench_async --only periodic delayed --ratios 1 --seeds 1
    python benchmarks/bench_async --table                                    # only the table of the existing results

Every mode has the same load. Results are lines of OUTPUT/results.jsonl; a point with a result is not run again. Each
run's folder has its chart, timeline.html. Prints a table, and exits with 1 if a limit is missed. Runs mostly wait, so
``--jobs`` of them can run at the same time. A run takes 0.3 to 0.5 of a core; if it has to wait for a core, its times
are too long.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_async.points import MANIFEST, MODES, RATIOS, SIGMAS, WITHOUT, Point, matrix
from bench_async.results import Result, Results, bars, lines_of, predictions, report, table
from emulation import emulate

from asyncflow.commands.timeline import write_pictures
from asyncflow.telemetry.spans import read_timeline
from asyncflow.timeline.causes import attribute


def measured(point: Point, output: Path) -> Result:
    """Run a point, and draw its charts into its folder."""
    folder = output / point.name
    run = emulate(MANIFEST, folder, point.settings)
    write_pictures(folder, attribute(read_timeline(folder)), title=point.name)
    walls = point.iterations_of([line["wall_s"] for line in run.steps])
    return Result(
        point=point,
        walls=walls,
        waited=fmean(point.iterations_of([line["wait_s"] for line in run.steps])),
        lag=fmean(line["staleness_start_mean"] for line in run.steps[WITHOUT * point.steps_each :]),
        lost=run.lost,
        load=run.load,
    )


def main() -> int:
    """Run the missing points, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench-async"))
    parser.add_argument("--only", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE")
    parser.add_argument("--sigmas", nargs="+", type=float, default=SIGMAS)
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--generation", type=float, default=5.0, help="T_gen, seconds")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output / "results.jsonl")
    points = matrix(
        modes=options.only,
        sigmas=options.sigmas,
        ratios=options.ratios,
        seeds=options.seeds,
        iterations=options.iterations,
        generation_s=options.generation,
    )

    def make(point: Point) -> None:
        result = measured(point, options.output)
        results.add(result)
        print(f"{point.name}: {result.seconds:.2f} s, load {result.load:.1f}", flush=True)

    if not options.table:
        with ThreadPoolExecutor(options.jobs) as pool:
            for _ in pool.map(make, results.missing(points)):
                pass
    found = [result for result in results.all if result.point in points]
    simulated = predictions((result.point for result in found), options.output / "simulated.jsonl")
    lines = lines_of(found, simulated)
    for row in table(lines):
        print(row)
    return 0 if report(bars(lines), say=print) else 1


if __name__ == "__main__":
    sys.exit(main())
