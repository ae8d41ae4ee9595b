"""A job with the counting trainer in real processes, which attacks start, disturb, end, resume and check."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from asyncflow.queue.ledger.audit import audit_ledgers

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, SIZE = 16, 8, 4
SETTINGS = (
    f"algorithm.steps={STEPS}",
    "evaluation.every=8",
    "storage.checkpoints.every=3",
    "rollout.engine.options={token_s: 0.01}",
    "limits.activeDeadlineSeconds=170",
)
ROLES = ("rollout", "storage", "controller", "trainer", "driver")
_ENDS_S = 200.0


class Harmed(Exception):
    """An attack did harm: a check failed."""


class Job:
    """One run folder below ``folder``, and its supervisor."""

    def __init__(self, folder: Path, dice: random.Random, *, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder / "run"
        self.dice = dice
        self.done: list[str] = []
        self._env = dict(env or os.environ)
        self._lives = 0
        self._log = folder / "0.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *settings: str, resume: bool = False) -> None:
        words = [word for each in (*SETTINGS, *settings) for word in ("--set", each)]
        command = [sys.executable, "-m", "asyncflow", "run", str(ROOT / "examples" / "counting.yaml")]
        command += ["--output", str(self.folder), *(["--resume"] if resume else []), *words]
        self._log = self.folder.with_name(f"{self._lives}.log")
        self._lives += 1
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._env)

    @property
    def said(self) -> list[str]:
        """The output lines of the latest supervisor."""
        return self._log.read_text(errors="replace").splitlines()

    def steps_done(self) -> int:
        """Return the number of steps with a line in metrics.jsonl."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints."""
        found = (self.folder / "checkpoints").glob("step-*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def wait_until(self, reached: Callable[[], bool], what: str, *, within_s: float = 90.0) -> None:
        """Wait until ``reached``. Raises Harmed if the run or the time ends first."""
        deadline = time.monotonic() + within_s
        while not reached():
            if self.process is None or self.process.poll() is not None:
                raise Harmed(f"the run ended before {what}: {self.said[-3:]}")
            if time.monotonic() > deadline:
                raise Harmed(f"{what} did not come within {within_s:g} s")
            time.sleep(0.02)

    def wait_for_step(self, first: int, last: int) -> None:
        """Wait until a random step between these two is done, and up to 0.3 s longer."""
        step = self.dice.randint(first, last)
        self.wait_until(lambda: self.steps_done() >= step, f"step {step}")
        time.sleep(self.dice.uniform(0.0, 0.3))

    def pids(self, role: str) -> list[int]:
        """Return the pids of a role, from the supervisor's record."""
        try:
            record = json.loads((self.folder / "run" / "processes.json").read_text())
        except (OSError, ValueError):
            return []
        return [entry["pid"] for entry in record["processes"] if entry["role"] == role and entry["pid"]]

    def kill(self, role: str) -> None:
        """Kill one process of ``role``."""
        if pids := self.pids(role):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.dice.choice(pids), signal.SIGKILL)
                self.done.append(f"killed a {role}")

    def kill_tree(self) -> None:
        """Kill the supervisor, and wait until all roles have ended too. Raises Harmed if they do not."""
        assert self.process is not None
        roles = [pid for role in ROLES for pid in self.pids(role)]
        self.process.kill()
        self.process.wait(_ENDS_S)
        deadline = time.monotonic() + 20
        while any(map(_alive, roles)):
            if time.monotonic() > deadline:
                raise Harmed("roles outlived their supervisor by 20 s")
            time.sleep(0.02)

    def interrupt(self) -> None:
        """End the run by SIGINT, and wait for its end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        self.wait()

    def wait(self) -> int:
        """Wait for the end of the run; return its exit status."""
        assert self.process is not None
        try:
            return self.process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise Harmed(f"the run hangs: {self.said[-3:]}") from None

    def succeed(self) -> None:
        """Wait for the end and check the result. Raises Harmed unless the run trained every sample once."""
        if status := self.wait():
            raise Harmed(f"the run ended with status {status}: {self.said[-1:]}")
        self.judge(self.folder)

    @staticmethod
    def judge(folder: Path) -> None:
        """Compare the ledger and the weights of the last checkpoint with the dispatched samples. Raises Harmed."""
        samples = STEPS * GROUPS * SIZE
        report = audit_ledgers(folder / "ledger")
        found = (report.dispatched, report.trained, report.lost, report.duplicated)
        if not report.ok or found != (samples, samples, 0, 0):
            raise Harmed(f"dispatched, trained, lost, doubled: {found}; {report.problems}")
        newest = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
        counts = np.load(newest / "counts.npy", allow_pickle=False)
        if not (counts[:samples] == 1).all() or counts[samples:].any():
            raise Harmed(f"{np.count_nonzero(counts[:samples] != 1)} samples do not count once in the weights")

    def end(self) -> None:
        """End the run if it is still running."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(_ENDS_S)


def reason_of(said: Sequence[str]) -> str:
    """Return the last output line if it is an error that explains the end of the run, "" otherwise."""
    errors = [line for line in said if re.match(r"error: ", line)]
    return errors[-1] if errors and said[-1] == errors[-1] else ""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
