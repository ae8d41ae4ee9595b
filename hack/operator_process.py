"""The real operator as a process on a control plane of ``kube``: for tests and benchmarks.

Invariant: it runs as an installed one does, by its command line, and dies with whoever started it. Who waits for
it, or for a plane that relies on it, starts it again where it ended because it led no more, as a kubelet does.
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

    kubeconfig: as whom it works, the administrator by default; options: of ``asyncflow-operator run``, by name. Drivers
    take orders where they are asked, and without TLS: those of tests stand for many jobs at one address.
    """

    def __init__(
        self, plane: ControlPlane, name: str = "operator", *, kubeconfig: Path | None = None, **options: object
    ) -> None:
        self._plane = plane
        (self._port,) = free_ports(1)
        key = plane.folder / "master.key"
        if not key.exists():
            key.write_text(secrets.token_hex(32))
        given = {
            "kubeconfig": kubeconfig or plane.admin,
            "key-file": key,
            "identity": name,
            "namespace": NAMESPACE,
            "http-host": LOOPBACK,
            "http-port": self._port,
            "probe-url": "http://127.0.0.1:1/{namespace}/{name}",
            "control-url": options.get("probe_url", "http://127.0.0.1:1/{namespace}/{name}"),
        } | {option.replace("_", "-"): value for option, value in options.items()}
        words = [str(word) for option, value in given.items() for word in (f"--{option}", value)]
        command = [sys.executable, "-m", "asyncflow_operator", "run", *words]
        self.process = Restarted(name, command, log=plane.folder / "log" / name, status=REPLACED)

    @property
    def log(self) -> str:
        """All that it has written."""
        return self.process.log.read_text()

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start it and wait until it has listed everything; it may yet have to wait for the lead."""
        if not self._plane.api.exists(f"{_NAMESPACES}/{NAMESPACE}"):
            self._plane.api.create(_NAMESPACES, {"metadata": {"name": NAMESPACE}})
        self.process.start()
        wait_until(
            lambda: self.get("/readyz")[0] == 200, "the operator to be ready", timeout_s=timeout_s, needs=[self.process]
        )

    def lead(self, *, timeout_s: float = 60.0) -> None:
        """Wait until it leads."""
        wait_until(
            lambda: self.total("asyncflow_operator_leads_flag") == 1,
            "the operator to lead",
            timeout_s=timeout_s,
            needs=[self.process],
        )

    def get(self, path: str) -> tuple[int, str]:
        """Ask it by HTTP; status 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self._port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> list[Metric]:
        """Return all its metrics."""
        return list(text_string_to_metric_families(self.get("/metrics")[1]))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name that have these labels."""
        samples = (sample for metric in self.metrics() for sample in metric.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def quantile(self, name: str, share: float, **labels: str) -> float:
        """Return an upper bound of a histogram's quantile: the bucket that it lies in."""
        buckets: dict[float, float] = {}
        for metric in self.metrics():
            for sample in metric.samples:
                if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
        whole = max(buckets.values(), default=0.0)
        return min((bound for bound, count in buckets.items() if count >= share * whole), default=0.0)

    def peak_bytes(self) -> int:
        """Return the most memory that it has had resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))

    def stop(self) -> int:
        """Ask it to end, as the kubelet does, and give its exit status."""
        pid = self.process.pid
        self.process.send(signal.SIGTERM)
        return self.wait(pid)

    def wait(self, pid: int | None = None, *, timeout_s: float = _END_S) -> int:
        """Wait until it has ended and give its exit status."""
        pid = pid or self.process.pid
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        raise PlaneError(f"waited {timeout_s:g} s for the operator to end:\n{self.process.tail()}")
