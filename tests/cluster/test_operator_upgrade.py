"""An operator of another version takes over jobs that run, with one more field in their definition: nothing changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from one_job import OneJob
from scripted_driver import ScriptedDrivers

from kube.plane import ControlPlane
from operator_process import OperatorProcess

DEFINITION = Path(__file__).parents[2] / "crds" / "asyncflow.dev_rljobs.yaml"
OLD, NEW = "1.0.0", "2.0.0"


@pytest.fixture
def newer_definition(kwok_plane: ControlPlane) -> Iterator[dict[str, Any]]:
    """The definition of an RLJob with one more field in spec and in status; the present one is put back afterwards."""
    present = DEFINITION.read_text()
    newer: dict[str, Any] = yaml.safe_load(present)
    fields = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        fields[part]["properties"]["newest"] = {"type": "string", "maxLength": 8}
    yield newer
    kwok_plane.kubectl("apply", "-f", "-", manifest=present)


def test_pods_of_running_jobs_stay_and_nothing_is_written(
    kwok_plane: ControlPlane, kwok_namespace: str, drivers: ScriptedDrivers, newer_definition: dict[str, Any]
) -> None:
    def start(tag: str) -> OperatorProcess:
        operator = OperatorProcess(
            kwok_plane,
            f"operator-{tag}",
            kubeconfig=kwok_plane.kubeconfig(f"operator-{tag}", "system:masters"),
            namespaces=kwok_namespace,
            lease=kwok_namespace,
            probe_url=drivers.url,
            probe_seconds=0.5,
            tag=tag,
        )
        operator.start()
        operator.lead()
        return operator

    def job(name: str) -> OneJob:
        return OneJob(kwok_plane, kwok_namespace, name, drivers.of(kwok_namespace, name))

    def writes() -> list[str]:
        """All but what the old one had seen and not yet put into a status."""
        made = kwok_plane.requests(user=f"operator-{NEW}")
        return [
            f"{each.verb} {each.kind}/{each.name}"
            for each in made
            if each.is_write and each.subresource != "status" and each.kind != "leases"
        ]

    running = [job(f"running-{number}").create() for number in range(3)]
    old = start(OLD)
    for each in running:
        each.until_says("Ready", "Ready")
        each.until_says("WhyPending", "NothingPending")
    assert old.stop() == 0
    before = [each.pods() for each in running]

    kwok_plane.kubectl("apply", "-f", "-", manifest=newer_definition)
    new = start(NEW)
    kwok_plane.wait_until(lambda: looked_at(new) >= len(running), "every job to be looked at")
    assert not writes(), writes()
    assert [each.pods() for each in running] == before

    running[0].edit(newest="field")
    running[0].annotate("rollout-0", exit="1")
    running[0].until(lambda: running[0].attempts("rollout").get("rollout-0") == "1", "the rollout to come again")
    assert image(running[0], "rollout-0").endswith(f":{OLD}"), "a job keeps the images that it began with"
    later = job("later").create()
    later.until(lambda: later.pods("driver"), "the driver of a job that begins now")
    assert image(later, "driver-0").endswith(f":{NEW}")
    same = [{seat: uid for seat, uid in each.uids().items() if seat != "rollout-0"} for each in running]
    assert same == [
        {seat: pod["metadata"]["uid"] for seat, pod in pods.items() if seat != "rollout-0"} for pods in before
    ]
    new.process.end()


def looked_at(operator: OperatorProcess) -> float:
    return operator.total("asyncflow_operator_reconciles_total", kind="RLJob")


def image(job: OneJob, pod: str) -> str:
    return str(job.pods()[pod]["spec"]["containers"][0]["image"])
