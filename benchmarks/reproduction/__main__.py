"""Compare figures published in papers with results of the real runtime and of the simulator.

    python benchmarks/reproduction asyncflow periodic verl mindspeed    # arithmetic and simulator
    python benchmarks/reproduction periodic --real                      # with real runs; mindspeed needs root

Prints a Markdown table for each paper. The exit status is 1 if a limit is missed. docs/reproduction.md lists the fitted
parameters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduction import ablation, mindspeed, periodic, verl
from reproduction.figures import Figure, table


def main() -> int:
    """Print the tables that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("asyncflow", "periodic", "verl", "mindspeed")
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--real", action="store_true", help="also carry out real runs, which take minutes")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduction"))
    parser.add_argument("--bench", type=Path, default=Path("runs/bench-async/results.jsonl"))
    options = parser.parse_args()
    folder = options.output if options.real else None
    makers: dict[str, Callable[[], Iterable[Figure]]] = {
        "asyncflow": lambda: ablation.figures(folder),
        "periodic": lambda: periodic.figures(folder, bench=options.bench),
        "verl": verl.figures,
        "mindspeed": lambda: mindspeed.figures(real=options.real),
    }
    met = True
    for name in options.names:
        found = list(makers[name]())
        print(f"\n## {name}\n")
        for row in table(found):
            print(row, flush=True)
        met = met and all(figure.met for figure in found)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
