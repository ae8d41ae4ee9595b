"""Measure the cost of idle jobs, and of jobs that only make progress: API writes and CPU.

    python benchmarks/operator/idle.py --jobs 100 --s 60

First, every driver always gives the same answer; the limit is no write except to the Lease. Then every driver advances
by a step with each request; the limit is one write per object in 15 s. Each part starts a new operator process.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import sys
import time
from functools import partial
from typing import Any

from scale import JOBS, NAMESPACE, NODES, ROOT, all_run, create

import operator_rights
from driver_double import Answer, DriverDouble, steady, stepping
from kube.audit import Request
from kube.plane import ControlPlane
from kube.process import wait_until
from operator_process import OperatorProcess

BAR_S = 15.0
QUIET_S = 5.0


def measure(plane: ControlPlane, name: str, answer: Answer, *, jobs: int, seconds: float) -> dict[str, Any]:
    with DriverDouble(answer) as drivers:
        account = operator_rights.account(plane, name)
        operator = OperatorProcess(plane, name, kubeconfig=account, namespace=NAMESPACE, probe_url=drivers.url)
        operator.start()
        operator.lead()
        needs = [operator.process]
        wait_until(lambda: all_run(plane, jobs), "all jobs to run", timeout_s=600, needs=needs)
        quiet = partial(is_quiet, plane, name, statuses=answer is not steady)
        wait_until(quiet, "the writes to end", timeout_s=300, needs=needs)
        before, cpu = len(writes(plane, name)), operator.process.cpu_s()
        time.sleep(seconds)
        done = writes(plane, name)[before:]
        figures = {
            "jobs": jobs,
            "s": seconds,
            "writes": len(done),
            "by_kind": dict(collections.Counter(f"{each.verb} {each.kind}" for each in done)),
            "most_of_one_object": max(collections.Counter((each.kind, each.name) for each in done).values(), default=0),
            "shortest_gap_s": shortest_gap(done),
            "cpu_s": round(operator.process.cpu_s() - cpu, 2),
            "peak_mib": operator.peak_bytes() >> 20,
        }
        operator.stop()
    return figures


def is_quiet(plane: ControlPlane, name: str, *, statuses: bool) -> bool:
    """Return whether there is no write for some seconds. statuses: ignore writes of statuses, which never end."""
    before = len(writes(plane, name))
    time.sleep(QUIET_S)
    return all(statuses and each.subresource == "status" for each in writes(plane, name)[before:])


def writes(plane: ControlPlane, name: str) -> list[Request]:
    return [each for each in operator_rights.of(plane, name) if each.is_write and each.resource != "leases"]


def shortest_gap(done: list[Request]) -> float | None:
    """Return the least seconds between the arrivals of two writes of one object, None without two such writes."""
    arrivals = collections.defaultdict(list)
    for each in done:
        arrivals[each.kind, each.name].append(each.at.timestamp())
    gaps = [later - earlier for times in arrivals.values() for earlier, later in itertools.pairwise(times)]
    return round(min(gaps), 2) if gaps else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--s", type=float, default=60.0)
    options = parser.parse_args()
    with ControlPlane(with_=("kcm", "sched", "kwok"), audited=True) as plane:
        plane.install_crds(ROOT / "crds")
        plane.add_nodes(NODES)
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        operator_rights.grant(plane, NAMESPACE)
        create(plane, options.jobs)
        figures = {
            answer.__name__: measure(plane, answer.__name__, answer, jobs=options.jobs, seconds=options.s)
            for answer in (steady, stepping)
        }
        plane.api.delete(JOBS)
    print(json.dumps(figures, indent=1))
    too_many = figures["stepping"]["most_of_one_object"] > math.ceil(options.s / BAR_S)
    sys.exit(figures["steady"]["writes"] > 0 or too_many)


if __name__ == "__main__":
    main()
