"""Every example is a manifest that this version runs; the header of a published set-up says what is missing."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncflow.api.check import inspect
from asyncflow.api.document import parse
from asyncflow.api.load import KINDS, load
from asyncflow.api.placement import PROFILES
from asyncflow.plugins import installed
from asyncflow.telemetry.metrics import DriverMetrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SETUPS = sorted((ROOT / "docs" / "guide" / "setups").glob("*.yaml"))
OTHERS = {"kubernetes/follow.yaml", "kubernetes/hpa.yaml", "kubernetes/keda.yaml"}
"""Manifests of kinds that are not AsyncFlow's."""
OURS = sorted({str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.yaml")} - OTHERS)


def header(file: Path) -> str:
    lines = file.read_text().splitlines()
    return " ".join(
        line.removeprefix("#").strip() for line in lines[: lines.index("apiVersion: asyncflow.dev/v1alpha1")]
    )


def lacking(data: dict[str, Any]) -> set[str]:
    """Return the fields of a manifest that ask for what this version does not have; nothing else is wrong with it."""
    built, problems = inspect(KINDS[data["kind"]], data)
    assert built is not None
    assert all(problem.planned for problem in problems), problems
    backend = data["spec"]["trainer"]["backend"]["name"]
    missing = set() if backend in installed("asyncflow.trainer_backends") else {"spec.trainer.backend.name"}
    return {problem.path for problem in problems} | missing


@pytest.mark.parametrize("name", OURS)
def test_it_is_what_this_version_does(name: str) -> None:
    manifest = load(EXAMPLES / name)
    assert "Not yet" not in header(EXAMPLES / name)
    if manifest.kind == "RLJob" and manifest.spec.storage.checkpoints.claim is not None:
        assert manifest.spec.storage.ledger.claim is not None, "checkpoints without their ledger cannot be resumed"


@pytest.mark.parametrize("file", SETUPS, ids=lambda file: file.stem)
def test_the_header_of_a_setup_says_what_this_version_lacks(file: Path) -> None:
    sentence = header(file).partition("Not yet: ")[2].partition(". ")[0]
    fields = lacking(parse(file.read_text(), source=file.name).data)
    assert len(fields) == len([word for word in sentence.split(", ") if word])
    for field in fields:
        assert field.removeprefix("spec.").removesuffix(".name") in sentence


def test_there_is_one_for_every_accelerator_and_every_mode() -> None:
    jobs = [load(EXAMPLES / name) for name in OURS]
    specs = [job.spec for job in jobs if job.kind == "RLJob"]
    assert {spec.trainer.accelerator.profile for spec in specs} == set(PROFILES)
    modes = {(spec.schedule.mode, spec.schedule.swap_at) for spec in specs}
    swaps = {("async", swap_at) for swap_at in ("quota", "sequence", "token")}
    assert modes == {("sync", "quota"), ("periodic", "quota")} | swaps
    assert {spec.scheduling.gang for spec in specs} == {"none", "volcano", "kueue"}
    assert {job.kind for job in jobs} == set(KINDS)


def test_the_setups_are_those_of_the_list() -> None:
    listed = (ROOT / "docs" / "guide" / "setups" / "README.md").read_text()
    for file in SETUPS:
        assert file.name in listed
        assert "ot published" in header(file)


@pytest.mark.parametrize(
    "file", [*(EXAMPLES / name for name in OURS if name.startswith("kubernetes/")), *SETUPS], ids=lambda file: file.stem
)
def test_a_job_is_named_as_its_file(file: Path) -> None:
    document = yaml.safe_load(file.read_text())
    if document["kind"] == "RLJob":
        assert document["metadata"]["name"] == file.stem


TRIGGERS = {"serverAddress", "query", "threshold", "activationThreshold", "namespace", "ignoreNullValues", "timeout"}
SCALED = {"scaleTargetRef", "pollingInterval", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}


def test_autoscalers_scale_a_job_of_the_examples_within_its_bounds_on_what_its_driver_shows() -> None:
    """KEDA's fields are those of keda.sh/docs/2.22, of the ScaledObject and of its trigger ``prometheus``."""
    kubernetes = EXAMPLES / "kubernetes"
    job = load(kubernetes / "cpu.yaml")
    hpa, keda = (yaml.safe_load((kubernetes / name).read_text())["spec"] for name in ("hpa.yaml", "keda.yaml"))
    gauge = DriverMetrics().desired_rollouts.describe()[0].name
    for target in (hpa["scaleTargetRef"], keda["scaleTargetRef"]):
        assert target == {"apiVersion": job.api_version, "kind": job.kind, "name": job.metadata.name}
    for least, most in (
        (hpa["minReplicas"], hpa["maxReplicas"]),
        (keda["minReplicaCount"], keda["maxReplicaCount"]),
    ):
        assert job.spec.rollout.min_replicas <= least < most <= job.spec.rollout.max_replicas
    assert set(keda) <= SCALED
    (trigger,) = keda["triggers"]
    assert set(trigger) <= {"type", "metricType", "metadata", "name", "authenticationRef", "useCachedMetrics"}
    assert trigger["type"] == "prometheus"
    assert set(trigger["metadata"]) <= TRIGGERS
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes strings alone"
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert f'max({gauge}{{namespace="default", rljob="{job.metadata.name}"}})' == trigger["metadata"]["query"]
    assert f"seriesQuery: '{gauge}'" in (kubernetes / "hpa.yaml").read_text()
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
