"""The CRDs on a real API server: applied as a user would, explained, and refusing what ``validate`` refuses."""

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncflow.api.load import load
from asyncflow.errors import ManifestError
from kube.plane import ControlPlane, KubectlError
from kube.rest import DRY_RUN, Refused

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))
BAD = sorted((ROOT / "tests" / "api" / "bad").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))

SAID_ELSEWISE = {
    "wrong-kind": 'no matches for kind "PyTorchJob"',
    "wrong-version": 'in version "asyncflow.dev/v1"',
}
"""Those that kubectl cannot even send; what it says instead of naming the place."""

TASK = "tiny://reverse-digits"
SMALLEST = {
    "RLJob": {
        "model": {"source": TASK},
        "data": {"train": {"source": TASK}},
        "reward": {"function": "task"},
        "algorithm": {"steps": 10},
        "sampling": {"maxTokens": 16, "maxPromptTokens": 16},
    },
    "TransferQueue": {},
    "WeightSync": {},
}


def cases(file: str) -> list[Any]:
    """The entries of a table of this folder, as (kind, entry)."""
    table = yaml.safe_load((HERE / file).read_text())
    return [
        pytest.param(kind, case, id=f"{kind}-{case['field']}-{number}")
        for kind, entries in table.items()
        for number, case in enumerate(entries)
    ]


RULES = cases("rules.yaml")
FROZEN = cases("frozen.yaml")


def merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def collection(kind: str, namespace: str) -> str:
    return f"/apis/asyncflow.dev/v1alpha1/namespaces/{namespace}/{kind.lower()}s"


def an_object(kind: str, spec: dict[str, Any], name: str = "case") -> dict[str, Any]:
    body = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": kind, "metadata": {"name": name}}
    return body | {"spec": merged(SMALLEST[kind], spec)}


def rules_of_crds() -> Iterator[tuple[str, str, str, bool]]:
    """(kind, field, message, whether it looks at the old object) of every rule."""

    def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str, bool]]:
        for rule in schema.get("x-kubernetes-validations", ()):
            yield f"{path}{rule['fieldPath']}".removeprefix("."), rule["message"], "oldSelf" in rule["rule"]
        for name, part in schema.get("properties", {}).items():
            yield from walk(part, f"{path}.{name}")
        for inner in ("items", "additionalProperties"):
            if inner in schema:
                yield from walk(schema[inner], f"{path}[0]")

    for file in CRDS:
        spec = yaml.safe_load(file.read_text())["spec"]
        for found in walk(spec["versions"][0]["schema"]["openAPIV3Schema"], ""):
            yield spec["names"]["kind"], *found


@pytest.mark.parametrize("file", CRDS, ids=lambda file: file.stem)
def test_a_definition_is_small(file: Path) -> None:
    assert file.stat().st_size < 128_000


def test_plain_apply_works_and_again_changes_nothing(kubectl: Callable[..., str]) -> None:
    again = kubectl("apply", "-f", str(ROOT / "crds")).splitlines()
    assert len(again) == len(CRDS)
    assert all(line.endswith(("unchanged", "configured")) for line in again), again


@pytest.mark.parametrize("name", ["rlj", "tq", "ws"])
def test_kubectl_explains_every_field(kubectl: Callable[..., str], name: str) -> None:
    explained = kubectl("explain", f"{name}.spec", "--recursive")
    kind = {"rlj": "RLJob", "tq": "TransferQueue", "ws": "WeightSync"}[name]
    schema = next(yaml.safe_load(file.read_text()) for file in CRDS if f"{kind.lower()}s" in file.name)
    fields = schema["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for field in fields:
        assert re.search(rf"^  {field}\t<", explained, flags=re.MULTILINE), field


def test_get_knows_short_names_category_and_columns(kubectl: Callable[..., str], namespace: str) -> None:
    for kind in SMALLEST:
        kubectl("apply", "-n", namespace, "-f", "-", manifest=an_object(kind, {}))
    for short in ("rlj", "tq", "ws"):
        assert "case" in kubectl("get", short, "-n", namespace)
    assert kubectl("get", "rl", "-n", namespace, "-o", "name").splitlines() == [
        f"{kind.lower()}.asyncflow.dev/case" for kind in SMALLEST
    ]
    shown = kubectl("get", "rlj", "-n", namespace).splitlines()[0].split()
    assert shown == ["NAME", "PHASE", "STEP", "REWARD", "TOKENS/S", "STALENESS", "ETA", "ROLLOUTS", "AGE"]


def test_scale_changes_the_rollouts(kubectl: Callable[..., str], plane: ControlPlane, namespace: str) -> None:
    kubectl("apply", "-n", namespace, "-f", "-", manifest=an_object("RLJob", {"rollout": {"maxReplicas": 4}}))
    kubectl("scale", "rlj/case", "--replicas=3", "-n", namespace)
    assert plane.api.get(f"{collection('RLJob', namespace)}/case")["spec"]["rollout"]["replicas"] == 3
    with pytest.raises(KubectlError, match="maxReplicas is below replicas"):
        kubectl("scale", "rlj/case", "--replicas=5", "-n", namespace)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_accepted(kubectl: Callable[..., str], namespace: str, file: Path) -> None:
    kubectl("apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", str(file))


@pytest.fixture(scope="module")
def refusals(plane: ControlPlane) -> dict[str, str]:
    """The answers of kubectl and server to each bad manifest, all applied at once."""
    with pytest.raises(KubectlError) as refused:
        plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(BAD[0].parent))
    parts = re.split(r"(?=error parsing /|resource mapping not found|Error from server)", refused.value.said)
    return {found.group(1): part for part in parts if (found := re.search(r"/bad/([^/]+)\.yaml", part))}


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_a_bad_manifest_of_the_corpus_is_refused(refusals: dict[str, str], file: Path) -> None:
    places = re.findall(r"^# refused: (\S+)$", file.read_text(), flags=re.MULTILINE)
    keys = [SAID_ELSEWISE.get(file.stem) or re.split(r"[.\[]", place)[-1] for place in places]
    assert any(key in refusals[file.stem] for key in keys), refusals[file.stem]


def test_the_tables_have_every_rule_once() -> None:
    tables = {False: RULES, True: FROZEN}
    entries = {
        old: {(case.values[0], case.values[1]["field"], case.values[1].get("says", "cannot change")) for case in table}
        for old, table in tables.items()
    }
    for kind, field, message, old in rules_of_crds():
        matching = [entry for entry in entries[old] if entry[:2] == (kind, field) and message.startswith(entry[2])]
        assert len(matching) == 1, (kind, field, message)
        entries[old] -= set() if old else set(matching)
    assert not entries[False]


@pytest.mark.parametrize(("kind", "case"), RULES)
def test_a_rule_refuses_and_accepts(plane: ControlPlane, kind: str, case: dict[str, Any]) -> None:
    plane.api.create(collection(kind, "default"), an_object(kind, case["accepted"]), query=DRY_RUN)
    with pytest.raises(Refused) as refused:
        plane.api.create(collection(kind, "default"), an_object(kind, case["refused"]), query=DRY_RUN)
    assert refused.value.status == 422
    assert any(field == case["field"] and case["says"] in said for field, said in refused.value.causes)


@pytest.mark.parametrize(("kind", "case"), RULES)
def test_validate_refuses_and_accepts_as_the_server_does(kind: str, case: dict[str, Any]) -> None:
    load(io.StringIO(yaml.safe_dump(an_object(kind, case["accepted"]))))
    with pytest.raises(ManifestError) as refused:
        load(io.StringIO(yaml.safe_dump(an_object(kind, case["refused"]))))
    assert case["says"] in str(refused.value)


@pytest.mark.parametrize(("kind", "case"), FROZEN)
def test_a_frozen_field_keeps_its_value(plane: ControlPlane, namespace: str, kind: str, case: dict[str, Any]) -> None:
    path = collection(kind, namespace)
    plane.api.create(path, an_object(kind, case.get("created", {})))
    for change in case["refused"]:
        with pytest.raises(Refused) as refused:
            plane.api.patch(f"{path}/case", {"spec": change})
        assert any(field == case["field"] and "cannot change" in said for field, said in refused.value.causes), (
            refused.value.causes
        )
    plane.api.patch(f"{path}/case", {"metadata": {"labels": {"touched": "yes"}}})


def test_what_is_live_changes_beside_what_is_frozen(plane: ControlPlane, namespace: str) -> None:
    path = collection("RLJob", namespace)
    plane.api.create(path, an_object("RLJob", {}))
    after = plane.api.patch(f"{path}/case", {"spec": {"suspend": True, "rollout": {"replicas": 2}}})
    assert (after["spec"]["suspend"], after["spec"]["rollout"]["replicas"]) == (True, 2)


def test_status_is_written_apart_from_the_spec(plane: ControlPlane, namespace: str) -> None:
    path = collection("RLJob", namespace)
    made = plane.api.create(path, an_object("RLJob", {}))
    plane.api.patch(f"{path}/case/status", {"status": {"phase": "Running"}, "spec": {"suspend": True}})
    after = plane.api.get(f"{path}/case")
    assert after["status"]["phase"] == "Running"
    assert after["spec"] == made["spec"]
    assert after["metadata"]["generation"] == made["metadata"]["generation"]
