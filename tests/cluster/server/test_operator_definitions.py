"""Definitions of our kinds that come after the operator, are older, and go while it runs, in a cluster of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from world import OURS, World, quickstart

import operator_rights
from kube.plane import ControlPlane
from kube.process import wait_until
from operator_process import OperatorProcess

CRDS = Path(__file__).parents[3] / "crds"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WAITS = "waiting for the definitions"


@pytest.fixture(scope="module")
def bare() -> Iterator[ControlPlane]:
    with ControlPlane() as running:
        yield running


@pytest.fixture
def operator(bare: ControlPlane) -> Iterator[OperatorProcess]:
    world = World.new(bare, "late")
    operator_rights.grant(bare, world.namespace)
    account = operator_rights.account(bare, "late")
    running = OperatorProcess(bare, "late", kubeconfig=account, namespace="late", namespaces="late")
    yield running
    running.process.end()


def older_definition() -> str:
    """Return the definition of a WeightSync without a field of its status."""
    definition = yaml.safe_load((CRDS / "asyncflow.dev_weightsyncs.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]["properties"]["certificate"]
    return yaml.safe_dump(definition)


def test_jobs_begin_when_the_definitions_of_this_version_have_come_and_when_they_have_come_again(
    bare: ControlPlane, operator: OperatorProcess
) -> None:
    def begins(job: str) -> None:
        bare.api.create(f"{OURS}/namespaces/late/rljobs", quickstart("late", job))
        driver = f"/api/v1/namespaces/late/pods/{job}-driver-0"
        wait_until(lambda: bare.api.exists(driver), f"the first pod of {job}", needs=[operator.process])

    operator.process.start()
    wait_until(lambda: WAITS in operator.log, "the operator to wait", needs=[operator.process])
    assert operator.get("/readyz")[0] == 503
    for name in ("rljobs", "transferqueues"):
        bare.kubectl("apply", "-f", str(CRDS / f"asyncflow.dev_{name}.yaml"))
    bare.kubectl("apply", "-f", "-", manifest=older_definition())
    says = "they lack WeightSync.status.certificate"
    wait_until(lambda: says in operator.log, "it to wait for newer ones", needs=[operator.process])
    assert operator.get("/readyz")[0] == 503
    bare.install_crds(CRDS)
    operator.lead()
    before = operator.log.count(WAITS)
    begins("first")
    for each in bare.api.get(DEFINITIONS)["items"]:
        bare.api.delete(f"{DEFINITIONS}/{each['metadata']['name']}")
    wait_until(lambda: operator.log.count(WAITS) > before, "it to wait again", needs=[operator.process])
    bare.install_crds(CRDS)
    begins("second")
