"""Compare the division of devices in published setups with the planner's division; both are simulated.

    python benchmarks/planner_setups.py [--only NAME] [--simulations N]

The exit status is 1 if a division of the planner is worse. A manifest whose division does not fit the cost model is
reported with the calculation. Lengths are the planner's defaults. Devices are 910B, from the papers or by assumption,
except for those in ``DEVICES``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from asyncflow.api.load import load_job
from asyncflow.commands.planning import PlanOptions, plan_of
from asyncflow.errors import ManifestError

SETUPS = Path(__file__).parents[1] / "docs" / "guide" / "setups"
DEVICES: Mapping[str, str] = {
    "verl-fully-async": "h20",
    "mindspeed-rl-671b": str(SETUPS / "devices" / "910b-128gb.yaml"),
}
SETTINGS: Mapping[str, Sequence[str]] = {
    "mindspeed-rl-671b": (
        "rollout.engine.options.args.tensor_parallel_size=2",
        "rollout.engine.options.args.data_parallel_size=32",
    )
}
"""Additional settings, which the planner reads but the runtime refuses: the paper's instances of 8 nodes, as vLLM's
arguments.
"""
_ROUNDING = 1.001


def compared(file: Path, *, simulations: int) -> tuple[str, bool]:
    """Return a line of the table about a manifest, and whether the planner's division is at least as good."""
    device = DEVICES.get(file.stem, "910b")
    devices = load_job(file).spec.devices
    began = time.process_time()
    try:
        settings = SETTINGS.get(file.stem, ())
        plan = plan_of(file, settings, PlanOptions(devices=devices, device=device, simulations=simulations))
    except ManifestError as error:
        return f"| {file.stem} | {devices} x {Path(device).stem} | refused: {error.what} | | | | |", True
    name = f"{file.stem} | {devices} x {plan.problem.device.name}"
    took, best = time.process_time() - began, plan.found.best
    if plan.own is None:
        own = f"does not fit: {plan.misfit}"
        return f"| {name} | {own} | | {best.split.name} | {best.step_s:.1f} s | |", True
    gain = plan.own.step_s / best.step_s
    line = (
        f"| {name} | {plan.own.split.name} | {plan.own.step_s:.1f} s | {best.split.name} | {best.step_s:.1f} s | "
        f"{gain:.2f} |"
    )
    print(f"{file.stem}: {plan.found.tried} simulations, {took:.0f} s of a core", file=sys.stderr, flush=True)
    return line, best.step_s <= _ROUNDING * plan.own.step_s


@click.command()
@click.option("--only", multiple=True, help="The name of a manifest.")
@click.option("--simulations", default=12, show_default=True, help="Maximum number of simulations per search.")
def main(only: Sequence[str], simulations: int) -> None:
    """Print the table."""
    good = True
    print(
        "| set-up | devices | its division | a step | the planner's | a step | ratio |\n|---|---|---|---|---|---|---|"
    )
    for file in sorted(SETUPS.glob("*.yaml")):
        if not only or file.stem in only:
            line, as_good = compared(file, simulations=simulations)
            print(line, flush=True)
            good = good and as_good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
