"""Tests of what can be known of an image without building it: what it is made from, who runs in it, what it starts."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import debian
from asyncflow.api.placement import PROFILES

ROOT = Path(__file__).parents[2]
IMAGES = {path.parent.name: path for path in sorted((ROOT / "images").glob("*/Dockerfile"))}
RUNTIMES = [name for name in IMAGES if name.startswith("runtime-")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR"}
DEPENDENCIES = {"libnl-3-200", "libnl-route-3-200"}
"""Packages that apt brings with libibverbs1."""
OURS = {"torch", "lora", "gym", "math", "data", "mooncake", "redis"}
EXTRAS = {image: OURS if image in RUNTIMES else {"operator"} for image in IMAGES}


@dataclass(frozen=True)
class Line:
    """One instruction; stage: the number of the FROM that it follows, 0 before the first."""

    stage: int
    word: str
    rest: str


def lines(image: str) -> list[Line]:
    text = re.sub(r"(?m)^#.*\n", "", IMAGES[image].read_text()).replace("\\\n", " ")
    parsed: list[Line] = []
    stage = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        stage += word == "FROM"
        parsed.append(Line(stage, word, rest.strip()))
    return parsed


def last(image: str, word: str) -> str:
    """The instruction that counts: of the last stage, the last one."""
    stages = lines(image)
    return [line.rest for line in stages if line.stage == stages[-1].stage and line.word == word][-1]


def environment(image: str) -> str:
    return " ".join(line.rest for line in lines(image) if line.stage == 2 and line.word == "ENV")


def test_there_is_an_image_for_the_operator_and_for_every_accelerator() -> None:
    assert set(IMAGES) == {"operator"} | {facts.image for facts in PROFILES.values()}


@pytest.mark.parametrize("image", IMAGES)
def test_every_instruction_is_known_and_the_build_has_two_stages(image: str) -> None:
    assert {line.word for line in lines(image)} <= KNOWN
    assert [line.rest.split(" AS ")[1:] for line in lines(image) if line.word == "FROM"] == [["build"], []]


@pytest.mark.parametrize("image", IMAGES)
def test_the_base_is_an_argument_with_a_version(image: str) -> None:
    arguments = dict(line.rest.split("=", 1) for line in lines(image) if line.word == "ARG")
    for base in (line.rest.split()[0] for line in lines(image) if line.word == "FROM"):
        name = re.fullmatch(r"\${(\w+)}", base)
        assert name is not None
        tag = arguments[name[1]].rpartition(":")[2]
        assert re.match(r"\d+\.\d+\.\w+", tag), tag


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_installed_has_a_version(image: str) -> None:
    arguments = dict(line.rest.split("=", 1) for line in lines(image) if line.word == "ARG")
    for line in lines(image):
        if line.word != "RUN" or "pip install" not in line.rest:
            continue
        assert "-c constraints.txt" in line.rest
        for text in re.findall(r'"([^"]+)"|\s(torch)$', line.rest):
            wanted = re.sub(r"\${(\w+)}", lambda name: arguments[name[1]], "".join(text))
            if not wanted.startswith("."):
                requirement = Requirement(wanted)
                assert str(requirement.specifier).startswith("==") or canonicalize_name(requirement.name) in pinned()


def pinned() -> dict[str, str]:
    found = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("image", IMAGES)
def test_the_extras_that_are_installed_exist(image: str) -> None:
    wanted = [set(names.split(",")) for line in lines(image) for names in re.findall(r'"\.\[([\w,]+)\]"', line.rest)]
    assert wanted == [EXTRAS[image]]
    assert EXTRAS[image] <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("image", RUNTIMES)
def test_a_runtime_has_what_the_backends_of_the_queue_need_of_the_system(image: str) -> None:
    stage = lines(image)[-1].stage
    named = [line.rest for line in lines(image) if line.stage == stage and line.word == "RUN"]
    needed = {*debian.PROGRAMS.values(), *debian.LIBRARIES.values()} - DEPENDENCIES
    assert [set(re.findall(r"[\w.-]+", text.split("--no-install-recommends")[1].split("&&")[0])) for text in named] == [
        needed
    ]


def test_the_operator_has_no_torch() -> None:
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["operator"]]
    names = {canonicalize_name(Requirement(each).name) for each in needed}
    assert names & {"torch", "transformers"} == set()


@pytest.mark.parametrize("image", IMAGES)
def test_it_runs_as_nobody_in_particular(image: str) -> None:
    assert last(image, "USER") == "65532:65532"
    assert re.search(r"\bHOME=/tmp\b", environment(image))


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_is_there_and_reaches_the_build(image: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    for line in lines(image):
        if line.word == "COPY" and not line.rest.startswith("--from=build"):
            for source in line.rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in let_in


def test_the_operator_starts_its_own_command() -> None:
    assert last("operator", "ENTRYPOINT") == '["asyncflow-operator"]'
    assert "asyncflow-operator" in PROJECT["scripts"]


@pytest.mark.parametrize("image", RUNTIMES)
def test_a_runtime_starts_what_the_pod_says(image: str) -> None:
    assert last(image, "ENTRYPOINT") == "[]"
    assert "PATH=/opt/asyncflow/bin:" in environment(image)


def test_torch_npu_is_of_the_version_of_torch() -> None:
    arguments = dict(line.rest.split("=", 1) for line in lines("runtime-ascend") if line.word == "ARG")
    assert arguments["TORCH_NPU"].split(".")[:2] == pinned()["torch"].split(".")[:2]
