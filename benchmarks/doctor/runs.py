"""Carries out one planted run, and asks the doctor about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from faults import HERE, Planted

RUN_S = 240.0
POINTS = (
    "[asyncflow.rollout_engines]\ndrifting = drifting:Drifting\n"
    "[asyncflow.metric_sinks]\nfailing = failing_sink:Failing\n"
)


def examined(planted: Planted, folder: Path) -> list[dict[str, Any]]:
    """Run a job in ``folder`` and return what the doctor finds. Raises RuntimeError where the run fails."""
    folder.mkdir(parents=True)
    run = folder / "run"
    settings = [word for name, value in planted.settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "asyncflow", "run", str(planted.manifest), "--output", str(run), *settings]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=_environment(planted, folder), stdout=log, stderr=subprocess.STDOUT)
    try:
        if planted.live:
            return _found_live(run, finds=planted.finds)
        for number in range(planted.kills):
            _kill_rollout(run, after_step=6 * (number + 1))
        if process.wait(RUN_S):
            raise RuntimeError(f"the run failed:\n{(folder / 'log').read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return doctor(str(run))


def doctor(target: str) -> list[dict[str, Any]]:
    """Return what ``asyncflow doctor`` finds of a run in a folder, or of a driver."""
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


def _found_live(run: Path, *, finds: str) -> list[dict[str, Any]]:
    """Ask the driver of a run that goes on, until it has that finding or time is up."""
    deadline, found = time.monotonic() + RUN_S / 4, list[dict[str, Any]]()
    while time.monotonic() < deadline:
        time.sleep(0.5)
        address = str(_record(run).get("http", ""))
        if not address:
            continue
        try:
            found = doctor(address.removeprefix("http://"))
        except RuntimeError:  # it does not answer yet
            continue
        if any(each["name"] == finds for each in found):
            break
    return found


def _kill_rollout(run: Path, *, after_step: int) -> None:
    """Kill rollout-0 as soon as that step was made."""
    deadline, metrics = time.monotonic() + RUN_S, run / "metrics.jsonl"
    while time.monotonic() < deadline:
        made = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        there = [each for each in _record(run).get("processes", []) if each["role"] == "rollout" and each["index"] == 0]
        if made >= after_step and there and there[0]["pid"]:
            os.kill(int(there[0]["pid"]), signal.SIGKILL)
            return
        time.sleep(0.1)
    raise RuntimeError(f"step {after_step} was not made")
