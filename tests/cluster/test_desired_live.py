"""Tests of what the operator makes for a job, where there are controllers, and the newest Kueue."""

from dataclasses import replace

import pytest
from accepted import DESIRED, PLURALS, apply, job_state, workload_with

from asyncflow.api.names import FIELD_MANAGER
from kube import foreign
from kube.plane import ControlPlane
from kube.rest import APPLY, DRY_RUN


@pytest.mark.parametrize("kind", ["PriorityClass", "WorkloadPriorityClass"])
def test_a_workload_of_the_newest_kueue_with_a_priority(kwok_plane: ControlPlane, kind: str):
    foreign.install(kwok_plane)
    workload = workload_with("default", kind)
    path = f"/apis/{workload['apiVersion']}/namespaces/default/workloads/math"
    stored = kwok_plane.api.patch(path, workload, form=APPLY, query=DRY_RUN | {"fieldManager": FIELD_MANAGER})
    assert stored["spec"]["priorityClassRef"]["name"] == "high"


def test_the_budget_lets_one_pod_of_the_core_go_at_a_time(kwok_plane: ControlPlane, kwok_namespace: str):
    """With owners that have a scale of their own: the rollouts' is not that of the core."""
    api, jobs = kwok_plane.api, f"/apis/asyncflow.dev/v1alpha1/namespaces/{kwok_namespace}/rljobs"
    state = job_state(kwok_namespace, trainer={"replicas": 3})
    assert state.job is not None
    body = state.job.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    stored = api.create(jobs, body | {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "RLJob"})
    state = replace(state, owner=replace(state.owner, uid=stored["metadata"]["uid"]))
    apply(kwok_plane, DESIRED.supporting(state), dry=False)
    core = [("driver", 1), ("controller", 1), ("storage", 2), ("trainer", 3), ("rollout", 4)]
    apply(kwok_plane, [DESIRED.pod(state, role, index, 0) for role, count in core for index in range(count)], dry=False)
    budget = f"{PLURALS['PodDisruptionBudget'].format(kwok_namespace)}/math"

    def seen() -> tuple[int, int, int]:
        status = api.get(budget).get("status", {})
        return tuple(status.get(name, 0) for name in ("expectedPods", "currentHealthy", "disruptionsAllowed"))

    kwok_plane.wait_until(lambda: seen() == (7, 7, 1), f"one of 7 pods to be allowed to go, not {seen()}", timeout_s=30)
