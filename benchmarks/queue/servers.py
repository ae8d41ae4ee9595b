"""The processes of a stand-alone queue on this machine: controllers, units, and the processes of its backend.

Invariant: at the end of the context, all started processes are ended by their ids, and their folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import environment

from asyncflow.api.load import load
from asyncflow.api.names import HOST_ENV, INSECURE_ENV, TLS_ENV
from asyncflow.api.queue import TransferQueue
from asyncflow.local.issuer import Issuer
from asyncflow.local.placement import PortReservation
from asyncflow.plan.queue import queue_roles
from asyncflow.queue.blocking import BlockingQueue, connect
from asyncflow.queue.ledger.audit import audit_ledger, merge_audits, replica_ledger
from asyncflow.queue.protocol.messages import AuditReport
from asyncflow.rpc.addresses import address_of, new_server
from asyncflow.rpc.shm import SHARED_MEMORY_ENV
from asyncflow.rpc.tls import Credentials

_START_S = 60.0
_END_S = 10.0
_MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: TransferQueue
metadata: {{name: bench}}
spec:
  backend: {backend}
  controllers: {controllers}
  storageUnits: {units}
  bytesPerUnit: {bytes_per_unit}
  ledger: {{sync: {sync}}}
"""

Within = Callable[[str, Sequence[str]], list[str]]
"""Returns, for the name of a process (controller, unit0, ...) and a command, the command that runs it where it belongs,
for example in a network namespace.
"""


@dataclass(frozen=True, kw_only=True)
class Handle:
    """The address and certificate with which a client in any process connects to a queue."""

    address: str
    certificate: str = ""

    def connect(self) -> contextlib.AbstractContextManager[BlockingQueue]:
        """Return a client of the queue as a context."""
        return connect(self.address, credentials=Credentials(Path(self.certificate)) if self.certificate else None)

    @property
    def words(self) -> list[str]:
        """The command-line options that name the queue."""
        return ["--address", self.address, *(["--certificate", self.certificate] if self.certificate else [])]


@dataclass(kw_only=True)
class Servers:
    """The running processes, by name. starts: functions that start each, given its attempt; urls: readiness URLs."""

    handle: Handle
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: dict[str, Callable[[int], subprocess.Popen[bytes]]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, attempt: int) -> None:
        """Start a process, or the successor of one that has ended."""
        self.processes[name] = self.starts[name](attempt)

    def end(self, name: str) -> None:
        """End a process by SIGTERM; kill it after a timeout."""
        _end(self.processes[name])

    def is_ready(self, name: str) -> bool:
        """Return whether a process on this host is ready."""
        try:
            urllib.request.urlopen(self.urls[name], timeout=0.5).close()
        except OSError:
            return False
        return True

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes.items()}

    def resident_mb(self) -> dict[str, float]:
        """Return the resident memory of each process, in MiB."""
        return {name: resident_mb(pid) for name, pid in self.pids.items()}

    def audit(self) -> AuditReport:
        """Return the audit of the ledgers of all controllers."""
        primary, *others = [self.folder / name / "ledger" for name in sorted(self.processes) if "controller" in name]
        reports = {index: audit_ledger(replica_ledger(ledger, index)) for index, ledger in enumerate(others, 1)}
        return merge_audits(audit_ledger(primary), reports)

    def logs(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.log")))


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no resident memory: it has ended")


@contextlib.contextmanager
def servers(
    *,
    controllers: int = 1,
    units: int = 1,
    backend: str = "memory",
    bytes_per_unit: str = "4Gi",
    sync: str = "interval",
    secured: bool = False,
    shared_memory: bool = False,
    hosts: Callable[[str], str] = lambda _: "127.0.0.1",
    within: Within = lambda _, argv: list(argv),
) -> Iterator[Servers]:
    """Start a queue, and yield it when it is ready.

    secured: whether to use TLS with certificates; shared_memory: whether processes use shared memory instead of TCP;
    hosts: the address of each process; within: see ``Within``.
    """
    folder = Path(tempfile.mkdtemp(prefix="asyncflow-bench-"))
    with contextlib.ExitStack() as started:
        started.callback(shutil.rmtree, folder, ignore_errors=True)
        manifest = folder / "queue.yaml"
        spec = {"backend": backend, "controllers": controllers, "units": units, "sync": sync}
        manifest.write_text(_MANIFEST.format(**spec, bytes_per_unit=bytes_per_unit))
        if backend != "memory":
            environment.prepare_libraries()
        issuer = Issuer(folder / "tls") if secured else None
        certificate = str(issuer.issue("client")) if issuer else ""
        queue = load(manifest)
        assert isinstance(queue, TransferQueue)
        roles = queue_roles(queue)
        ports = started.enter_context(PortReservation(1 + sum(role.replicas for role in roles)))
        address = address_of(hosts("controller"), ports.pop(), server=new_server())
        made = Servers(handle=Handle(address=address, certificate=certificate), folder=folder)

        for role in roles:
            for index in range(role.replicas):
                name = role.name if role.replicas == 1 and role.name != "storage" else f"{role.name}{index}"
                name = name.replace("storage", "unit")
                workdir, http = folder / name, ports.pop()
                workdir.mkdir()
                command = partial(
                    role.command,
                    index=index,
                    driver=address,
                    job=str(manifest),
                    workdir=str(workdir),
                    http_port=http,
                    python=sys.executable,
                )
                env = {
                    **os.environ,
                    **role.env,
                    HOST_ENV: hosts(name),
                    SHARED_MEMORY_ENV: "on" if shared_memory else "off",
                    **({TLS_ENV: str(issuer.issue(role.name, index))} if issuer else {INSECURE_ENV: "1"}),
                }

                def start(
                    attempt: int,
                    name: str = name,
                    command: Callable[..., list[str]] = command,
                    env: dict[str, str] = env,
                ) -> subprocess.Popen[bytes]:
                    with (folder / f"{name}.log").open("ab") as log:
                        argv = within(name, command(attempt=attempt))
                        return subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd=folder)

                made.starts[name] = start
                made.urls[name] = f"http://{hosts(name)}:{http}/readyz"
                made.start(name, attempt=0)
                started.callback(made.end, name)
                _until_ready(made.urls[name], made.processes[name], made, within, name)
        yield made


def _until_ready(url: str, process: subprocess.Popen[bytes], made: Servers, within: Within, name: str) -> None:
    """Wait until a process is ready, with requests from its own namespace."""
    program = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=2)"
    elsewhere = within(name, []) != []
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if elsewhere:
                subprocess.run(
                    within(name, [sys.executable, "-c", program]), check=True, timeout=10, capture_output=True
                )
            else:
                urllib.request.urlopen(url, timeout=2).close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"a process of the queue did not become ready\n{made.logs()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
