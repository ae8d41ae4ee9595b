"""Every example is a legal manifest; what this version does not do is listed here, and said in its header."""

from pathlib import Path

import pytest
import yaml

from asyncflow.api.accelerators import PROFILES
from asyncflow.api.later import planned
from asyncflow.api.load import KINDS, load
from asyncflow.errors import NotYetError

EXAMPLES = Path(__file__).parents[2] / "examples"
OTHERS = {"kubernetes/autoscaler.yaml"}
"""Manifests of other kinds than ours."""
OURS = sorted(str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.yaml"))
OURS = [name for name in OURS if name not in OTHERS]

MINDSPEED = "spec.trainer.backend.name"
NOT_YET = {
    "kubernetes/async-staggered.yaml": {"spec.schedule.update"},
    "kubernetes/async-token.yaml": {"spec.schedule.swapAt"},
    "kubernetes/existing-queue.yaml": {"spec.transferQueue.name", "spec.weightSync.name"},
    "kubernetes/mooncake.yaml": {"spec.weightSync.transport"},
    "published/asyncflow-7b.yaml": {MINDSPEED},
    "published/asyncflow-32b.yaml": {MINDSPEED},
    "published/periodic-7b-gsm8k.yaml": {MINDSPEED, "spec.algorithm.old"},
    "published/periodic-8b.yaml": {MINDSPEED, "spec.algorithm.old"},
    "published/periodic-32b.yaml": {MINDSPEED, "spec.algorithm.old"},
    "published/verl-fully-async.yaml": {
        "spec.algorithm.name",
        "spec.schedule.swapAt",
        "spec.schedule.requireBatches",
    },
    "published/mindspeed-rl-7b.yaml": {MINDSPEED},
    "published/mindspeed-rl-32b.yaml": {MINDSPEED},
    "published/mindspeed-rl-moe-30b.yaml": {MINDSPEED},
    "published/mindspeed-rl-671b.yaml": {MINDSPEED},
}
"""Examples that are refused with "not yet", and the fields that are."""


def header(name: str) -> str:
    lines = (EXAMPLES / name).read_text().splitlines()
    return " ".join(
        line.removeprefix("#").strip() for line in lines[: lines.index("apiVersion: asyncflow.dev/v1alpha1")]
    )


@pytest.mark.parametrize("name", [name for name in OURS if name not in NOT_YET])
def test_it_is_what_this_version_does(name: str) -> None:
    load(EXAMPLES / name)
    assert "Not yet" not in header(name)


@pytest.mark.parametrize("name", NOT_YET)
def test_it_is_legal_and_not_yet_for_the_listed_fields(name: str) -> None:
    with pytest.raises(NotYetError):
        load(EXAMPLES / name)
    data = yaml.safe_load((EXAMPLES / name).read_text())
    spec = KINDS[data["kind"]].model_validate(data).spec
    fields = {".".join(map(str, problem.place)) for problem in planned(data["kind"], spec)}
    assert fields == NOT_YET[name]


@pytest.mark.parametrize("name", NOT_YET)
def test_its_header_says_what_is_not_yet(name: str) -> None:
    sentence = header(name).partition("Not yet: ")[2]
    for field in NOT_YET[name]:
        assert field.removeprefix("spec.").removesuffix(".name") in sentence


def test_there_is_one_for_every_accelerator_and_every_mode() -> None:
    jobs = [load(EXAMPLES / name) for name in OURS if name not in NOT_YET]
    specs = [job.spec for job in jobs if job.kind == "RLJob"]
    assert {spec.trainer.accelerator.profile for spec in specs} == set(PROFILES)
    modes = {(spec.schedule.mode, spec.schedule.swap_at) for spec in specs}
    assert modes == {("sync", "quota"), ("periodic", "quota"), ("async", "quota"), ("async", "sequence")}
    assert {spec.scheduling.gang for spec in specs} == {"none", "volcano", "kueue"}
    assert {job.kind for job in jobs} == set(KINDS)


def test_the_published_ones_are_those_of_the_list() -> None:
    folder = EXAMPLES / "published"
    listed = (folder / "README.md").read_text()
    for file in folder.glob("*.yaml"):
        assert file.name in listed
        assert "ot published" in header(f"published/{file.name}")


@pytest.mark.parametrize("name", [name for name in OURS if name.startswith(("kubernetes/", "published/"))])
def test_a_job_is_named_as_its_file(name: str) -> None:
    document = yaml.safe_load((EXAMPLES / name).read_text())
    if document["kind"] == "RLJob":
        assert document["metadata"]["name"] == Path(name).stem
