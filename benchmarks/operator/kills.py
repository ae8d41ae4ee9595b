"""Measure the effect of a hundred random kills and scalings of rollouts on other pods, and the time of a scaling.

    PYTHONPATH=hack python benchmarks/operator/kills.py --events 100 --seeds 1 2

The limits are: no pod other than rollouts ends, the trainer does not restart, and the wanted rollouts run at the end.
In 95 of 100 scalings, less than 1 s passes from the arrival of a request to scale up at the API server until its
response to the creation of the last new pod.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from typing import Any

from scale import NAMESPACE, ROOT, job

from driver_double import DriverDouble
from kube.plane import ControlPlane
from operator_process import OperatorProcess
from rollout_storm import Storm

NODES = 20
MOST = 12
OPERATOR = "operator"
BUDGET = {"maxRestarts": 100_000, "backoffSeconds": 0}


def measure(plane: ControlPlane, seed: int, events: int) -> dict[str, Any]:
    manifest = job(seed)
    manifest["spec"]["rollout"] |= {"maxReplicas": MOST}
    manifest["spec"]["failurePolicy"] = {"rollout": BUDGET}
    name = manifest["metadata"]["name"]
    plane.api.create(f"/apis/asyncflow.dev/v1alpha1/namespaces/{NAMESPACE}/rljobs", manifest)
    storm = Storm(plane, NAMESPACE, name, seed=seed, most=MOST)
    plane.wait_until(lambda: storm.job().get("status", {}).get("phase") == "Running", "the job to run", timeout_s=120)
    before, first = storm.others(), len(plane.requests())
    storm.run(events)
    status = storm.job()["status"]
    times = latencies(plane, first, name, storm.scalings)
    return {
        "seed": seed,
        "events": dict(collections.Counter(event.partition(" ")[0] for event in storm.events)),
        "others_as_before": storm.others() == before,
        "trainer_attempt": status["attempt"],
        "restarts": status.get("restarts", {}),
        "scalings_up": len(times),
        "first_pod_s": spread([first for first, _ in times]),
        "last_pod_s": spread([last for _, last in times]),
    }


def latencies(plane: ControlPlane, first: int, name: str, scalings: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Return the seconds from each request to scale up until its first and last new pod, from the audit log."""
    requests = plane.requests()[first:]
    scaled = [each.at for each in requests if each.kind == "rljobs/scale" and each.is_write and each.name == name]
    created = [each for each in requests if each.user == OPERATOR and each.kind == "pods" and each.code == 201]
    made = [each.answered for each in created if each.name.startswith(f"{name}-rollout-")]
    found = []
    for at, (before, after) in zip(scaled, scalings, strict=True):
        since = sorted(moment for moment in made if moment > at)[: after - before] if after > before else []
        if since:
            found.append(((since[0] - at).total_seconds(), (since[-1] - at).total_seconds()))
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        word: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)
        for word, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--events", type=int, default=100)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1])
    chosen = arguments.parse_args()
    with ControlPlane(with_=("kcm", "sched", "kwok"), audited=True) as plane, DriverDouble() as drivers:
        plane.install_crds(ROOT / "crds")
        plane.add_nodes(NODES)
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        user = plane.kubeconfig(OPERATOR, "system:masters")
        operator = OperatorProcess(plane, OPERATOR, kubeconfig=user, probe_url=drivers.url, probe_seconds=1)
        operator.start()
        operator.lead()
        runs = [measure(plane, seed, chosen.events) for seed in chosen.seeds]
        operator.stop()
    print(json.dumps(runs, indent=1))
    well = all(run["others_as_before"] and run["trainer_attempt"] == 0 and run["last_pod_s"]["p95"] < 1 for run in runs)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
