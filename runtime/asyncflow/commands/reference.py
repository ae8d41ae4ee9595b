"""``asyncflow reference``: documentation of every field of a manifest, generated from the models in ``api``.

Invariant: the file is a function of the models and of the option classes of built-in plug-ins; ``check`` tests that.
"""

from __future__ import annotations

import inspect as introspection
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pydantic.fields import FieldInfo

from asyncflow.algorithms.base import ALGORITHMS, Algorithm
from asyncflow.api.base import Spec
from asyncflow.api.check import model_of, place_of
from asyncflow.api.crd import Schema, schema_of
from asyncflow.api.load import KINDS
from asyncflow.commands.preflight import HEAVY
from asyncflow.plugins import load_plugin
from asyncflow.rollout.engines.base import RolloutEngine
from asyncflow.training.backend import TrainerBackend

_HEAD = """\
# Every field of a manifest

Made by `asyncflow reference` from the models in `runtime/asyncflow/api`: change those, not this file.
[Writing a job](../guide/jobs.md) explains what belongs together, [Changing a running job](fields.md) what an edit does.
Quantities are written as in Kubernetes (`512Mi`, `500m`); times are seconds; – is absent.
"""
_OPTIONS = (
    ("spec.algorithm.options", ALGORITHMS, Algorithm, ("dapo", "dpo", "pf-ppo", "reinforce-plus-plus")),
    ("spec.rollout.engine.options", "asyncflow.rollout_engines", RolloutEngine, ("simulated", "transformers")),
    ("spec.trainer.backend.options", "asyncflow.trainer_backends", TrainerBackend, ("counting", "torch")),
)
"""Fields of a manifest that hold options, and AsyncFlow's own plug-ins that read them."""
_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "mapping"}


def render() -> str:
    """Return the text of the reference."""
    parts = [_HEAD]
    for kind, model in KINDS.items():
        spec = model.model_fields["spec"].annotation
        assert isinstance(spec, type)
        parts += [f"\n# {kind}\n\n{introspection.cleandoc(model.__doc__ or '')}\n"]
        root = "spec" if kind == "RLJob" else f"{kind}.spec"
        parts += _sections(spec, root, schema_of(model)["properties"]["spec"], {})
        if kind == "RLJob":
            parts += _plugin_options()
    return "".join(parts)


def write(file: Path) -> None:
    """Write the reference."""
    file.write_text(render(), encoding="utf-8")


def check(file: Path) -> bool:
    """Return whether ``file`` is up to date."""
    return file.is_file() and file.read_text(encoding="utf-8") == render()


def _sections(model: type[Spec], place: str, schema: Schema, known: dict[type[Spec], str]) -> Iterator[str]:
    """Yield the section of ``model``, the type of the field ``place``, and of each nested model that has none yet."""
    known[model] = place
    inner: list[tuple[type[Spec], str, Schema]] = []
    rows = []
    for name, info in model.model_fields.items():
        alias = info.alias or name
        part, described = model_of(info.annotation), schema["properties"][alias]
        text = _prose(described.get("description"))
        if part is None:
            rows.append(f"| `{alias}` | {_type(described)} | {_default(info)} | {text} |\n")
            continue
        path = f"{place}.{alias}" + ("[]" if described.get("type") == "array" else "")
        if part not in known:
            inner.append((part, path, described.get("items", described)))
            known[part] = path
        rows.append(f"| `{alias}` | [{known[part]}]({_anchor(known[part])}) | {_default(info)} | {text} |\n")
    yield f"\n## {place}\n\n{_prose(model.__doc__)}\n\n| field | type | default | |\n|---|---|---|---|\n"
    yield from rows
    if model.rules:
        yield "\nWhat is refused, and why:\n\n"
    for rule in model.rules:
        yield f"* `{'.'.join(place_of(rule.reads[0]))}`: {_prose(rule.why)}. {_prose(rule.fix)}.\n"
    for part, path, described in inner:
        yield from _sections(part, path, described, known)


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    name = _TYPES.get(schema.get("type", ""), "any value")
    return f"{name}{_bounds(schema)}"


def _bounds(schema: Schema) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = []
    if least is not None:
        bounds.append(f"{'more than' if above else 'at least'} {_number(least)}")
    if most is not None:
        bounds.append(f"{'less than' if below else 'at most'} {_number(most)}")
    return f", {', '.join(bounds)}" if bounds else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    if info.default_factory_takes_validated_data:  # computed from other fields, as the description says
        return "–"
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "–"
    if isinstance(value, Spec):
        value = value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    text = str(value) if isinstance(value, str) else json.dumps(value, default=str)
    return "–" if text in ("{}", "[]", "") else f"`{text}`"


def _prose(text: str | None) -> str:
    """Return a docstring as a line of Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join((text or "").split())).replace("|", "\\|")


def _anchor(place: str) -> str:
    return "#" + re.sub(r"[^a-z0-9-]", "", place.lower())


def _plugin_options() -> Iterator[str]:
    for place, group, kind, names in _OPTIONS:
        yield f"\n## {place}\n\nWhat the plug-ins that are part of AsyncFlow understand.\n\n"
        yield "| plug-in | option | default | |\n|---|---|---|---|\n"
        for name in names:
            shape = HEAVY.get(name) or load_plugin(group, name, kind=kind, where=place).Options
            yield from _options(name, shape) if shape is not None else ()


def _options(name: str, shape: type[msgspec.Struct]) -> Iterator[str]:
    description = _prose(shape.__doc__)
    found = list(zip(shape.__struct_fields__, shape.__struct_defaults__, strict=True))
    if not found:
        yield f"| `{name}` | – | – | {description} |\n"
    for index, (option, default) in enumerate(found):
        yield f"| `{name}` | `{option}` | `{json.dumps(default)}` | {description if index == 0 else ''} |\n"
