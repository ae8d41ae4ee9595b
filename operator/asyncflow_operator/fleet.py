"""Overview of all jobs: the gauges that are read from the store when ``/metrics`` is asked.

Invariant: no object's name is a label, so that the number of series does not grow with the number of jobs.
"""

from __future__ import annotations

from collections import Counter

from asyncflow_operator.cluster.kinds import OURS, POD, RLJOB
from asyncflow_operator.cluster.owners import Mine
from asyncflow_operator.cluster.store import Store
from asyncflow_operator.decide.phases import ACTIVE
from asyncflow_operator.telemetry import Metrics


def show(store: Store, metrics: Metrics) -> None:
    """Set the gauges to what the store holds now."""
    phases: Counter[str] = Counter()
    used: dict[str, float] = {}
    stalled = 0
    for _, _, entry in store.all(RLJOB.name):
        job: Mine = entry.view
        phases[job.status.phase] += 1
        stalled += any(each.type == "Stalled" and each.status == "True" for each in job.status.conditions)
        for role, share in _budgets(job).items():
            used[role] = max(share, used.get(role, 0.0))
    pods = Counter((entry.view.role, entry.view.phase) for _, _, entry in store.all(POD.name))
    for gauge in (metrics.jobs, metrics.pods, metrics.budget_used):
        gauge.clear()
    for phase, count in phases.items():
        metrics.jobs.labels(phase).set(count)
    for (role, phase), count in pods.items():
        metrics.pods.labels(role, phase).set(count)
    for role, share in used.items():
        metrics.budget_used.labels(role).set(share)
    for kind in OURS:
        metrics.objects.labels(kind.name).set(store.count(kind.name))
    metrics.jobs_stalled.set(stalled)


def _budgets(job: Mine) -> dict[str, float]:
    """Return, by role, the share of its restarts that a job has used; one that may have none is left out, and so is a
    job that is suspended or has ended, of which nothing is restarted.
    """
    if job.model is None or job.status.phase not in ACTIVE:
        return {}
    policy = job.model.spec.failure_policy
    most = {role: getattr(policy, role).max_restarts for role in type(policy).model_fields}
    return {role: job.status.restarts.get(role, 0) / count for role, count in most.items() if count}
