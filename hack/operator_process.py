"""The real operator as a process on a control plane of ``kube``, for tests and benchmarks.

Invariant: the operator runs by its command line, as an installed one does, and ends with the process that started it.
If it ended because it lost the lead, a wait for it, or for a plane that relies on it, restarts it as a kubelet does.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from asyncflow_operator.main import REPLACED
from kube.plane import ControlPlane
from kube.process import PlaneError, Restarted, wait_until
from kube.servers import LOOPBACK, free_ports

NAMESPACE: Final = "asyncflow-system"
_END_S: Final = 60.0
_NAMESPACES: Final = "/api/v1/namespaces"


class OperatorProcess:
    """One operator.

    kubeconfig: its user, by default the administrator; options: options of ``asyncflow-operator run``, by name.
    Commands go to the same address as status requests, without TLS, since a test has one server for all drivers.
    """

    def __init__(
        self, plane: ControlPlane, name: str = "operator", *, kubeconfig: Path | None = None, **options: object
    ) -> None:
        self._plane = plane
        (self._port,) = free_ports(1)
        key = plane.folder / "master.key"
        if not key.exists():
            key.write_text(secrets.token_hex(32))
        arguments = {
            "kubeconfig": kubeconfig or plane.admin,
            "key-file": key,
            "identity": name,
            "namespace": NAMESPACE,
            "http-host": LOOPBACK,
            "http-port": self._port,
            "probe-url": "http://127.0.0.1:1/{namespace}/{name}",
            "control-url": options.get("probe_url", "http://127.0.0.1:1/{namespace}/{name}"),
        } | {option.replace("_", "-"): value for option, value in options.items()}
        words = [str(word) for option, value in arguments.items() for word in (f"--{option}", value)]
        command = [sys.executable, "-m", "asyncflow_operator", "run", *words]
        self.process = Restarted(name, command, log=plane.folder / "log" / name, status=REPLACED)

    @property
    def log(self) -> str:
        """The content of its log."""
        return self.process.log.read_text()

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start the operator and wait until it has listed all objects; it need not lead yet."""
        if not self._plane.api.exists(f"{_NAMESPACES}/{NAMESPACE}"):
            self._plane.api.create(_NAMESPACES, {"metadata": {"name": NAMESPACE}})
        self.process.start()
        wait_until(
            lambda: self.get("/readyz")[0] == 200, "the operator to be ready", timeout_s=timeout_s, needs=[self.process]
        )

    def lead(self, *, timeout_s: float = 60.0) -> None:
        """Wait until the operator leads."""
        wait_until(
            lambda: self.total("asyncflow_operator_leads_flag") == 1,
            "the operator to lead",
            timeout_s=timeout_s,
            needs=[self.process],
        )

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of an HTTP request to the operator; status 0 if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self._port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> list[Metric]:
        """Return the operator's metrics."""
        return list(text_string_to_metric_families(self.get("/metrics")[1]))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels."""
        samples = (sample for metric in self.metrics() for sample in metric.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def quantile(self, name: str, share: float, **labels: str) -> float:
        """Return an upper bound of a histogram's quantile: the upper limit of its bucket."""
        buckets: dict[float, float] = {}
        for metric in self.metrics():
            for sample in metric.samples:
                if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
        whole = max(buckets.values(), default=0.0)
        return min((bound for bound, count in buckets.items() if count >= share * whole), default=0.0)

    def peak_bytes(self) -> int:
        """Return the peak of its resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))

    def stop(self) -> int:
        """Send SIGTERM, as the kubelet does, and return the exit status."""
        pid = self.process.pid
        self.process.send(signal.SIGTERM)
        return self.wait(pid)

    def wait(self, pid: int | None = None, *, timeout_s: float = _END_S) -> int:
        """Wait until the process has ended, and return its exit status."""
        pid = pid or self.process.pid
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        raise PlaneError(f"waited {timeout_s:g} s for the operator to end:\n{self.process.tail()}")
