"""Measure the CPU time of a simulated run: by default 1,000 rollouts and 20 steps of 8,000 samples; limit 60 s.

python benchmarks/simulator.py [--rollouts N] [--steps N] [--spans]    # exit status 1 if the limit is missed
"""

from __future__ import annotations

import argparse
import sys
import time

from asyncflow.api.schedule import ScheduleSpec
from asyncflow.sim import EngineModel, Lengths, LinkModel, Models, Scenario, TrainerModel, simulate

SLOTS = 8
BAR_S = 60.0


def main() -> int:
    """Simulate a run, and print the time that it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--spans", action="store_true", help="keep spans for a timeline")
    options = parser.parse_args()
    samples = options.rollouts * SLOTS
    scenario = Scenario(
        schedule=ScheduleSpec(mode="async"),
        steps=options.steps,
        prompts_per_step=options.rollouts,
        group_size=SLOTS,
        max_tokens=100_000,
        rollouts=options.rollouts,
        models=Models(
            engine=EngineModel(slots=SLOTS, token_s=0.01, load_s=0.5, lengths=Lengths(tokens=100, sigma=0.5)),
            trainer=TrainerModel(sample_s=1.5 / samples, publish_s=0.1),
            link=LinkModel(pull_s=0.5, hop_s=0.05),
        ),
    )
    began = time.process_time()
    made = simulate(scenario, seed=1, spans=options.spans)
    took_s = time.process_time() - began
    print(
        f"{options.rollouts} rollouts, {options.steps} steps, {made.samples} samples, {made.wall_s:.0f} virtual s:"
        f" {took_s:.1f} s of one core, {1e6 * took_s / made.samples:.0f} us a sample; at most {BAR_S:g} s"
    )
    return 0 if took_s <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
