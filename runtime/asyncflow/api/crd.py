"""CustomResourceDefinitions, made from the models: ``asyncflow crds``.

Invariant: the files in ``crds/`` are exactly what ``render`` gives; ``check`` says where they are not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncflow.api.base import GROUP, VERSION, Spec
from asyncflow.api.job import RLJob
from asyncflow.api.metadata import ObjectMeta
from asyncflow.api.queue import TransferQueue
from asyncflow.api.structural import Schema, schema_of, without_defaults
from asyncflow.api.weights import WeightSync

_ONE_LINE = 1200
_HEADER = "# Made by `asyncflow crds` from runtime/asyncflow/api. Change the models, not this file.\n"


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of ``kubectl get``; those of priority 1 are shown with ``-o wide``."""

    name: str
    path: str
    kind: str = "string"
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class _Resource:
    """A kind and what kubectl is told of it; scaled: what /scale changes and what it observes."""

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
            _Column(name="Bytes", path=".status.bytes", kind="integer"),
            _Column(name="Seconds", path=".status.transferSeconds", kind="number"),
            _AGE,
            _Column(name="Attempt", path=".status.attempt", kind="integer", priority=1),
        ),
    ),
)


def render() -> dict[str, str]:
    """Return the text of every CRD by its file name."""
    return {f"{GROUP}_{resource.plural}.yaml": _HEADER + _text(_definition(resource)) for resource in _RESOURCES}


def write(directory: Path) -> list[Path]:
    """Write the CRDs into ``directory``; gives the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {directory / name: text for name, text in render().items()}
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)


def check(directory: Path) -> list[str]:
    """Return one line for each file of ``directory`` that differs from what the models say; [] where none does."""
    wanted = render()
    found = {file.name: file.read_text(encoding="utf-8") for file in sorted(directory.glob("*.yaml"))}
    return [
        *(f"{directory / name} is missing" for name in wanted if name not in found),
        *(f"{directory / name} is out of date" for name in wanted if name in found and found[name] != wanted[name]),
        *(f"{directory / name} belongs to no kind" for name in found if name not in wanted),
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
    """Return the schema of a whole object; of its metadata Kubernetes lets us bound only the name."""
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
    wanted, observed = resource.scaled
    scale = {
        "specReplicasPath": wanted,
        "statusReplicasPath": observed,
        "labelSelectorPath": ".status.selector",
    }
    return {"status": {}, "scale": scale}


def _column(column: _Column) -> Schema:
    shown = {"name": column.name, "type": column.kind, "jsonPath": column.path}
    return shown | ({"priority": column.priority} if column.priority else {})


class _Dumper(yaml.SafeDumper):
    """Writes small parts in one line each, which halves a file that is mostly indentation; and no aliases."""

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
