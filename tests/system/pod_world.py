"""A job or a queue as its processes see it in a cluster: each in a pod of its own, on this machine.

Every process has an address and a folder that no other has, a read-only folder with manifest, key and token, `/` as its
current directory, and an environment in which nothing of this one is left.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncflow.api.load import load, to_yaml
from asyncflow.api.names import HOST_ENV, HTTP_PORT, TLS_ENV, TOKEN_FILE_ENV
from asyncflow.local.issuer import Issuer
from asyncflow.local.placement import PortReservation
from asyncflow.plan.roles import DISRUPTED, Role

TOLD_TO_END = 128 + signal.SIGTERM


@dataclass
class Pod:
    """One replica of a role, and the process that runs it now. folder: its volume."""

    role: Role
    index: int
    host: str
    folder: Path
    log: Path
    attempt: int = -1
    process: subprocess.Popen[bytes] | None = None

    def ask(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{HTTP_PORT}{path}", timeout=5) as answer:
            said: str = answer.read().decode()
            return said

    def end(self, number: signal.Signals, *, within_s: float) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(within_s)


@dataclass
class Pods:
    """All pods of one owner. leader: the role whose process 0 all dial, at ``port``."""

    base: Path
    manifest: str
    settings: list[str]
    leader: str
    port: int
    pods: dict[str, Pod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = self.base / "etc"
        self.config.mkdir(parents=True)
        text = to_yaml(load(Path(self.manifest), self.settings))
        (self.config / "job.yaml").write_text(text)
        self.issuer = Issuer(self.base / "tls")
        (self.config / "token").write_text("a-token")
        for file in self.config.iterdir():
            file.chmod(0o440)
        self.config.chmod(0o555)
        self._network = f"127.{random.SystemRandom().randrange(16, 255)}.{random.SystemRandom().randrange(255)}"

    @property
    def address(self) -> str:
        return f"tcp://localhost:{self.port}"

    def address_of(self, number: int) -> str:
        """Return the address of a host of this world: the pods have the first ones."""
        return f"{self._network}.{number}"

    def place(self, *roles: Role) -> None:
        for role in roles:
            for index in range(role.replicas):
                name = f"{role.name}-{index}"
                host = self.address_of(len(self.pods) + 1)
                self.pods[name] = Pod(role, index, host, self.base / name, self.base / f"{name}.log")

    def start(self, *names: str) -> None:
        for name in names or self.pods:
            self._start(self.pods[name])

    def kill(self, *names: str, keep: str = "") -> None:
        """Kill processes and make them again, with empty folders except for that of ``keep``, as the next attempt."""
        for name in names:
            self.pods[name].end(signal.SIGKILL, within_s=10)
        for name in names:
            if name != keep:
                shutil.rmtree(self.pods[name].folder)
        self.start(*names)

    def until(self, what: str, happened: Callable[[], bool], *, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not _try(happened):
            assert time.monotonic() < deadline, f"{what} did not come within {within_s} s\n{self.logs()}"
            self._begin_again()
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.pods[f"{self.leader}-0"].ask("/v1/status"))
        return said

    def step(self) -> int:
        return int(self.status()["step"])

    def until_step(self, step: int) -> int:
        self.until(f"step {step}", lambda: self.step() >= step)
        return self.step()

    def finish(self, *, within_s: float) -> dict[str, int]:
        """Wait until the leader has ended and the others with it; give all exit statuses."""
        deadline = time.monotonic() + within_s
        order = sorted(self.pods.values(), key=lambda pod: pod.role.name != self.leader)
        first = order[0].process
        while first is not None and first.poll() is None and time.monotonic() < deadline:
            self._begin_again()
            time.sleep(0.05)
        try:
            return {
                f"{pod.role.name}-{pod.index}": pod.process.wait(max(0.1, deadline - time.monotonic()))
                for pod in order
                if pod.process is not None
            }
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{late}\n{self.logs()}") from late

    def _begin_again(self) -> None:
        """Begin the next attempt of the trainer where a rank has lost samples with a storage unit, as substrates do."""
        gang = {name: pod.process for name, pod in self.pods.items() if pod.role.name == "trainer"}
        if any(process is not None and process.poll() == DISRUPTED for process in gang.values()):
            for name in gang:
                self.pods[name].end(signal.SIGKILL, within_s=10)
            self.start(*gang)

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{pod.log.read_text()[-3000:]}" for name, pod in self.pods.items())

    def _start(self, pod: Pod) -> None:
        pod.attempt += 1
        pod.folder.mkdir(exist_ok=True)
        leads = pod.role.name == self.leader and pod.index == 0
        command = pod.role.command(
            index=pod.index,
            attempt=pod.attempt,
            driver=f"tcp://*:{self.port}" if leads else self.address,
            job=str(self.config / "job.yaml"),
            workdir=str(pod.folder),
            http_port=HTTP_PORT,
            python=sys.executable,
        )
        own = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            HOST_ENV: pod.host,
            TLS_ENV: str(self.issuer.issue(pod.role.name, pod.index)),
            TOKEN_FILE_ENV: str(self.config / "token"),
        }
        with pod.log.open("ab") as log:
            pod.process = subprocess.Popen(command, cwd="/", env={**own, **pod.role.env}, stdout=log, stderr=log)


@contextmanager
def pods(base: Path, manifest: Path, settings: list[str], *, leader: str) -> Iterator[Pods]:
    """Yield pods that are all gone afterwards."""
    with PortReservation(1) as (port,):
        made = Pods(base, str(manifest), settings, leader, port)
        try:
            yield made
        finally:
            for pod in made.pods.values():
                if pod.process is not None:
                    pod.process.kill()
                    pod.process.wait()
            made.config.chmod(0o755)


def _try(happened: Callable[[], bool]) -> bool:
    try:
        return happened()
    except OSError:
        return False
