"""The CRDs: checked in as rendered, structural, bounded, small; they accept the examples and refuse wrong shapes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from asyncflow.api import crd
from asyncflow.api.check import inspect
from asyncflow.api.document import parse
from asyncflow.api.durability import ClaimSpec, SinkSpec
from asyncflow.api.placement import PROFILES
from asyncflow.api.queue import SecretEntry

ROOT = Path(__file__).parents[2]
BAD = sorted((Path(__file__).parent / "bad").glob("*.yaml"))
DEFINITIONS = {name: yaml.safe_load(text) for name, text in crd.render().items()}
SCHEMAS = {
    definition["spec"]["names"]["kind"]: definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for definition in DEFINITIONS.values()
}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            yield from nodes(schema[inner], f"{path}[]")


EVERY = [(f"{kind}{path}", node) for kind, schema in SCHEMAS.items() for path, node in nodes(schema)]


def test_crds_are_as_rendered() -> None:
    assert crd.check(ROOT / "crds") == []


def test_drift_is_told_file_by_file(tmp_path: Path) -> None:
    first, second, third = crd.write(tmp_path)
    assert crd.check(tmp_path) == []
    first.write_text("# edited by hand\n")
    second.unlink()
    (tmp_path / "left-over.yaml").write_text("")
    said = crd.check(tmp_path)
    assert any("out of date" in line and first.name in line for line in said)
    assert any("missing" in line and second.name in line for line in said)
    assert any("left-over" in line for line in said)
    assert not any(third.name in line for line in said)


def test_each_is_under_128_kb_and_has_no_alias() -> None:
    for name, text in crd.render().items():
        assert len(text.encode()) < 128_000, name
        assert not re.search(r"[&*]id\d", text)


@pytest.mark.parametrize("worker", ["trainer", "rollout"])
def test_a_cluster_has_to_be_told_which_devices_its_pods_ask_for(worker: str) -> None:
    spec = SCHEMAS["RLJob"]["properties"]["spec"]["properties"]
    profiles = spec[worker]["properties"]["accelerator"]["properties"]["profile"]["enum"]
    assert set(profiles) == set(PROFILES)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        *((name, True) for name in ("a", "0", "keys.team-7.example", "a" * 100 + ".b")),
        *((name, False) for name in ("", ".a", "a.", "a..b", "a.-b", "a-.b", "A.b", "a_b", "a" * 254)),
    ],
)
def test_an_existing_object_may_have_any_name_that_kubernetes_allows(name: str, allowed: bool) -> None:
    spec = SCHEMAS["RLJob"]["properties"]["spec"]["properties"]
    claim, sink = spec["driver"]["properties"]["claim"], spec["telemetry"]["properties"]["sinks"]["items"]
    password = spec["transferQueue"]["properties"]["store"]["properties"]["password"]
    for schema, model, written in (
        (claim, ClaimSpec, {"name": name}),
        (claim, ClaimSpec, {"size": "1Gi", "storageClass": name}),
        (sink, SinkSpec, {"kind": "wandb", "secret": name}),
        (password, SecretEntry, {"name": name}),
    ):
        assert jsonschema.Draft202012Validator(schema).is_valid(written) == allowed
        assert (not inspect(model, written)[1]) == allowed


def test_every_node_is_structural_and_bounded() -> None:
    for path, node in EVERY:
        anything = node.get("x-kubernetes-preserve-unknown-fields")
        amount = node.get("x-kubernetes-int-or-string")
        assert "type" in node or anything or amount, path
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node or path.endswith((".apiVersion", ".kind")), path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
            assert "properties" not in node, path
        if node.get("type") in ("integer", "number") and ".spec" in path:
            assert "minimum" in node, path
            assert "maximum" in node, path


def test_status_has_no_defaults() -> None:
    assert not [path for path, node in EVERY if ".status" in path and "default" in node]


def test_every_field_that_a_person_writes_is_explained() -> None:
    assert not [
        path for path, node in EVERY if ".spec" in path and not path.endswith("[]") and "description" not in node
    ]


def test_there_are_at_least_30_different_rules_with_messages() -> None:
    rules = [rule for _, node in EVERY for rule in node.get("x-kubernetes-validations", ())]
    assert len({rule["rule"] for rule in rules}) >= 30
    assert len({rule["rule"] for rule in rules if "oldSelf" in rule["rule"]}) >= 10
    assert all(rule["message"] and rule["fieldPath"].startswith(".") for rule in rules)


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
def test_what_kubectl_is_told(definition: dict[str, Any]) -> None:
    names, version = definition["spec"]["names"], definition["spec"]["versions"][0]
    assert definition["metadata"]["name"] == f"{names['plural']}.asyncflow.dev"
    assert names["shortNames"] == [{"RLJob": "rlj", "TransferQueue": "tq", "WeightSync": "ws"}[names["kind"]]]
    assert names["categories"] == ["rl"]
    assert "status" in version["subresources"]
    assert ("scale" in version["subresources"]) == (names["kind"] != "WeightSync")
    known = {path for path, _ in nodes(version["schema"]["openAPIV3Schema"])}
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    for path in paths:
        assert path.startswith(".metadata.") or path.partition("[")[0] in known, path


def validator(kind: str) -> jsonschema.Draft4Validator:
    """Draft 4 has OpenAPI's boolean exclusiveMinimum; amounts and unknown keys are said in Kubernetes' own words."""

    def plain(node: dict[str, Any]) -> dict[str, Any]:
        node = dict(node)
        if node.get("x-kubernetes-int-or-string"):
            node["type"] = ["integer", "string"]
        if "properties" in node:
            node["properties"] = {name: plain(part) for name, part in node["properties"].items()}
            node["additionalProperties"] = False
        elif "additionalProperties" in node:
            node["additionalProperties"] = plain(node["additionalProperties"])
        if "items" in node:
            node["items"] = plain(node["items"])
        return node

    schema = plain(SCHEMAS[kind])
    schema["properties"]["metadata"]["additionalProperties"] = True
    return jsonschema.Draft4Validator(schema)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_fit_the_schema(file: Path) -> None:
    data = parse(file.read_text(), source=file.name).data
    assert [error.message for error in validator(data["kind"]).iter_errors(data)] == []


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_a_bad_manifest_breaks_the_schema_or_a_rule_at_the_same_place(file: Path) -> None:
    data = parse(file.read_text(), source=file.name).data
    if data["kind"] not in SCHEMAS or data["apiVersion"] != "asyncflow.dev/v1alpha1":
        return
    places = re.findall(r"^# refused: (\S+)$", file.read_text(), flags=re.MULTILINE)
    shapes = [*validator(data["kind"]).iter_errors(data)]
    rules = {
        f"{path}{rule['fieldPath']}".removeprefix(f"{data['kind']}.")
        for path, node in EVERY
        if path.startswith(data["kind"])
        for rule in node.get("x-kubernetes-validations", ())
    }
    for place in places:
        *parents, key = re.sub(r"\[\d+\]", "[]", place).split(".")
        in_shape = any(key in error.message or key in map(str, error.absolute_path) for error in shapes)
        assert in_shape or ".".join([*parents, key]) in rules, place
