"""Measure the effect of hostile drivers on the operator and on the jobs of other users.

    PYTHONPATH=hack python benchmarks/operator/hostile.py --honest 20 --hostile 60

Jobs run on KWOK under the real operator: first only honest jobs, then also hostile jobs, with the same number of each
kind of ``hack/hostile_drivers.py``. Every second hostile job is suspended, so that its driver also receives commands.
The limits are a peak of 150 MiB of resident memory and, for the honest jobs, 95th percentiles that grow by at most a
quarter plus 100 ms: of the time between two requests to a driver, and of the time from a request to scale up to the
creation of the last new pod.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import pairwise
from typing import Any

from kills import OPERATOR, latencies, spread
from scale import JOBS, NAMESPACE, ROOT, job

from asyncflow_operator.drivers import PROVEN_S
from hostile_drivers import KINDS, HostileDrivers
from kube.plane import ControlPlane
from operator_process import OperatorProcess

NODES = 20
MOST_MIB = 150
PROBE_S = 2.0
SETTLED_S = 20.0
"""Seconds for the creation of pods and the deletion of the suspended jobs' pods, which are load but not an attack."""
SLACK_S = 0.1
SLACK = 1.25


def small(name: str) -> dict[str, Any]:
    """Return a job with few pods that can be scaled up."""
    manifest = job(0)
    manifest["metadata"]["name"] = name
    manifest["spec"]["rollout"] |= {"replicas": 1, "minReplicas": 0, "maxReplicas": 8}
    manifest["spec"]["transferQueue"]["storageUnits"] = 1
    return manifest


def create(plane: ControlPlane, drivers: HostileDrivers, names: list[str]) -> None:
    """Create jobs, and wait until the operator has queried the driver of each."""
    for name in names:
        plane.api.create(JOBS, small(name))
    plane.wait_until(lambda: drivers.asked().keys() >= set(names), f"{len(names)} drivers to be asked", timeout_s=300)


def measure(plane: ControlPlane, drivers: HostileDrivers, honest: list[str], *, seconds: float, seed: int) -> Any:
    """Scale honest jobs up and down for ``seconds``, and return their latencies."""
    dice = random.Random(seed)
    first = len(plane.requests())
    wanted = {name: plane.api.get(f"{JOBS}/{name}")["spec"]["rollout"]["replicas"] for name in honest}
    started = time.monotonic()
    scalings: dict[str, list[tuple[int, int]]] = {name: [] for name in honest}
    while time.monotonic() - started < seconds:
        name = dice.choice(honest)
        replicas = dice.choice([count for count in range(1, 6) if count != wanted[name]])
        scalings[name].append((wanted[name], replicas))
        wanted[name] = replicas
        plane.api.patch(f"{JOBS}/{name}/scale", {"spec": {"replicas": replicas}})
        time.sleep(0.25)
    time.sleep(2)
    scaled = [last for name in honest for _, last in latencies(plane, first, name, scalings[name])]
    asked = drivers.asked()
    gaps = [after - before for name in honest for before, after in pairwise(asked[name]) if before > started]
    return {"asked_every_s": spread(gaps), "scaled_up_s": spread(scaled), "scalings_up": len(scaled)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--honest", type=int, default=20)
    arguments.add_argument("--hostile", type=int, default=60)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--seed", type=int, default=1)
    chosen = arguments.parse_args()
    honest = [f"honest-{number}" for number in range(chosen.honest)]
    kinds = list(KINDS)
    hostile = [f"{kinds[number % len(kinds)]}-{number}" for number in range(chosen.hostile)]
    with ControlPlane(with_=("kcm", "sched", "kwok"), audited=True) as plane:
        plane.install_crds(ROOT / "crds")
        plane.add_nodes(NODES)
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        with HostileDrivers(plane.folder / "log" / "drivers") as drivers:
            user = plane.kubeconfig(OPERATOR, "system:masters")
            options: dict[str, Any] = {"probe_url": drivers.url, "probe_seconds": PROBE_S}
            operator = OperatorProcess(plane, OPERATOR, kubeconfig=user, **options)
            operator.start()
            operator.lead()
            figures: dict[str, Any] = {}
            create(plane, drivers, honest)
            figures["idle_mib"] = operator.process.memory_bytes() >> 20
            time.sleep(PROVEN_S)
            figures["alone"] = measure(plane, drivers, honest, seconds=chosen.seconds, seed=chosen.seed)
            figures["alone_peak_mib"] = operator.peak_bytes() >> 20
            create(plane, drivers, hostile)
            for name in hostile[::2]:
                plane.api.patch(f"{JOBS}/{name}", {"spec": {"suspend": True}})
            time.sleep(SETTLED_S)
            cpu, started = operator.process.cpu_s(), time.monotonic()
            figures["attacked"] = measure(plane, drivers, honest, seconds=chosen.seconds, seed=chosen.seed)
            figures["attacked_cores"] = round((operator.process.cpu_s() - cpu) / (time.monotonic() - started), 2)
            figures["attacked_peak_mib"] = operator.peak_bytes() >> 20
            asked = drivers.asked()
            figures["hostile_asked"] = {
                kind: sum(len(asked[n]) for n in hostile if n.startswith(kind)) for kind in KINDS
            }
            figures["tracebacks"] = operator.log.count("Traceback")
            figures["exit_status"] = operator.stop()
    print(json.dumps(figures, indent=1))
    same = all(
        figures["attacked"][what]["p95"] <= SLACK * figures["alone"][what]["p95"] + SLACK_S
        for what in ("asked_every_s", "scaled_up_s")
    )
    sys.exit(0 if same and figures["attacked_peak_mib"] < MOST_MIB else 1)


if __name__ == "__main__":
    main()
