"""Run manifests with simulated engines, each by its own command, and read their results and resource use.

Invariant: the results of a run come from its folder, and the numbers of samples from the audit of its ledger.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_lines import lines

from asyncflow.api.load import load_job
from asyncflow.queue.ledger.audit import audit_ledger


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """A run that has ended. steps: lines of metrics.jsonl; lost: samples that were not trained exactly once; cores: the
    mean number of cores that it used, valid if no other run was in progress; load: of the machine at the end.
    """

    steps: Sequence[dict[str, Any]]
    lost: int
    cores: float
    load: float


def emulate(manifest: Path, folder: Path, settings: Sequence[str]) -> Emulation:
    """Run ``manifest`` in ``folder``, with ``settings`` as for ``--set``. Raises CalledProcessError if it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    argv = ["-m", "asyncflow", "run", str(manifest), "--fresh", "--output", str(folder)]
    argv += [part for field in settings for part in ("--set", field)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run([sys.executable, *argv], check=True, stdout=log, stderr=log)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    algorithm, audit = load_job(manifest, list(settings)).spec.algorithm, audit_ledger(folder / "ledger")
    samples = algorithm.steps * algorithm.prompts_per_step * algorithm.group_size
    return Emulation(
        steps=lines(folder),
        lost=samples - audit.trained + audit.duplicated + audit.lost,
        cores=(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wall,
        load=os.getloadavg()[0],
    )
