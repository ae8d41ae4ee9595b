"""From a place in a manifest to the model that describes it, and back.

Invariant: a place as written (camelCase) and a dotted path of attributes (snake_case) name the same place.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.alias_generators import to_camel

from asyncflow.api.base import Spec
from asyncflow.api.problems import Place


def place_of(attributes: str) -> tuple[str, ...]:
    """Return the place in a manifest of a dotted attribute path: ``rollout.min_replicas`` -> (rollout, minReplicas)."""
    return tuple(to_camel(attribute) for attribute in attributes.split("."))


def fields(model: type[Spec]) -> dict[str, Any]:
    """Return the type of every field of ``model``, by the name that it has in a manifest."""
    return {info.alias or name: info.annotation for name, info in model.model_fields.items()}


def model_at(root: type[Spec], place: Place) -> type[Spec] | None:
    """Return the model that describes the mapping at ``place``; None where there is none, as inside free settings."""
    here: Any = root
    for step in place:
        model = model_of(here)
        if model is None:
            return None
        here = model if isinstance(step, int) else fields(model).get(step)
    return model_of(here)


def model_of(annotation: Any) -> type[Spec] | None:
    """Return the model inside an annotation such as ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    if get_origin(annotation) in (Annotated, Union, UnionType, tuple):
        return next((model for part in get_args(annotation) if (model := model_of(part))), None)
    return None
