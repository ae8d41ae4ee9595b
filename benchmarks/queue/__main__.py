"""Runs all benchmarks of the queue for us, the peer and raw sockets, interleaved, and prints the table.

    python benchmarks/queue --shared ../shared/bench/queue --rounds 5

Each round runs each case for each peer in turn, so that whatever drifts on the machine hits all of them. Exit status 1
for wrong bytes, lost or doubled rows, and for runs that failed; bars that are missed are named, and are no failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bars import MOONCAKE, OURS, PEER, RAW, SHARED
from environment import RAY_ENV, peer_python
from lines import read
from report import against_raw, faults, own_cases

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASE_S = 900.0

SHARED_CASES = {
    "data": ["bench_dataplane.py", "--units", "1", "2", "--reps", "9"],
    "data2048": ["bench_dataplane.py", "--units", "1", "2", "--reps", "7", "--rows", "2048", "--chunk", "128"],
    "dense": ["bench_dataplane.py", "--units", "1", "2", "--reps", "5", "--dense", "2304"],
    "control": ["bench_control.py"],
    "putlat": ["bench_putlat.py", "--units", "1", "2"],
    "pipeline": ["bench_pipeline.py", "--rows", "6000"],
    "rate": ["bench_pipeline.py", "--rows", "200", "--rate", "20"],
    "tiny": ["bench_pipeline.py", "--rows", "400", "--mode", "tiny"],
    "inflight": ["bench_pipeline.py", "--rows", "400", "--inflight", "8"],
    "sixteen": ["bench_pipeline.py", "--rows", "400", "--train-n", "16"],
}
"""Those of the shared ``run_all.py``, by name."""
SHARED_MEMORY_CASES = ("data", "data2048", "dense")
"""Those of them that measure shared memory too."""
OWN_CASES = {
    "claims": (["own_claims.py"], 0),
    "memory": (["own_memory.py"], 1),
    "volume": (["own_volume.py"], 1),
    "links": (["own_links.py"], 1),
    "million": (["own_million.py"], 0),
    "shards": (["own_shards.py"], 1),
}
"""Ours, by name, and in how many rounds they run (0: in all)."""


def commands(chosen: argparse.Namespace, number: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the runs of a round: whose they are, and their command lines."""
    shared = Path(chosen.shared)
    for case, words in SHARED_CASES.items():
        if case in chosen.cases:
            for peer in chosen.peers:
                if peer in SHARED.values() and case not in SHARED_MEMORY_CASES:
                    continue
                python = str(peer_python()) if peer == PEER else sys.executable
                yield peer, [python, str(shared / words[0]), "--peer", peer, *words[1:]]
    for case, (words, rounds) in OWN_CASES.items():
        if case in chosen.cases and (not rounds or number < rounds):
            for keys in ([], ["--keys"]):
                if OURS["keys" if keys else "plain"] in chosen.peers:
                    yield "asyncflow", [sys.executable, str(HERE / words[0]), *words[1:], *keys]


def run(chosen: argparse.Namespace, out: Path) -> list[str]:
    """Run all rounds; give what failed."""
    path = os.pathsep.join([str(HERE), str(chosen.shared), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **RAY_ENV, "PYTHONPATH": path, "BENCH_OUT": str(out)}
    failed: list[str] = []
    for number in range(chosen.rounds):
        for peer, argv in commands(chosen, number):
            words = f"round {number + 1}: {peer}: {' '.join(Path(argv[1]).name.split() + argv[2:])}"
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
    options.add_argument("--shared", type=Path, default=ROOT.parent / "shared" / "bench" / "queue")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--peers", nargs="+", default=[*OURS.values(), *SHARED.values(), PEER, RAW])
    options.add_argument("--cases", nargs="+", default=[*SHARED_CASES, *OWN_CASES], metavar="CASE")
    options.add_argument("--out", type=Path, default=ROOT / ".bench" / f"queue-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    options.add_argument("--report", type=Path, help="print the table of an earlier run's results, and run nothing")
    chosen = options.parse_args()
    failed: list[str] = []
    if chosen.report is None:
        if not (chosen.shared / "peer.py").exists():
            options.error(f"{chosen.shared} holds no peer.py: say where the shared benchmarks are (--shared)")
        chosen.shared = chosen.shared.resolve()
        chosen.out.parent.mkdir(exist_ok=True)
        failed = run(chosen, chosen.out)
    results = read(chosen.report or chosen.out)
    known = {result["peer"] for result in results}
    columns = {words: peer for words, peer in {**OURS, **SHARED, **MOONCAKE}.items() if peer in known}
    ratios, own = against_raw(results, columns), own_cases(results)
    print(f"\n{ratios.text()}\n\n{own.text()}\n\n{ratios.met + own.met} bars are met")
    for missed in [*ratios.missed, *own.missed]:
        print(f"missed: {missed}")
    wrong = [*faults(results), *failed]
    for words in wrong:
        print(f"WRONG: {words}")
    print(f"results: {chosen.report or chosen.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
