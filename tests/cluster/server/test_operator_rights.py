"""An operator of single namespaces in one of which its rights go and come back."""

from collections.abc import Iterator

import pytest
from world import OURS, World, quickstart

import operator_rights
from kube.plane import ControlPlane
from kube.process import wait_until
from operator_process import OperatorProcess

KEPT, LOST = "rights-kept", "rights-lost"


@pytest.fixture
def worlds(plane: ControlPlane) -> dict[str, World]:
    made = {name: World.new(plane, name) for name in (KEPT, LOST)}
    for name in made:
        operator_rights.grant_in(plane, name, account=(KEPT, "operator"), leads=name == KEPT)
    return made


@pytest.fixture
def operator(plane: ControlPlane, worlds: dict[str, World]) -> Iterator[OperatorProcess]:
    running = OperatorProcess(
        plane,
        "rights",
        kubeconfig=plane.service_account(KEPT, "operator"),
        namespace=KEPT,
        namespaces=",".join(worlds),
        rights_seconds=0.5,
    )
    running.start()
    running.lead()
    yield running
    running.process.end()


def test_jobs_go_on_where_rights_are_although_they_are_gone_elsewhere(
    plane: ControlPlane, worlds: dict[str, World], operator: OperatorProcess
) -> None:
    def begins(namespace: str, name: str) -> None:
        plane.api.create(f"{OURS}/namespaces/{namespace}/rljobs", quickstart(namespace, name))
        wait_until(
            lambda: f"{name}-driver-0" in worlds[namespace].pods(),
            f"the first pod of {name} in {namespace}",
            needs=[operator.process],
        )

    begins(LOST, "before")
    operator_rights.revoke_in(plane, LOST)
    wait_until(lambda: "namespaces are left out" in operator.log, "a process without it", needs=[operator.process])
    begins(KEPT, "meanwhile")
    assert list(worlds[LOST].pods()) == ["before-driver-0"]
    operator_rights.grant_in(plane, LOST, account=(KEPT, "operator"), leads=False)
    begins(LOST, "after")
    assert '"with": "rights-lost"' in operator.log
    operator.stop()
