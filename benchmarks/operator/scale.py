"""Measure the time to start many jobs and the cost of the operator, against a bare loop that writes the same objects.

    python benchmarks/operator/scale.py --jobs 20
    python benchmarks/operator/scale.py --jobs 200

Each runs on a new control plane with KWOK and fake nodes: first the operator, then a loop of server-side applies of the
same objects, which is the least work that any operator must do. The main figure is the ratio of the times until the
last pod exists, because both share the machine with the API server.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncflow.api.document import parse
from asyncflow_operator.cluster.owners import custom_resource
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observed import JobState, Manifest, TransferQueueState
from driver_double import DriverDouble
from kube.plane import ControlPlane
from kube.process import wait_until
from operator_process import OperatorProcess

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NAMESPACE = "scale"
USER = "operator"
PODS = 10
NODES = 100
JOBS = f"/apis/asyncflow.dev/v1alpha1/namespaces/{NAMESPACE}/rljobs"
QUEUES = f"/apis/asyncflow.dev/v1alpha1/namespaces/{NAMESPACE}/transferqueues"


def job(number: int) -> Manifest:
    """Return a job with ten pods: driver, controller, trainer, two storage units, five rollouts."""
    manifest: Manifest = parse((ROOT / "examples/quickstart.yaml").read_text(), source="quickstart").data
    manifest["metadata"] = {"name": f"job-{number:04d}", "namespace": NAMESPACE}
    manifest["spec"]["rollout"] |= {"replicas": 5, "minReplicas": 1, "maxReplicas": 8}
    return manifest


class Onlooker:
    """The times at which each pod was first seen, and first seen running, from a process that watches the pods."""

    def __init__(self, plane: ControlPlane) -> None:
        self.created: dict[str, float] = {}
        self.running: dict[str, float] = {}
        self.alive: set[str] = set()
        command = [sys.executable, str(HERE / "onlooker.py"), str(plane.admin), NAMESPACE]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        self._lines.readline()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            time_s, name, phase = line.split()
            self.created.setdefault(name, float(time_s))
            if phase == "Running":
                self.running.setdefault(name, float(time_s))
            (self.alive.discard if phase == "Deleted" else self.alive.add)(name)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def control_plane() -> Iterator[tuple[ControlPlane, Onlooker]]:
    with ControlPlane(with_=("kcm", "sched", "kwok"), audited=True) as plane:
        plane.install_crds(ROOT / "crds")
        plane.add_nodes(NODES)
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        onlooker = Onlooker(plane)
        try:
            yield plane, onlooker
        finally:
            onlooker.end()


def create(plane: ControlPlane, count: int) -> None:
    for number in range(count):
        plane.api.create(JOBS, job(number))


def spread(times: dict[str, float], started: float) -> dict[str, float]:
    seconds = sorted(at - started for at in times.values())
    return {"median_s": round(seconds[len(seconds) // 2], 2), "last_s": round(seconds[-1], 2)}


def measure_operator(count: int, idle_s: float, limit_s: float, workers: int) -> dict[str, Any]:
    with control_plane() as (plane, onlooker), DriverDouble() as drivers:
        operator = OperatorProcess(
            plane, probe_url=drivers.url, workers=workers, kubeconfig=plane.kubeconfig(USER, "system:masters")
        )
        operator.start()
        operator.lead()
        cpu = operator.process.cpu_s()
        started = time.time()
        create(plane, count)
        figures: dict[str, Any] = {"objects_accepted_s": round(time.time() - started, 2)}
        alive: Any = {"timeout_s": limit_s, "needs": [operator.process]}
        wait_until(lambda: len(onlooker.running) >= count * PODS, "all pods to run", **alive)
        wait_until(lambda: all_run(plane, count), "all jobs to run", **alive)
        figures["all_jobs_running_s"] = round(time.time() - started, 2)
        figures["pod_created"] = spread(onlooker.created, started)
        figures["pod_running"] = spread(onlooker.running, started)
        time.sleep(3)
        figures["cpu_s"] = round(operator.process.cpu_s() - cpu, 2)
        figures["peak_mib"] = operator.peak_bytes() >> 20
        for name in ("decide", "wait", "reconcile"):
            metric = f"asyncflow_operator_{name}_seconds"
            figures[f"{name}_p99_s"] = operator.quantile(metric, 0.99)
            figures[f"{name}s"] = int(operator.total(f"{metric}_count"))
        settled = writes(plane)
        figures["writes"] = summary(settled)
        cpu = operator.process.cpu_s()
        time.sleep(idle_s)
        figures["idle"] = {
            "s": idle_s,
            "writes": len(writes(plane)) - len(settled),
            "cpu_s": round(operator.process.cpu_s() - cpu, 2),
        }
        print(json.dumps(figures), file=sys.stderr, flush=True)
        started = time.time()
        for number in range(count):
            plane.api.delete(f"{JOBS}/{job(number)['metadata']['name']}")
        wait_until(lambda: not onlooker.alive, "the last pod to go", **alive)
        figures["deleted_s"] = round(time.time() - started, 2)
        figures["rss_after_mib"] = operator.process.memory_bytes() >> 20
        figures["exit_status"] = operator.stop()
    return figures


def all_run(plane: ControlPlane, count: int) -> bool:
    jobs = plane.api.get(JOBS)["items"]
    return bool(sum(each.get("status", {}).get("phase") == "Running" for each in jobs) >= count)


def writes(plane: ControlPlane) -> list[Any]:
    """Return the operator's writes, except those to its Lease."""
    return [each for each in plane.requests(user=USER) if each.is_write and each.resource != "leases"]


def summary(requests: list[Any]) -> dict[str, Any]:
    kinds = collections.Counter(f"{each.verb} {each.resource}/{each.subresource}".rstrip("/") for each in requests)
    targets = collections.Counter(
        (each.resource, each.name) for each in requests if each.verb in ("create", "patch") and not each.subresource
    )
    refused = collections.Counter(each.code for each in requests if each.code >= 400)
    return {
        "all": len(requests),
        "by_kind": dict(kinds.most_common()),
        "repeated": sum(times - 1 for times in targets.values()),
        "refused": dict(refused),
    }


def measure_bare(count: int, limit_s: float) -> dict[str, Any]:
    with control_plane() as (plane, onlooker), tempfile.TemporaryDirectory() as folder:
        create(plane, count)
        file = Path(folder) / "manifests.jsonl"
        file.write_text("".join(json.dumps(prepared(plane, raw)) + "\n" for raw in plane.api.get(JOBS)["items"]))
        lines = file.read_text().splitlines()
        started = time.time()
        subprocess.run([sys.executable, str(HERE / "bare.py"), str(plane.admin), str(file)], check=True)
        figures: dict[str, Any] = {"written_s": round(time.time() - started, 2)}
        wait_until(lambda: len(onlooker.running) >= count * PODS, "all pods to run", timeout_s=limit_s)
        figures["objects"] = sum(len(stage) for line in lines for stage in json.loads(line))
        figures["pod_created"] = spread(onlooker.created, started)
        figures["pod_running"] = spread(onlooker.running, started)
    return figures


def prepared(plane: ControlPlane, raw: Manifest) -> list[list[Manifest]]:
    """Return the objects that the operator would write for a job, except the status, in stages.

    The TransferQueue is created first, since its pods refer to its UID.
    """
    desired = Desired(DesiredSettings(registry=Registry(prefix="asyncflow", tag="0"), master=b"0" * 32))
    view = custom_resource("RLJob", raw, None)
    state = JobState(owner=view.owner, job=view.model)
    children = desired.children(state)
    for child in children:
        if child["kind"] == "TransferQueue":
            queue = custom_resource("TransferQueue", plane.api.create(QUEUES, child), None)
    queue_state = TransferQueueState(owner=queue.owner, queue=queue.model, job=state)
    pods = [desired.pod(state, role, index, 0) for role, many in JOB_PODS for index in range(many)]
    pods += [desired.queue_pod(queue_state, role, index, 0) for role, many in QUEUE_PODS for index in range(many)]
    return [[*desired.supporting(state)], [*children], pods]


JOB_PODS: Any = (("driver", 1), ("trainer", 1), ("rollout", 5))
QUEUE_PODS: Any = (("controller", 1), ("storage", 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--idle-s", type=float, default=60.0)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--no-bare", action="store_true")
    options = parser.parse_args()
    operator = measure_operator(options.jobs, options.idle_s, options.limit_s, options.workers)
    figures: dict[str, Any] = {"jobs": options.jobs, "operator": operator}
    if not options.no_bare:
        figures["bare"] = measure_bare(options.jobs, options.limit_s)
        last = [figures[writer]["pod_created"]["last_s"] for writer in ("operator", "bare")]
        figures["last_pod_ratio"] = round(last[0] / last[1], 2)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
