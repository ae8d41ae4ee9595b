"""Generator of the CustomResourceDefinitions from the models: ``asyncflow crds``.

``schema_of`` converts a model to a structural OpenAPI v3 schema: references are replaced by their definitions,
``X | None`` becomes an optional X, and the rules and frozen fields of each model become ``x-kubernetes-validations``.

Invariants: the files in ``crds/`` are exactly the output of ``render``; ``check`` reports files that differ. A schema
contains only keywords that the API server knows; a keyword without an equivalent there raises an error.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncflow.api.base import Frozen, ObjectMeta, Rule, Spec
from asyncflow.api.check import fields, model_of, place_of
from asyncflow.api.job import RLJob
from asyncflow.api.names import GROUP, VERSION
from asyncflow.api.queue import TransferQueue
from asyncflow.api.weights import WeightSync

_ONE_LINE = 1200
_HEADER = "# Made by `asyncflow crds` from runtime/asyncflow/api. Change the models, not this file.\n"


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of ``kubectl get``; columns of priority 1 are shown with ``-o wide`` only."""

    name: str
    path: str
    kind: str = "string"
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class _Resource:
    """A kind, its names and its columns in kubectl; scaled: the fields that /scale changes and observes."""

    model: type[Spec]
    plural: str
    short: str
    columns: tuple[_Column, ...]
    scaled: tuple[str, str] | None = None


_AGE = _Column(name="Age", path=".metadata.creationTimestamp", kind="date")
_READY = _Column(name="Ready", path='.status.conditions[?(@.type=="Ready")].status')
_RESOURCES = (
    _Resource(
        model=RLJob,
        plural="rljobs",
        short="rlj",
        scaled=(".spec.rollout.replicas", ".status.replicas"),
        columns=(
            _Column(name="Phase", path=".status.phase"),
            _Column(name="Step", path=".status.progress"),
            _Column(name="Reward", path=".status.reward", kind="number"),
            _Column(name="Tokens/s", path=".status.tokensPerSecond", kind="number"),
            _Column(name="Staleness", path=".status.staleness", kind="number"),
            _Column(name="ETA", path=".status.eta"),
            _Column(name="Rollouts", path=".status.readyRollouts", kind="integer"),
            _AGE,
            _Column(name="Queue", path=".status.queueDepth", kind="integer", priority=1),
            _Column(name="Version", path=".status.version", kind="integer", priority=1),
            _Column(name="Attempt", path=".status.attempt", kind="integer", priority=1),
            _Column(name="Waiting for", path=".status.waitingFor", priority=1),
        ),
    ),
    _Resource(
        model=TransferQueue,
        plural="transferqueues",
        short="tq",
        scaled=(".spec.storageUnits", ".status.readyUnits"),
        columns=(
            _READY,
            _Column(name="Units", path=".status.readyUnits", kind="integer"),
            _Column(name="Rows", path=".status.rows", kind="integer"),
            _Column(name="Bytes", path=".status.bytes", kind="integer"),
            _Column(name="Limit", path=".status.limit", kind="integer"),
            _AGE,
            _Column(name="Address", path=".status.address", priority=1),
        ),
    ),
    _Resource(
        model=WeightSync,
        plural="weightsyncs",
        short="ws",
        columns=(
            _READY,
            _Column(name="Version", path=".status.version", kind="integer"),
            _Column(name="Behind", path=".status.behind", kind="integer"),
            _Column(name="Rollouts", path=".status.rollouts", kind="integer"),
            _Column(name="Followers", path=".status.followers", kind="integer"),
            _Column(name="Bytes", path=".status.bytes", kind="integer"),
            _Column(name="Transfer", path=".status.seconds.transfer", kind="number"),
            _Column(name="Swap", path=".status.seconds.swap", kind="number"),
            _AGE,
            _Column(name="Job", path=".status.job", priority=1),
            _Column(name="Attempt", path=".status.attempt", kind="integer", priority=1),
            _Column(name="Publish", path=".status.seconds.publish", kind="number", priority=1),
            _Column(name="Stage", path=".status.seconds.stage", kind="number", priority=1),
        ),
    ),
)


def render() -> dict[str, str]:
    """Return the text of every CRD, by file name."""
    return {f"{GROUP}_{resource.plural}.yaml": _HEADER + _text(_definition(resource)) for resource in _RESOURCES}


def write(directory: Path) -> list[Path]:
    """Write the CRDs into ``directory`` and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {directory / name: text for name, text in render().items()}
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)


def check(directory: Path) -> list[str]:
    """Return one line for each file of ``directory`` that differs from the output of ``render``."""
    expected = render()
    found = {file.name: file.read_text(encoding="utf-8") for file in sorted(directory.glob("*.yaml"))}
    return [
        *(f"{directory / name} is missing" for name in expected if name not in found),
        *(f"{directory / name} is out of date" for name in expected if name in found and found[name] != expected[name]),
        *(f"{directory / name} belongs to no kind" for name in found if name not in expected),
    ]


def _definition(resource: _Resource) -> Schema:
    kind = resource.model.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": resource.plural,
                "singular": kind.lower(),
                "shortNames": [resource.short],
                "categories": ["rl"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root(resource.model)},
                    "subresources": _subresources(resource),
                    "additionalPrinterColumns": [_column(column) for column in resource.columns],
                }
            ],
        },
    }


def _root(model: type[Spec]) -> Schema:
    """Return the schema of a whole object. Kubernetes allows a CRD to restrict only the name in ``metadata``."""
    schema = schema_of(model)
    parts = schema["properties"]
    name = schema_of(ObjectMeta)["properties"]["name"]
    name.pop("description")
    parts["apiVersion"] = parts["kind"] = {"type": "string"}
    parts["metadata"] = {"type": "object", "properties": {"name": name}}
    parts["status"] = without_defaults(parts["status"])
    return schema


def _subresources(resource: _Resource) -> Schema:
    if resource.scaled is None:
        return {"status": {}}
    desired, observed = resource.scaled
    scale = {
        "specReplicasPath": desired,
        "statusReplicasPath": observed,
        "labelSelectorPath": ".status.selector",
    }
    return {"status": {}, "scale": scale}


def _column(column: _Column) -> Schema:
    shown = {"name": column.name, "type": column.kind, "jsonPath": column.path}
    return shown | ({"priority": column.priority} if column.priority else {})


class _Dumper(yaml.SafeDumper):
    """Writes each small part on one line, since indentation would double the size of the file, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_data(self, data: Any) -> yaml.Node:
        node = super().represent_data(data)
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = len(json.dumps(data)) < _ONE_LINE
        return node


def _text(definition: Schema) -> str:
    text: str = yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=1 << 16, allow_unicode=True)
    return text


Schema = dict[str, Any]

_PASSED_ON = frozenset(
    (
        *("type", "description", "default", "enum", "pattern", "required"),
        *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
        *("x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    )
)
_DROPPED = frozenset(("title", "$defs", "propertyNames"))
_ANYTHING: Schema = {"x-kubernetes-preserve-unknown-fields": True}


def schema_of(model: type[Spec]) -> Schema:
    """Return the structural schema of ``model``, with its rules.

    Raises ValueError if a structural schema cannot express a part of the model.
    """
    source = model.model_json_schema(by_alias=True)
    return _Inliner(source.get("$defs", {}), _models(model)).of(source) | _validations(model)


def without_defaults(schema: Schema) -> Schema:
    """Return ``schema`` without defaults and rules, for the status, which only a controller writes."""
    kept: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: without_defaults(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            kept[key] = without_defaults(value)
        elif key not in ("default", "x-kubernetes-validations"):
            kept[key] = value
    return kept


class _Inliner:
    """Converts a schema keyword by keyword and replaces each reference by its definition."""

    def __init__(self, definitions: Schema, models: dict[str, type[Spec]]) -> None:
        self._definitions = definitions
        self._models = models

    def of(self, source: Schema) -> Schema:
        if not source:
            return _ANYTHING
        if "anyOf" in source:
            return self._optional(source)
        schema = self._referred(source["$ref"].rpartition("/")[2]) if "$ref" in source else {}
        for key, value in source.items():
            schema |= self._keyword(key, value, source)
        return schema

    def _referred(self, name: str) -> Schema:
        model = self._models.get(name)
        return self.of(self._definitions[name]) | (_validations(model) if model is not None else {})

    def _optional(self, source: Schema) -> Schema:
        parts = [part for part in source["anyOf"] if part != {"type": "null"}]
        if len(parts) != 1:
            raise ValueError(f"a structural schema cannot express {source['anyOf']}")
        return self.of(parts[0] | {key: value for key, value in source.items() if key not in ("anyOf", "default")})

    def _keyword(self, key: str, value: Any, source: Schema) -> Schema:
        if key in _DROPPED or key == "$ref" or (key == "default" and value in ([], {}, None)):
            return {}
        if key == "properties":
            required = source.get("required", ())
            return {key: {name: self._property(part, needed=name in required) for name, part in value.items()}}
        if key == "items":
            return {key: self.of(value)}
        if key == "additionalProperties":
            return {} if value is False else {key: _ANYTHING if value is True else self.of(value)}
        if key == "patternProperties":
            return {"additionalProperties": self.of(next(iter(value.values())))}
        if key == "const":
            return {"enum": [value]}
        if key in ("exclusiveMinimum", "exclusiveMaximum"):
            return {key.removeprefix("exclusive").lower(): value, key: True}
        if key == "description":
            return {key: " ".join(value.split())}
        if key in _PASSED_ON:
            return {key: value}
        raise ValueError(f"a structural schema has no keyword {key}: {value}")

    def _property(self, source: Schema, *, needed: bool) -> Schema:
        schema = self.of(source)
        if not needed and "anyOf" not in source and "default" not in schema and "properties" in schema:
            model = self._models[source["$ref"].rpartition("/")[2]]
            schema["default"] = _smallest_default(model, schema)
        return schema


def _smallest_default(model: type[Spec], schema: Schema) -> Schema:
    """Return the smallest default of an object: the fields that its rules read.

    The API server evaluates rules on a default before it fills in the defaults of the fields inside it.
    """
    default: Schema = {}
    for reads in (
        *(read for rule in model.rules for read in rule.reads),
        *(each.reads for each in model.frozen_fields),
    ):
        here, part = default, schema
        for name in place_of(reads):
            part = part["properties"][name]
            if "default" not in part:
                break
            here = here.setdefault(name, copy.deepcopy(part["default"]))
    return default


def _models(root: type[Spec]) -> dict[str, type[Spec]]:
    found: dict[str, type[Spec]] = {}
    for annotation in fields(root).values():
        part = model_of(annotation)
        if part is not None:
            found |= {part.__name__: part} | _models(part)
    return found


def _validations(model: type[Spec]) -> Schema:
    rules = [_rule(rule) for rule in model.rules if rule.cel]
    rules += [_transition(model, frozen) for frozen in model.frozen_fields]
    return {"x-kubernetes-validations": rules} if rules else {}


def _rule(rule: Rule) -> Schema:
    return {"rule": rule.cel, "message": f"{rule.why}. {rule.fix}", "fieldPath": _field(rule.reads[0])}


def _transition(model: type[Spec], frozen: Frozen) -> Schema:
    """Return the rule that a field keeps its value; an absent field stays absent."""
    field = _field(frozen.reads)
    same = f"self{field} == oldSelf{field}"
    if frozen.existence:
        same = f"has(self{field}) == has(oldSelf{field})"
    elif _may_be_absent(model, frozen.reads):
        same = f"has(self{field}) == has(oldSelf{field}) && (!has(self{field}) || {same})"
    return {"rule": same, "message": f"cannot change: {frozen.why}. Create a new object", "fieldPath": field}


def _field(reads: str) -> str:
    return "." + ".".join(place_of(reads))


def _may_be_absent(model: type[Spec], reads: str) -> bool:
    *parents, leaf = place_of(reads)
    here = model
    for parent in parents:
        inner = model_of(fields(here)[parent])
        if inner is None:
            raise ValueError(f"{model.__name__}.{reads} leads through a field that is not a model")
        here = inner
    info = next(info for name, info in here.model_fields.items() if (info.alias or name) == leaf)
    return not info.is_required() and (info.default is None or info.default_factory is not None)
