"""Check that the doctor finds the injected fault of each faulty run, and nothing in healthy runs.

    python benchmarks/doctor                              # all of them: about ten minutes
    python benchmarks/doctor --only slow-ledger quickstart
    python benchmarks/doctor --output build/doctor        # keep the folders of the runs

Prints a line for each run: the injected fault and the findings. The exit status is 1 if a fault was not found, or if a
healthy run has a finding. Other findings that a fault causes are printed and do not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from cases import FAULTS, HEALTHY
from runs import examined


def main() -> int:
    """Run the chosen cases, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[*FAULTS, *HEALTHY], choices=[*FAULTS, *HEALTHY])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        output = options.output or Path(made)
        wrong = [name for name in options.only if not _one(name, output / name)]
    faults = [name for name in options.only if name in FAULTS]
    found = len(faults) - sum(name in FAULTS for name in wrong)
    print(
        f"{found} of {len(faults)} planted faults found; {sum(name in HEALTHY for name in wrong)} of "
        f"{len(options.only) - len(faults)} healthy runs have a finding"
    )
    return 1 if wrong else 0


def _one(name: str, folder: Path) -> bool:
    """Carry out one run and print its line; return whether the findings are as expected."""
    planted, began = {**FAULTS, **HEALTHY}[name], time.monotonic()
    try:
        found = [each["name"] for each in examined(planted, folder)]
    except RuntimeError as error:
        print(f"{name:<18} FAILED: {error}", flush=True)
        return False
    right = planted.finds in found if planted.finds else not found
    others = [each for each in found if each != planted.finds]
    result = f"{planted.finds or 'nothing'} {'ok' if right else 'MISSED' if planted.finds else 'WRONG'}"
    also = f"; also {', '.join(others)}" if others else ""
    print(f"{name:<18} {time.monotonic() - began:5.0f} s  {result}{also}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(main())
