"""MindSpeed RL's dispatch: Table 1 and eq. 4 by arithmetic and with real bytes, and its published linearity.

    CV = G N B (PL + n SL + M)   TCV = G N B (2 PL + 3 n SL + 8 M)   TCV_S = G N B (2 PL + 3 n SL + 8 (C + 1) M) / S

``benchmarks/queue/dispatch.py`` moves the real bytes; it needs root for its network namespaces.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reproduction.figures import Figure

GIB, MIB = 2**30, 2**20
LINK = 300 * MIB
"""Bytes per second between servers, as in the paper."""
DISPATCH_S, AT_FOUR_S = 9.92, 2.8
LINEAR = {"transfer dock": 0.811, "replay buffer": 0.619}
"""The throughput per device with 192 devices, relative to that with 16 devices."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch. prompts G, responses N of each, columns n, scalars M; prompt, response: tokens PL and SL; cell: B."""

    prompts: int
    responses: int
    columns: int = 5
    scalars: int = 3
    prompt: int = 2048
    response: int = 8192
    cell: int = 4

    def moved(self, *, controllers: int = 0) -> int:
        """Return TCV in bytes; with controllers, S * TCV_S."""
        each = 2 * self.prompt + 3 * self.columns * self.response + 8 * (controllers + 1) * self.scalars
        return self.prompts * self.responses * self.cell * each

    def held(self) -> int:
        """Return CV in bytes."""
        each = self.prompt + self.columns * self.response + self.scalars
        return self.prompts * self.responses * self.cell * each

    def seconds(self, *, units: int) -> float:
        """Return the seconds of its dispatch over links with the speed ``LINK``."""
        return self.moved() / units / LINK


SMALL = Batch(prompts=256, responses=8)
LARGE = Batch(prompts=384, responses=16)


def dispatched(units: int) -> float:
    """Return the seconds of a real dispatch. Raises CalledProcessError if this machine cannot create the network."""
    script = Path(__file__).parents[1] / "queue" / "dispatch.py"
    argv = [sys.executable, str(script), "--units", str(units)]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=600).stdout
    return float(json.loads(printed.splitlines()[-1])["seconds"])


def base_s(*, nodes: int) -> float:
    """Return the seconds of an iteration on 16 devices for which dispatch alone explains the difference in linearity.

    One node has 64 prompts with 16 responses each. With the replay buffer, one server dispatches everything; with the
    transfer dock, each node's share has its own link. All other losses of the transfer dock are assumed in both.
    """
    batch = Batch(prompts=64 * nodes, responses=16)
    more = batch.seconds(units=1) - batch.seconds(units=nodes)
    return more / (1 / LINEAR["replay buffer"] - 1 / LINEAR["transfer dock"])


def figures(*, real: bool) -> Iterator[Figure]:
    """Yield the figures. real: whether to measure with real bytes."""
    yield Figure(
        what="TCV of G 256, N 8", paper=0.96, unit=" GiB", simulated=SMALL.moved() / GIB, how="computed", bar=0.02
    )
    for units, paper, bar in ((1, DISPATCH_S, 0.1), (4, DISPATCH_S / 4, AT_FOUR_S / (DISPATCH_S / 4) - 1)):
        yield Figure(
            what=f"dispatch of G 384, N 16, PL 2K, SL 8K at 300 MiB/s, {units} unit{'s' if units > 1 else ''}",
            paper=paper,
            unit=" s",
            measured=dispatched(units) if real else None,
            simulated=LARGE.seconds(units=units),
            how="computed" if units == 1 else "predicted",
            bar=bar,
        )
    for name, paper in LINEAR.items():
        yield Figure(
            what=f"linearity from 16 to 192 devices, {name}",
            paper=paper,
            how="missed",
            why=f"no stage times are published; both hold where 16 devices take {base_s(nodes=12):.0f} s",
        )
