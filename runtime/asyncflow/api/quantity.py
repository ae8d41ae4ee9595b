"""Kubernetes quantities (``256Mi``, ``500m``, ``2``): strings that know how much they are.

Invariant: a quantity keeps the words in which it was written; ``amount`` is exact.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

PATTERN = r"^[0-9]{1,15}([.][0-9]{1,9})?([mkMGTP]|[KMGTP]i)?$"
_PATTERN = re.compile(PATTERN)
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
        return {"x-kubernetes-int-or-string": True, "pattern": PATTERN, "maxLength": 32}

    @classmethod
    def _parse(cls, value: object) -> Quantity:
        written = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
        if written is None or not _PATTERN.fullmatch(written):
            raise PydanticCustomError("quantity", "Input should be a quantity such as 512Mi, 4Gi, 500m or 2")
        return cls(written)
