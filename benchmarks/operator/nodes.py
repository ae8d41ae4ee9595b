"""Measure the cost of explaining why pods are pending, in a cluster of many nodes: memory, CPU and latency.

    python benchmarks/operator/nodes.py --nodes 5000 --pods 10000 --s 130

The nodes are as large as real ones (images, labels, annotations: about 20 KB of JSON each), and ``--pods`` pods of
other users occupy them. No pod really runs: the jobs request more CPU than a node has, and stay pending. The limits
are: ``WhyPending`` has the calculation within 60 s, memory stays below 150 MiB, and the event loop never lags by more
than 1 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scale import JOBS, NAMESPACE, ROOT, USER, job

from kube.nodes import NODES, fake_node
from kube.plane import ControlPlane
from kube.process import wait_until
from operator_process import OperatorProcess

WAITING = 20
THREADS = 8
TOO_MUCH_CPU = "500"
MOST_S = 60.0
MOST_MIB = 150
MOST_LAG_S = 1.0
OTHERS = "others"


def real_node(number: int) -> dict[str, Any]:
    """Return a Ready node, as large as one that a kubelet reports."""
    name = f"node-{number:05d}"
    labels = {f"feature.node.kubernetes.io/cpu-cpuid.F{index}": "true" for index in range(60)}
    node = fake_node(name, number, resource="huawei.com/Ascend910", count=16, labels=labels)
    del node["metadata"]["labels"]["type"]
    node["metadata"]["annotations"] = {f"csi.volume.kubernetes.io/{index}": "x" * 400 for index in range(8)}
    now = "2026-11-21T10:00:00Z"
    kinds = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True"}
    node["status"]["conditions"] = [
        {
            "type": kind,
            "status": status,
            "reason": f"KubeletHas{kind}",
            "message": "kubelet is posting ready status",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        for kind, status in kinds.items()
    ]
    image = "registry.example.com/a/project/of/some/team/an-image"
    node["status"]["images"] = [
        {"names": [f"{image}-{index}@sha256:{'0' * 64}", f"{image}-{index}:v1.{index}"], "sizeBytes": 10**9}
        for index in range(50)
    ]
    return node


def other_pod(number: int, nodes: int) -> dict[str, Any]:
    """Return a pod of another user that is assigned to a node."""
    container = {
        "name": "main",
        "image": "image",
        "env": [{"name": f"VARIABLE_{index}", "value": "x" * 40} for index in range(40)],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
    }
    spec = {"nodeName": f"node-{number % nodes:05d}", "containers": [container]}
    return {"metadata": {"name": f"pod-{number:06d}"}, "spec": spec}


def create(plane: ControlPlane, path: str, objects: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda each: plane.api.create(path, each), objects))


def waits(plane: ControlPlane) -> list[str]:
    """Return the messages of the jobs' ``WhyPending`` conditions."""
    conditions = [each for raw in plane.api.get(JOBS)["items"] for each in raw.get("status", {}).get("conditions", ())]
    return [each["message"] for each in conditions if each["type"] == "WhyPending" and each["status"] == "True"]


def measure(plane: ControlPlane, *, nodes: int, pods: int, seconds: float) -> dict[str, Any]:
    started = time.monotonic()
    create(plane, NODES, [real_node(number) for number in range(nodes)])
    for name in (NAMESPACE, OTHERS):
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    create(plane, f"/api/v1/namespaces/{OTHERS}/pods", [other_pod(number, nodes) for number in range(pods)])
    print(f"{nodes} nodes and {pods} pods after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    operator = OperatorProcess(plane, kubeconfig=plane.kubeconfig(USER, "system:masters"))
    operator.start()
    operator.lead()
    figures: dict[str, Any] = {"nodes": nodes, "pods": pods, "idle_mib": operator.process.memory_bytes() >> 20}
    cpu, started = operator.process.cpu_s(), time.monotonic()
    for number in range(WAITING):
        manifest = job(number)
        manifest["spec"]["driver"] = {"resources": {"cpu": TOO_MUCH_CPU}}
        plane.api.create(JOBS, manifest)
    expected = "the largest free is 19"
    wait_until(
        lambda: sum(expected in words for words in waits(plane)) == WAITING,
        "all jobs to report why they are pending, with the calculation",
        timeout_s=600,
        needs=[operator.process],
    )
    figures["said_s"] = round(time.monotonic() - started, 1)
    late = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        late = max(late, operator.total("asyncflow_operator_loop_lag_seconds"))
        time.sleep(0.5)
    lists = Counter(each.resource for each in plane.requests(user=USER) if each.verb == "list" and each.name == "")
    figures |= {
        "s": seconds,
        "cpu_s": round(operator.process.cpu_s() - cpu, 1),
        "peak_mib": operator.peak_bytes() >> 20,
        "latest_beat_s": round(late, 3),
        "pages": {kind: lists[kind] for kind in ("nodes", "pods")},
    }
    operator.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--s", type=float, default=130.0)
    options = parser.parse_args()
    with ControlPlane(with_=("sched",), audited=True) as plane:
        plane.install_crds(ROOT / "crds")
        figures = measure(plane, nodes=options.nodes, pods=options.pods, seconds=options.s)
    print(json.dumps(figures, indent=1))
    well = figures["said_s"] < MOST_S and figures["peak_mib"] < MOST_MIB and figures["latest_beat_s"] < MOST_LAG_S
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
