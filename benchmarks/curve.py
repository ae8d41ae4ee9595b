"""Draw a run's rewards and evaluations: ``python benchmarks/curve.py runs/smollm2 docs/guide/smollm2.png``."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from run_lines import evaluations, lines

from asyncflow.doctor.evidence import surviving


def main(folder: Path, picture: Path) -> None:
    """Draw ``folder``'s curve into ``picture``."""
    steps, evaluated = surviving(lines(folder)), evaluations(folder)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([s["step"] for s in steps], [s["reward"] for s in steps], color="0.7", label="training reward, each step")
    for name, words in (("accuracy", "accuracy, temperature 1"), ("greedy", "greedy")):
        axes.plot([e["step"] for e in evaluated], [e[name] for e in evaluated], marker="o", label=f"held out: {words}")
    axes.set(xlabel="optimizer step", ylabel="share right", ylim=(0, 1.02), title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
