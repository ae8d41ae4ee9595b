"""From a model to a structural OpenAPI v3 schema, as a CustomResourceDefinition wants it.

References are put in place, ``X | None`` becomes an optional X, and each model's rules and frozen fields become
``x-kubernetes-validations``. Invariant: every keyword that is left is one that the API server knows; one that has no
counterpart there raises, it is not passed on.
"""

from __future__ import annotations

import copy
from typing import Any

from asyncflow.api.base import Frozen, Rule, Spec
from asyncflow.api.paths import fields, model_of, place_of

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
    """Return the structural schema of ``model``, with its rules. Raises ValueError for what none can say."""
    source = model.model_json_schema(by_alias=True)
    return _Inliner(source.get("$defs", {}), _models(model)).of(source) | _validations(model)


def without_defaults(schema: Schema) -> Schema:
    """Return ``schema`` without defaults, for what only a controller writes."""
    kept: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: without_defaults(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            kept[key] = without_defaults(value)
        elif key != "default":
            kept[key] = value
    return kept


class _Inliner:
    """Puts definitions in the place of their references, keyword by keyword."""

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
            raise ValueError(f"no structural schema can say {source['anyOf']}")
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
        raise ValueError(f"no structural schema has {key}: {value}")

    def _property(self, source: Schema, *, needed: bool) -> Schema:
        schema = self.of(source)
        if not needed and "anyOf" not in source and "default" not in schema and "properties" in schema:
            model = self._models[source["$ref"].rpartition("/")[2]]
            schema["default"] = _least(model, schema)
        return schema


def _least(model: type[Spec], schema: Schema) -> Schema:
    """Return the least default of an object: what its rules read, for they judge a default before it is filled in."""
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
    rules = [_rule(rule) for rule in model.rules]
    rules += [_transition(model, frozen) for frozen in model.frozen_fields]
    return {"x-kubernetes-validations": rules} if rules else {}


def _rule(rule: Rule) -> Schema:
    return {"rule": rule.cel, "message": f"{rule.why}. {rule.fix}", "fieldPath": _field(rule.reads[0])}


def _transition(model: type[Spec], frozen: Frozen) -> Schema:
    """Return the rule that a field keeps its value; absent stays absent."""
    field = _field(frozen.reads)
    same = f"self{field} == oldSelf{field}"
    if _may_be_absent(model, frozen.reads):
        same = f"has(self{field}) == has(oldSelf{field}) && (!has(self{field}) || {same})"
    return {"rule": same, "message": f"cannot change: {frozen.why}. Make another object", "fieldPath": field}


def _field(reads: str) -> str:
    return "." + ".".join(place_of(reads))


def _may_be_absent(model: type[Spec], reads: str) -> bool:
    *parents, leaf = place_of(reads)
    here = model
    for parent in parents:
        inner = model_of(fields(here)[parent])
        if inner is None:
            raise ValueError(f"{model.__name__}.{reads} leads through something that is no model")
        here = inner
    info = next(info for name, info in here.model_fields.items() if (info.alias or name) == leaf)
    return not info.is_required() and (info.default is None or info.default_factory is not None)
