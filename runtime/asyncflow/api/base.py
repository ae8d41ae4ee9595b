"""Common base of the API's models: they are frozen, closed and bounded, with their rules declared beside the fields.

Invariant: a model that was built from Python keeps all its rules. A ``Rule`` says one thing twice, as a Python
predicate and as a CEL expression for the API server; the generated CRDs carry the second, so both refuse the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationInfo, model_validator
from pydantic.alias_generators import to_camel

API_VERSION: Final = "asyncflow.dev/v1alpha1"
GROUP, VERSION = API_VERSION.split("/")

COLLECT = "collect"
"""Validation context under which models do not check their rules: ``load`` checks them itself, all at once."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One condition on a model that a single field cannot state.

    reads: dotted attribute paths that the rule looks at; the first is the one to blame.
    ok: the condition in Python; cel: the same for the API server, "" where CEL cannot say it.
    why: why anything else is impossible; fix: what would be right.
    """

    reads: tuple[str, ...]
    ok: Callable[[Any], bool]
    cel: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A field that keeps the value with which the object was created, enforced by a CEL transition rule.

    reads: dotted attribute path; why: what would break.
    """

    reads: str
    why: str


class Spec(BaseModel):
    """Base of every model: immutable, unknown keys refused, camelCase outside and snake_case inside."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    frozen_fields: ClassVar[tuple[Frozen, ...]] = ()

    @model_validator(mode="after")
    def _keep_rules(self, info: ValidationInfo) -> Self:
        if info.context == COLLECT:
            return self
        for rule in self.rules:
            if not rule.ok(self):
                raise ValueError(f"{rule.reads[0]}: {rule.why}. {rule.fix}")
        return self


def keyed_by(key: str) -> dict[str, JsonValue]:
    """Return the schema extension by which a list is a map by ``key``: two appliers keep each other's entries."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
QUALIFIED = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

Name = Annotated[str, StringConstraints(pattern=NAME, max_length=63)]
"""A DNS label: the name of an object."""
PluginName = Annotated[str, StringConstraints(pattern=r"^[a-z][-a-z0-9_.]*$", max_length=63)]
"""The name of an entry point: an engine, a back end, an extractor."""
Source = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A URI such as ``tiny://...``, ``gym://...``, ``hf://...``, ``pvc://...``, or a path."""
Text = Annotated[str, StringConstraints(max_length=16384)]
"""A text of a person."""
Qualified = Annotated[str, StringConstraints(pattern=QUALIFIED, max_length=316)]
"""A label or annotation key: ``[prefix/]name``."""
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)]
Options = Annotated[dict[Annotated[str, StringConstraints(max_length=128)], JsonValue], Field(max_length=64)]
"""Free settings of an extension; whoever reads them checks them."""
Labels = Annotated[dict[Qualified, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[Qualified, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64)]

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]
"""A duration in seconds, at most a year."""
Replicas = Annotated[int, Field(ge=0, le=10_000)]
Steps = Annotated[int, Field(ge=0, le=10_000_000)]
Threads = Annotated[int, Field(ge=1, le=1024)]
