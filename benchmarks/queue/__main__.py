"""Measure AsyncFlow's queue and raw zmq sockets with the same work, and print their ratios with the limits.

    python benchmarks/queue                                      # all cases with a limit
    python benchmarks/queue --cases million claims --rounds 3    # some cases

Each round runs each case for each implementation in turn, so that a drift of the machine affects all of them. The exit
status is 1 for wrong bytes, lost or doubled rows, and failed runs. Missed limits are printed but are not failures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import report
from environment import RAY_ENV, peer_python
from implementations import KINDS, PEER, RAW
from report import MEMORY, PLAIN, SECURED, SECURED_MEMORY
from samples import read

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASE_S = 900.0

SHARED_CASES = {
    "data": ["data_plane.py"],
    "data2048": ["data_plane.py", "--repeats", "7", "--rows", "2048", "--chunk", "128"],
    "equal": ["data_plane.py", "--repeats", "5", "--units", "1", "--length", "2304"],
    "claims": ["claims.py"],
    "sample": ["one_sample.py"],
    "pipeline": ["pipeline.py"],
    "rate": ["pipeline.py", "--rows", "200", "--rate", "20"],
}
"""The cases that every implementation runs: script and arguments, by name."""
BYTES = ("data", "data2048", "equal")
"""The shared cases that also run with shared memory and Mooncake."""
OWN_CASES = {
    "memory": ["idle_memory.py"],
    "volume": ["volume.py"],
    "links": ["links.py"],
    "million": ["million.py"],
    "controllers": ["stopped_controller.py"],
}
"""The cases that only AsyncFlow runs, in the first round."""
WITHOUT_BARS = ("million", "controllers")
"""The own cases that run only if the command line names them."""


def commands(chosen: argparse.Namespace, number: int) -> Iterator[list[str]]:
    """Yield the command lines of a round."""
    for case, words in SHARED_CASES.items():
        for kind in chosen.implementations if case in chosen.cases else ():
            if kind in (PLAIN, SECURED, RAW, PEER) or case in BYTES:
                python = str(peer_python()) if kind == PEER else sys.executable
                yield [python, str(HERE / words[0]), kind, *words[1:]]
    for case, words in OWN_CASES.items():
        for kind in (PLAIN, SECURED) if case in chosen.cases and number == 0 else ():
            if kind in chosen.implementations:
                yield [sys.executable, str(HERE / words[0]), kind, *words[1:]]


def run(chosen: argparse.Namespace, out: Path) -> list[str]:
    """Run all rounds; return a description of each failure."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **RAY_ENV, "PYTHONPATH": path, "BENCH_OUT": str(out)}
    failed: list[str] = []
    for number in range(chosen.rounds):
        for argv in commands(chosen, number):
            words = f"round {number + 1}: {' '.join([Path(argv[1]).stem, *argv[2:]])}"
            began = time.monotonic()
            problem = _run_one(argv, env)
            print(f"{words}: {problem or f'{time.monotonic() - began:.0f} s'}", flush=True)
            if problem:
                failed.append(f"{words}: {problem}")
    return failed


def _run_one(argv: Sequence[str], env: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            argv,
            check=False,
            env=env,
            timeout=CASE_S,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: it took more than {CASE_S:.0f} s"
    return f"FAILED with status {done.returncode}\n{done.stderr[-1500:]}" if done.returncode else ""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    default = [PLAIN, SECURED, MEMORY, SECURED_MEMORY, RAW]
    options.add_argument("--implementations", nargs="+", default=default, choices=KINDS)
    cases = [*SHARED_CASES, *OWN_CASES]
    barred = [case for case in cases if case not in WITHOUT_BARS]
    options.add_argument("--cases", nargs="+", default=barred, choices=cases, help=f"by default {' '.join(barred)}")
    options.add_argument("--out", type=Path, default=ROOT / ".bench" / f"queue-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    options.add_argument("--report", type=Path, help="only print the tables of these earlier results")
    chosen = options.parse_args()
    failed: list[str] = []
    if chosen.report is None:
        chosen.out.parent.mkdir(exist_ok=True)
        failed = run(chosen, chosen.out.resolve())
    results = read(chosen.report or chosen.out)
    tables = report.ratios(results), report.own(results)
    print("", *(table.text() for table in tables), f"{sum(table.met for table in tables)} bars are met", sep="\n\n")
    for missed in [missed for table in tables for missed in table.missed]:
        print(f"missed: {missed}")
    wrong = [*report.faults(results), *failed]
    for words in wrong:
        print(f"WRONG: {words}")
    print(f"results: {chosen.report or chosen.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
