"""Carry out one run with an injected fault, and run the doctor on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from cases import HERE, LEARN, Planted

from asyncflow.doctor.checks import examine
from asyncflow.doctor.reading import read
from asyncflow.errors import ManifestError

RUN_S = 600.0
LIVE_S = 100.0
LOOK_S = 0.2
STOP_S = 2.5
"""Seconds for which a rollout is stopped: longer than its lease, shorter than the driver's patience (5 s)."""
POINTS = (
    "[asyncflow.rollout_engines]\ndrifting = drifting:Drifting\n"
    "[asyncflow.metric_sinks]\nfailing = failing_sink:Failing\n"
)


@dataclass(frozen=True)
class Started:
    """A run in progress. folder: the run folder."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def address(self, finds: str) -> str:
        """Return HOST:PORT of the driver once the doctor has this finding. Raises RuntimeError after ``LIVE_S``."""
        deadline = time.monotonic() + LIVE_S
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            address = str(_record(self.folder).get("http", "")).removeprefix("http://")
            try:
                if address and any(each.name == finds for each in examine(read(address))):
                    return address
            except ManifestError:  # it does not answer yet
                continue
        raise RuntimeError(f"{finds} was not found within {LIVE_S:g} s:\n{self.log.read_text()[-2000:]}")

    def finish(self) -> None:
        """Wait for the end. Raises RuntimeError if the run fails."""
        try:
            status = self.process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            raise RuntimeError(f"the run ended with {status}:\n{self.log.read_text()[-2000:]}")

    def rollout(self, *, after_step: int) -> int:
        """Return the pid of rollout-0 once that step is done. Raises RuntimeError after ``RUN_S``."""
        deadline, metrics = time.monotonic() + RUN_S, self.folder / "metrics.jsonl"
        while time.monotonic() < deadline:
            made = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            rollouts = [each for each in _record(self.folder).get("processes", []) if each["role"] == "rollout"]
            if made >= after_step and rollouts and rollouts[0]["pid"]:
                return int(rollouts[0]["pid"])
            time.sleep(LOOK_S)
        raise RuntimeError(f"step {after_step} was not made")


@contextlib.contextmanager
def started(planted: Planted, folder: Path) -> Iterator[Started]:
    """Run a job below ``folder``, and end it at the end of the context if it still runs.

    The first run saves its model next to ``folder``, and all other runs use it.
    """
    run, model, log = folder / "run", folder.parent / "model", folder / "log"
    run.mkdir(parents=True)
    if model.is_dir():
        shutil.copytree(model, run / "model")
    settings = [word for name, value in planted.settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "asyncflow", "run", str(planted.manifest), "--output", str(run), *settings]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=_environment(planted, folder), stdout=file, stderr=subprocess.STDOUT)
    try:
        yield Started(process, run, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    if planted.manifest == LEARN and not model.is_dir():
        shutil.copytree(run / "model", model)


def examined(planted: Planted, folder: Path) -> list[dict[str, Any]]:
    """Run a job below ``folder`` and return the doctor's findings. Raises RuntimeError if the run fails."""
    with started(planted, folder) as run:
        if planted.live:
            return doctor(run.address(planted.finds))
        for number in range(planted.kills):
            os.kill(run.rollout(after_step=6 * (number + 1)), signal.SIGKILL)
        for number in range(planted.stops):
            stopped = run.rollout(after_step=number + 1)
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(STOP_S)
            os.kill(stopped, signal.SIGCONT)
        run.finish()
    return doctor(str(run.folder))


def doctor(target: str) -> list[dict[str, Any]]:
    """Return the findings of ``asyncflow doctor`` for a run folder or a driver."""
    command = [sys.executable, "-m", "asyncflow", "doctor", target, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode not in (0, 1) or done.stderr:
        raise RuntimeError(done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert done.returncode == bool(found)
    return found


def _environment(planted: Planted, folder: Path) -> dict[str, str]:
    about = folder / "site" / "planted-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: planted\nVersion: 1\n")
    (about / "entry_points.txt").write_text(POINTS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(about.parent), str(HERE)))}
    if planted.slow:
        made = folder / "slow.so"
        compiler = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(HERE / "slow.c"), "-ldl"]
        subprocess.run(compiler, check=True, timeout=60)
        env |= {"LD_PRELOAD": str(made), "SLOW_PATH": planted.slow, "SLOW_S": f"{planted.slow_s:g}"}
    return env


def _record(run: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = msgspec.json.decode((run / "run" / "processes.json").read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
    return record
