import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncflow.local.record import Placed, Record, load_record

HARNESS = str(Path(__file__).with_name("harness.py"))


class Run:
    """A supervisor of stand-ins in a process of its own, in ``cwd``. within: the command that runs it."""

    def __init__(
        self,
        cwd: Path,
        roles: dict[str, dict[str, Any]],
        *,
        end_s: float,
        active_s: str,
        disk_s: float = 300.0,
        forked: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        self.cwd = cwd
        self.folder = cwd / "out"
        words = [str(self.folder), json.dumps(roles), str(end_s), active_s, str(disk_s), "forked" if forked else ""]
        self.process = subprocess.Popen(
            [*within, sys.executable, HARNESS, *words],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(Path(HARNESS).parent)},
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def wait_until(condition: Callable[[], Any], what: str, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
            time.sleep(0.02)

    @staticmethod
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except OSError:
            return False

    def pids(self, replica: str, attempt: int = 0) -> list[int]:
        """The pids of a stand-in and of its children, once all of them run."""
        path = self.cwd / f"{replica}.{attempt}.json"
        self.wait_until(path.exists, f"attempt {attempt} of {replica}")
        return list(json.loads(path.read_text()))

    def record(self) -> Record:
        record = load_record(self.folder)
        assert record is not None
        return record

    def placed(self, role: str, index: int) -> Placed:
        """Return what the record says of a replica."""
        return next(each for each in self.record().processes if (each.role, each.index) == (role, index))

    def ended(self) -> list[str]:
        """The replicas that ended in order, in that order."""
        path = self.cwd / "ended.txt"
        return path.read_text().split() if path.exists() else []

    def wait(self, timeout: float = 30.0) -> int:
        return self.process.wait(timeout)

    def says(self, words: str) -> None:
        """Wait until it has said a line with ``words``."""
        assert self.process.stderr is not None
        assert any(words in line for line in self.process.stderr)

    def said(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def reapers(self) -> list[int]:
        mark = self.record().mark.encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if mark in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
        return found

    def nothing_left(self, pids: list[int]) -> None:
        self.wait_until(lambda: not any(map(self.alive, pids)), "the processes to be gone")
        self.wait_until(lambda: not self.reapers(), "the reaper to be gone")


@pytest.fixture(params=["started", "forked"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*, end_s: float = 8.0, active_s: str = "", **roles: dict[str, Any]) -> Run:
        run = Run(tmp_path, roles, end_s=end_s, active_s=active_s, forked=request.param == "forked")
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()
