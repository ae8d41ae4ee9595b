"""Measure the time without a leading operator: the leader is killed or stopped, and the other operator takes over.

    python benchmarks/operator/failover.py --times 3

Measured are the times from the signal until the other operator leads, and until its first write for a pod that failed
right after the signal. The limit is 20 s. The Lease lasts 15 s, so that a slow leader is not replaced.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import operator_rights
from kube.plane import ControlPlane
from operator_process import OperatorProcess

ROOT = Path(__file__).parents[2]
BAR_S = 20.0
OURS = "/apis/asyncflow.dev/v1alpha1"


def measure(plane: ControlPlane, namespace: str, number: signal.Signals) -> dict[str, float]:
    plane.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    operator_rights.grant(plane, namespace)
    first, second = (operator(plane, namespace, which) for which in ("first", "second"))
    first.start()
    first.lead()
    second.start()
    plane.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples/quickstart.yaml"))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    plane.wait_until(lambda: running(plane, pods) == 7, "the job to run")
    started = time.time()
    first.process.send(number)
    plane.api.patch(f"{pods}/quickstart-storage-1", {"metadata": {"annotations": {"kwok.test/exit": "1"}}})
    second.lead()
    leads = time.time() - started
    plane.wait_until(lambda: running(plane, pods) == 7 and mended(plane, pods), "the pod to be replaced")
    whole = time.time() - started
    writes = [each for each in operator_rights.of(plane, f"{namespace}-second") if each.is_write]
    wrote = next(each.at.timestamp() for each in writes if each.resource != "leases") - started
    first.process.end()
    second.process.end()
    plane.api.delete(f"/api/v1/namespaces/{namespace}")
    return {"leads_s": round(leads, 1), "first_write_s": round(wrote, 1), "whole_s": round(whole, 1)}


def operator(plane: ControlPlane, namespace: str, which: str) -> OperatorProcess:
    name = f"{namespace}-{which}"
    own: dict[str, Any] = {"namespace": namespace, "namespaces": namespace}
    return OperatorProcess(plane, name, kubeconfig=operator_rights.account(plane, name), **own)


def running(plane: ControlPlane, pods: str) -> int:
    return sum(pod["status"].get("phase") == "Running" for pod in plane.api.get(pods)["items"])


def mended(plane: ControlPlane, pods: str) -> bool:
    labels = plane.api.get(f"{pods}/quickstart-storage-1")["metadata"]["labels"]
    return bool(labels["asyncflow.dev/attempt"] == "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with ControlPlane(with_=("kcm", "sched", "kwok"), audited=True) as plane:
        plane.install_crds(ROOT / "crds")
        plane.add_nodes(4)
        figures = {
            name: [measure(plane, f"{name}-{turn}", number) for turn in range(options.times)]
            for name, number in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP))
        }
    worst = max(each["leads_s"] for turns in figures.values() for each in turns)
    print(json.dumps({**figures, "worst_s": worst, "bar_s": BAR_S}, indent=1))
    sys.exit(worst >= BAR_S)


if __name__ == "__main__":
    main()
