"""Common base of the API: frozen models, and the types that all Kubernetes kinds share.

Models are immutable, refuse unknown fields and bound every value; each model declares its rules next to its fields.
Quantities (``256Mi``, ``500m``, ``2``) are strings with an exact numeric value. Every object has metadata and standard
conditions.

Invariants: a model that is built in Python satisfies all its rules. A ``Rule`` states one condition twice, as a Python
predicate and as a CEL expression for the API server; the generated CRDs contain the CEL expression, so both refuse the
same manifests. A quantity keeps the text in which it was written; ``amount`` is exact. A job's name fits into every
name that is derived from it (pods, services, claims: at most 63 characters). A list of conditions holds one condition
of each type, and ``lastTransitionTime`` changes only when ``status`` changes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from asyncflow.api.names import LEAST_BYTES

COLLECT = "collect"
"""Validation context in which models do not check their rules: ``load`` checks all rules together afterwards."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One condition on a model that the type of a single field cannot express.

    reads: dotted attribute paths that the rule reads; errors are reported at the first one.
    ok: the condition in Python; cel: the same condition for the API server, "" if CEL cannot express it.
    why: the reason why a violation is an error; fix: the instruction that corrects it.
    """

    reads: tuple[str, ...]
    ok: Callable[[Any], bool]
    cel: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """An error of an object as a whole that needs a computed message, so that no ``Rule`` can express it.

    place: keys as written in the manifest, relative to the object; why: the reason; fix: the instruction that corrects
    it.
    """

    place: tuple[str | int, ...]
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A field that keeps the value with which the object was created, enforced by a CEL transition rule.

    reads: dotted attribute path; why: the reason why it cannot change; existence: whether only the presence of the
    field is immutable, and not its value.
    """

    reads: str
    why: str
    existence: bool = False


class Spec(BaseModel):
    """Base of every model: immutable, refuses unknown keys, camelCase in manifests and snake_case in Python."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
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
        for flaw in self.flaws():
            raise ValueError(f"{'.'.join(map(str, flaw.place))}: {flaw.why}. {flaw.fix}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema, in which the string literal below each field is the field's description.

        The descriptions are read from the source only here: pydantic would read them at every import, which takes
        0.1 s.
        """
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        texts = ChainMap(*(_texts(base) for base in cls.mro() if issubclass(base, Spec)))
        for name, info in cls.model_fields.items():
            if name in texts and info.description is None:
                properties[info.alias or name]["description"] = texts[name]
        return schema

    def flaws(self) -> Iterator[Flaw]:
        """Yield the errors of the object as a whole that no rule covers; the API server does not check them."""
        return iter(())


@cache
def _texts(model: type[Spec]) -> dict[str, str]:
    """Return the string literal below each field that the class itself declares, by the name of the field."""
    (declared,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for field, following in pairwise(declared.body):
        match field, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def keyed_by(key: str) -> dict[str, JsonValue]:
    """Return the schema extension that makes a list a map by ``key``: two appliers keep each other's entries."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
FUNCTION = r"[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
QUALIFIED = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

Name = Annotated[str, StringConstraints(pattern=NAME, max_length=63)]
"""A DNS label: the name of an object."""
ExistingName = Annotated[str, StringConstraints(pattern=rf"{NAME[:-1]}([.]{NAME[1:-1]})*$", max_length=253)]
"""A DNS subdomain: the name of a Secret, a claim or a storage class that exists."""
PluginName = Annotated[str, StringConstraints(pattern=r"^[a-z][-a-z0-9_.]*$", max_length=63)]
"""The name of an entry point, such as an engine, a backend or an extractor."""
FunctionName = Annotated[str, StringConstraints(pattern=f"^{FUNCTION}$", max_length=256)]
"""``module:function``."""
KnownFunctionName = Annotated[str, StringConstraints(pattern=rf"^([a-z][a-z0-9_]*|{FUNCTION})$", max_length=256)]
"""The name of a built-in function, or ``module:function``."""
Source = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A URI such as ``tiny://...``, ``gym://...``, ``hf://...``, ``pvc://...``, or a path."""
Text = Annotated[str, StringConstraints(max_length=16384)]
"""Free text that a user writes."""
Qualified = Annotated[str, StringConstraints(pattern=QUALIFIED, max_length=316)]
"""A label or annotation key: ``[prefix/]name``."""
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)]
Options = Annotated[dict[Annotated[str, StringConstraints(max_length=128)], JsonValue], Field(max_length=64)]
"""Settings of an extension; the extension checks them, not the schema."""
Labels = Annotated[dict[Qualified, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[Qualified, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64)]

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]
"""A duration in seconds, at most a year."""
MOST_REPLICAS: Final = 10_000
Replicas = Annotated[int, Field(ge=0, le=MOST_REPLICAS)]
Steps = Annotated[int, Field(ge=0, le=10_000_000)]
Threads = Annotated[int, Field(ge=1, le=1024)]


QUANTITY = r"^[0-9]{1,15}([.][0-9]{1,9})?([mkMGTP]|[KMGTP]i)?$"
_QUANTITY = re.compile(QUANTITY)
_FACTOR = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTP", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTP", start=1)},
}


class Quantity(str):
    """An amount of memory or CPU as Kubernetes writes it, e.g. ``Quantity("256Mi").bytes == 268435456``."""

    __slots__ = ()

    @property
    def amount(self) -> Decimal:
        """The amount in bytes or cores, exact."""
        number = self.rstrip("mkKMGTPi")
        return Decimal(number) * _FACTOR[self[len(number) :]]

    @property
    def bytes(self) -> int:
        """The amount as a whole number, rounded up."""
        return int(self.amount.to_integral_value(ROUND_CEILING))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._parse, serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"x-kubernetes-int-or-string": True, "pattern": QUANTITY, "maxLength": 32}

    @classmethod
    def _parse(cls, value: object) -> Quantity:
        written = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
        if written is None or not _QUANTITY.fullmatch(written):
            raise PydanticCustomError("quantity", "Input should be a quantity such as 512Mi, 4Gi, 500m or 2")
        return cls(written)


def _at_least_1mi(amount: Quantity) -> Quantity:
    if amount.bytes < LEAST_BYTES:
        raise PydanticCustomError("few_bytes", "Input should be at least 1Mi")
    return amount


Bytes = Annotated[Quantity, AfterValidator(_at_least_1mi)]
"""Memory or disk space of at least 1Mi: nothing runs in less, and ``4m`` (4 thousandths of a byte) is a common typing
error for ``4Mi``. The API server accepts smaller amounts, since the CRD has no room for another rule."""


def _is_cores(amount: Quantity) -> Quantity:
    if amount.rstrip("m").strip("0123456789."):
        raise PydanticCustomError("cores", "Input should be cores, such as 2 or 500m")
    return amount


Cores = Annotated[Quantity, AfterValidator(_is_cores)]
"""CPU in cores or thousandths of a core. The API server accepts ``4Gi`` cores, too, but no node has so many."""
Time = Annotated[str, StringConstraints(max_length=35)]
"""RFC 3339 in UTC, e.g. ``2026-11-21T10:46:00Z``."""


class Condition(Spec):
    """One aspect of an object's state."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)]
    """Type of the condition, e.g. Ready, Progressing, Stalled."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """One word for machines."""
    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    """One sentence for people: what, why, and what to do."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that it describes."""
    last_transition_time: Time
    """Time at which status last changed."""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=keyed_by("type"))]


ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
"""The name of an AsyncFlow object. The names of its Services begin with it, so it must begin with a letter."""


class ObjectMeta(Spec):
    """Name, namespace, labels and annotations of an object."""

    name: ObjectName
    """Name of the object, a DNS label of at most 40 characters that begins with a letter."""
    namespace: Name = "default"
    """Namespace of the object; ignored on one machine."""
    labels: Labels = Field(default_factory=dict)
    """Labels, copied to everything that is made for the object."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations, for tools."""
    uid: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Unique ID that the API server assigns; absent on one machine. It names the job's partition."""
