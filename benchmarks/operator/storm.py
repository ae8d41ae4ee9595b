"""Make three hundred random changes with kubectl, and check the jobs afterwards: see ``hack/kubectl_storm.py``.

    PYTHONPATH=hack python benchmarks/operator/storm.py --events 300 --seeds 1 2 3

The limits are: within three minutes after the last change, the cluster matches the last specs; no foreign object was
changed; the operator logged no exception and stops writing.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from pathlib import Path
from typing import Any

from scale import ROOT, job

import operator_rights
from driver_double import DriverDouble
from kube.plane import ControlPlane
from kubectl_storm import Storm, jobs_of
from operator_process import OperatorProcess

NODES = 20


def run_storm(plane: ControlPlane, drivers: DriverDouble, *, seed: int, events: int, logs: Path) -> dict[str, Any]:
    """Run one storm and return its figures. logs: the folder for the operator's log if the storm fails."""
    namespace = f"storm-{seed}"
    plane.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    options = {"namespace": namespace, "namespaces": namespace, "probe_url": drivers.url, "probe_seconds": 0.5}
    operator_rights.grant(plane, namespace)
    user = operator_rights.account(plane, namespace)
    operator = OperatorProcess(plane, namespace, kubeconfig=user, **options)
    operator.start()
    operator.lead()
    jobs = jobs_of(job(0), namespace)
    storm = Storm(plane, operator, drivers, namespace=namespace, jobs=jobs, queue="q", seed=seed)
    figures: dict[str, Any] = {"seed": seed}
    try:
        storm.begin()
        started = time.monotonic()
        storm.run(events)
        figures["storm_s"] = round(time.monotonic() - started, 1)
        figures["settled_s"] = round(storm.settle(), 1)
    except BaseException:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{namespace}.log").write_text(operator.log)
        raise
    figures["events"] = dict(collections.Counter(event.split()[0] for event in storm.events))
    figures["peak_mib"] = operator.peak_bytes() >> 20
    assert "Traceback" not in operator.log, operator.log
    figures["refused_rights"] = sorted(map(str, operator_rights.refused(operator_rights.of(plane, namespace))))
    assert not figures["refused_rights"], figures
    figures["exit_status"] = operator.stop()
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--events", type=int, default=300)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1])
    arguments.add_argument("--logs", type=Path, default=ROOT / "runs")
    chosen = arguments.parse_args()
    with ControlPlane(with_=("kcm", "sched", "kwok"), audited=True) as plane, DriverDouble() as drivers:
        plane.install_crds(ROOT / "crds")
        plane.add_nodes(NODES)
        for seed in chosen.seeds:
            print(json.dumps(run_storm(plane, drivers, seed=seed, events=chosen.events, logs=chosen.logs)), flush=True)


if __name__ == "__main__":
    main()
