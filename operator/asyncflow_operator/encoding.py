"""Encoding of observations as JSON and back, so that the input of ``decide`` can be stored and used again.

Secrets in a spec are replaced by fingerprints: the values of environment variables, and of options whose names mark
them as secret. A holder of the master secret can compare a fingerprint with a value; without it, a value cannot be
guessed from its fingerprint.

Invariants: a decoded observation equals the encoded one, except for the fingerprints. The defaults of a spec are
written out, so that it means the same to another version; the fields of a view that have their defaults are left out.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from asyncflow.api.job import RLJob
from asyncflow.api.weights import JobWeightsSpec, WeightsSpec
from asyncflow_operator.observed import JobState, Manifest, SyncState, TransferQueueState

State = JobState | TransferQueueState | SyncState
STATES: Final[dict[str, type[Any]]] = {"RLJob": JobState, "TransferQueue": TransferQueueState, "WeightSync": SyncState}
"""Types of the states that decisions are made from, by the kind of the owner."""

_SECRET: Final = re.compile(r"(token|password|passwd|secret|credentials?|api_?key)$", re.IGNORECASE)
_DIGITS: Final = 12


class Redactor:
    """Replaces secrets by fingerprints, which are keyed with ``key``. found: whether it has replaced any."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.found = False

    def spec(self, value: Any) -> Any:
        """Return a spec as JSON without its secrets."""
        if isinstance(value, list):
            return [self.spec(each) for each in value]
        if not isinstance(value, dict):
            return value
        variable = isinstance(value.get("name"), str) and isinstance(value.get("value"), str)
        return {
            name: self._fingerprint(inner)
            if isinstance(inner, str) and inner and ((variable and name == "value") or _SECRET.search(name))
            else self.spec(inner)
            for name, inner in value.items()
        }

    def _fingerprint(self, value: str) -> str:
        self.found = True
        return f"redacted-{hmac.digest(self._key, value.encode(), hashlib.sha256).hex()[:_DIGITS]}"


def encode(value: Any, redactor: Redactor) -> Any:
    """Return an observation, or a part of one, as JSON values."""
    if isinstance(value, BaseModel):
        written = value.model_dump(mode="json", by_alias=True)
        return written | {"spec": redactor.spec(written["spec"])} if "spec" in written else written
    if is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: encode(found, redactor)
            for each in fields(value)
            if (found := getattr(value, each.name)) != each.default
        }
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode(each, redactor) for key, each in value.items()}
        return [[encode(key, redactor), encode(each, redactor)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [encode(each, redactor) for each in value]
    return value


def decode(kind: type[Any], value: Any) -> Any:
    """Return the object of type ``kind`` that ``encode`` wrote as ``value``. Raises ValueError if the shape differs."""
    try:
        return _decode(kind, value)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def _decode(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        return _decode(next(each for each in inner if each is not NoneType), value)
    if kind is Any or origin is Literal or kind == Manifest:
        return value
    if origin is tuple:
        return tuple(_decode(inner[0], each) for each in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        return {_decode(inner[0], key): _decode(inner[1], each) for key, each in pairs}
    if kind is RLJob:
        return _job(value)
    if issubclass(kind, BaseModel):
        return kind.model_validate(value)
    if is_dataclass(kind):
        return _view(kind, value)
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return value


def _job(value: Any) -> RLJob:
    """Return a job, which was encoded with the fields of the WeightSync that it names, if it names one."""
    section = dict(value["spec"].get("weightSync") or {})
    name = section.pop("name", None)
    if name is None:
        return RLJob.model_validate(value)
    job = RLJob.model_validate(value | {"spec": value["spec"] | {"weightSync": {"name": name}}})
    return job.with_weights(JobWeightsSpec.of(WeightsSpec.model_validate(section), name=name))


def _view(kind: Any, value: Any) -> Any:
    hints = _hints(kind)
    return kind(**{name: _decode(hints[name], each) for name, each in value.items()})


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
