"""Runs one manifest twice, synchronously with one rollout and the same seed, and compares the last weights bit by bit.

python benchmarks/same_bits.py examples/quickstart.yaml --steps 15
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

SYNC = ["schedule.mode=sync", "schedule.update=sync", "schedule.maxStaleness=0", "rollout.replicas=1"]


def digest(manifest: Path, folder: Path, steps: int, extra: list[str]) -> str:
    """Run once and give the digest of the exported weights."""
    command = [sys.executable, "-m", "asyncflow", "run", str(manifest), "--output", str(folder), "--fresh"]
    settings = [*SYNC, f"algorithm.steps={steps}", *extra]
    subprocess.run([*command, *(w for s in settings for w in ("--set", s))], check=True, timeout=900, stdout=sys.stderr)
    return hashlib.sha256((folder / "export" / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    """Return 0 where both runs end with the same bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("runs/same-bits"))
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    digests = [
        digest(options.manifest, options.output / run, options.steps, options.set) for run in ("first", "second")
    ]
    print("\n".join(digests))
    print("the same bits" if digests[0] == digests[1] else "DIFFERENT")
    return int(digests[0] != digests[1])


if __name__ == "__main__":
    sys.exit(main())
