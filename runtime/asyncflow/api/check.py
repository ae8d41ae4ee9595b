"""Validation of the data of a manifest, which finds all problems in one pass: place, reason and correction of each.

Pydantic checks types and bounds first; then the rules of each model are checked. If a field is wrong, the rules that
do not read it are still checked, so that the user can correct the whole manifest at one time.

Invariants: a manifest is refused once, with every problem that was found, each on one line. A problem that follows from
another one is not reported. A place as written (camelCase) and a dotted path of attributes (snake_case) name the same
field.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from operator import attrgetter, getitem
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from asyncflow.api.base import COLLECT, FUNCTION, Spec
from asyncflow.api.document import Place
from asyncflow.errors import ManifestError

MISSING: Any = object()
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One error in a manifest.

    place: keys as written in the manifest; value: the value found, MISSING if there is none; reason: why it is wrong;
    fix: the instruction that corrects it; line: its line in the file, 0 if unknown.
    """

    place: Place
    reason: str
    fix: str
    value: Any = MISSING
    line: int = 0

    @property
    def path(self) -> str:
        """The place as one dotted path: ``spec.rollout.template.env[0].name``."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.place).removeprefix(".")

    @property
    def what(self) -> str:
        """Path, line, value and reason."""
        found = "" if self.value is MISSING else f" = {shown(self.value)}"
        line = f" (line {self.line})" if self.line else ""
        return f"{self.path or 'manifest'}{found}{line}: {self.reason}"

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}"


def shown(value: object) -> str:
    """Return a value as JSON, shortened to at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def refusal(problems: Sequence[Problem], *, source: str) -> ManifestError:
    """Return one error that lists all problems."""
    if len(problems) == 1:
        return ManifestError(problems[0].what, where=source, hint=problems[0].fix)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ManifestError(f"{len(problems)} problems{lines}", where=source)


def place_of(attributes: str) -> tuple[str, ...]:
    """Return the place in a manifest of a dotted attribute path: ``rollout.min_replicas`` -> (rollout, minReplicas)."""
    return tuple(to_camel(attribute) for attribute in attributes.split("."))


def fields(model: type[Spec]) -> dict[str, Any]:
    """Return the type of every field of ``model``, by the name that it has in a manifest."""
    return {info.alias or name: info.annotation for name, info in model.model_fields.items()}


def model_at(root: type[Spec], place: Place) -> type[Spec] | None:
    """Return the model that describes the mapping at ``place``; None if no model does, as in free settings."""
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


M = TypeVar("M", bound=Spec)

_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "model": "a mapping",
    "dict": "a mapping",
    "tuple": "a list",
    "list": "a list",
}
_LIMITS = {
    "greater_than_equal": ("is too small", "Set a value of at least {ge}"),
    "greater_than": ("is too small", "Set a value above {gt}"),
    "less_than_equal": ("is too large", "Set a value of at most {le}"),
    "less_than": ("is too large", "Set a value below {lt}"),
    "literal_error": ("is not an allowed value", "Set it to {expected}"),
    "string_pattern_mismatch": ("does not have the required form", "It must match {pattern}"),
    "string_too_long": ("is too long", "Use at most {max_length} characters"),
    "string_too_short": ("is too short", "Use at least {min_length} characters"),
    "too_long": ("has too many entries", "Keep at most {max_length} entries"),
    "too_short": ("has too few entries", "Add entries: at least {min_length} are needed"),
    "quantity": ("is not an amount", "Write e.g. 512Mi, 4Gi, 500m or 2"),
    "few_bytes": ("is less than 1Mi", "Write bytes with a unit, e.g. 512Mi or 4Gi; m is a thousandth of a byte"),
    "cores": ("is not a number of cores", "Write e.g. 2, or 500m for half a core"),
    "finite_number": ("is not finite", "Set a finite number"),
}


_FREE = {"options": "settings of a plug-in", "config": "settings of a function or a source"}
"""Fields that hold settings whose names the contract does not know."""


def inspect(model: type[M], data: Any) -> tuple[M | None, list[Problem]]:
    """Build ``model`` from ``data``. Return the object, None if pydantic refuses ``data``, and every problem found."""
    data = _without_nulls(model, data)
    built, errors = _build(model, data)
    if built is not None:
        return built, list(broken(built))
    wrong = [tuple(error["loc"]) for error in errors]
    problems = [_problem(model, error) for error in errors if not _is_consequence(error, wrong)]
    problems.extend(_broken_in(model, _without(data, wrong), at=(), unknown=wrong))
    return None, problems


def readable_part(model: type[Spec], data: Any) -> Any:
    """Return ``data`` without the fields that ``model`` does not know, so that an older version reads newer data."""
    kept = copy.deepcopy(data)
    for error in _build(model, data)[1]:
        if error["type"] == "extra_forbidden":
            *parents, last = error["loc"]
            reduce(getitem, parents, kept).pop(last)
    return kept


def broken(model: Spec, *, at: Place = (), unknown: Sequence[Place] = ()) -> Iterator[Problem]:
    """Yield a problem for each rule that ``model``, at the place ``at``, violates.

    unknown: places whose values are invalid; rules that read one of them are not checked.
    """
    for rule in model.rules:
        reads = [(*at, *place_of(read)) for read in rule.reads]
        if not any(_overlaps(place, unknown) for place in reads) and not rule.ok(model):
            yield Problem(
                place=reads[0],
                value=_plain(attrgetter(rule.reads[0])(model)),
                reason=rule.why,
                fix=rule.fix,
            )
    for flaw in model.flaws():
        if not _overlaps((*at, *flaw.place), unknown):
            yield Problem(place=(*at, *flaw.place), reason=flaw.why, fix=flaw.fix)
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        place = (*at, info.alias or name)
        if isinstance(value, Spec):
            yield from broken(value, at=place, unknown=unknown)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, Spec):
                    yield from broken(item, at=(*place, index), unknown=unknown)


def _broken_in(model: type[Spec], data: Any, *, at: Place, unknown: Sequence[Place]) -> Iterator[Problem]:
    built, _ = _build(model, data)
    if built is not None:
        yield from broken(built, at=at, unknown=unknown)
    elif isinstance(data, dict):
        for name, annotation in fields(model).items():
            part = model_of(annotation)
            if part is not None and name in data:
                yield from _broken_in(part, data[name], at=(*at, name), unknown=unknown)


def _build(model: type[M], data: Any) -> tuple[M | None, list[Any]]:
    try:
        return model.model_validate_json(json.dumps(data), strict=True, by_name=False, context=COLLECT), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _is_consequence(error: Any, wrong: Sequence[Place]) -> bool:
    """Return whether an error of pydantic only follows from another one: pydantic does not count wrong list entries."""
    place = tuple(error["loc"])
    inside = any(len(other) > len(place) and other[: len(place)] == place for other in wrong)
    return error["type"] == "default_factory_not_called" or (error["type"] == "too_short" and inside)


def _problem(model: type[Spec], error: Any) -> Problem:
    place: Place = tuple(step for step in error["loc"] if step != "[key]")
    kind: str = error["type"]
    value = error["input"]
    if kind == "missing":
        return Problem(place=place, reason="is missing", fix="Add it")
    if kind == "extra_forbidden":
        return Problem(place=place, value=value, reason="unknown field", fix=_suggestion(model, place))
    if kind in _LIMITS:
        reason, fix = _LIMITS[kind]
        context = error.get("ctx", {})
        if FUNCTION in context.get("pattern", ""):
            fix = "Write module:function, e.g. mine:score for the function score of mine.py"
        return Problem(place=place, value=value, reason=reason, fix=fix.format(**context))
    expected = _EXPECTED.get(kind.split("_")[0], error["msg"])
    return Problem(place=place, value=value, reason=f"is not {expected}", fix=f"Set it to {expected}")


def _suggestion(model: type[Spec], place: Place) -> str:
    parent, unknown = model_at(model, place[:-1]), str(place[-1])
    known = fields(parent) if parent else {}
    if close := get_close_matches(unknown, known, n=1, cutoff=0.6):
        fix = f"Did you mean {close[0]}?"
    elif near := _nearest([*_mappings_with(unknown, model)], place[:-1]):
        fix = f"It is a field of {', '.join(near)}"
    else:
        fix = f"The known fields are: {', '.join(sorted(known))}"
    free = [f" ({whose} go into {name})" for name, whose in _FREE.items() if name in known]
    return fix + "".join(free)


def _mappings_with(name: str, model: type[Spec], *, at: Place = ()) -> Iterator[Place]:
    """Yield the places of the mappings below ``model`` that have a field of this name; not those within lists."""
    for field, annotation in fields(model).items():
        part = model_of(annotation)
        if part is None or get_origin(annotation) is tuple:
            continue
        if name in fields(part):
            yield (*at, field)
        yield from _mappings_with(name, part, at=(*at, field))


def _nearest(places: Sequence[Place], here: Place) -> list[str]:
    """Return the paths of the places that share the longest beginning with ``here``."""
    for length in reversed(range(len(here) + 1)):
        if near := [place for place in places if place[:length] == here[:length]]:
            return [".".join(map(str, place)) for place in near]
    return []


def _overlaps(place: Place, unknown: Sequence[Place]) -> bool:
    return any(place[: len(other)] == other or other[: len(place)] == place for other in unknown)


def _without_nulls(model: type[Spec], data: Any) -> Any:
    """Return ``data`` without the nulls of optional fields, which stand for the default, as for the API server."""
    if isinstance(data, list):
        return [_without_nulls(model, item) for item in data]
    if not isinstance(data, dict):
        return data
    optional = {info.alias or name for name, info in model.model_fields.items() if not info.is_required()}
    inner = {name: part for name, annotation in fields(model).items() if (part := model_of(annotation))}
    return {
        key: _without_nulls(inner[key], value) if key in inner else value
        for key, value in data.items()
        if value is not None or key not in optional
    }


def _without(data: Any, wrong: Sequence[Place]) -> Any:
    kept = copy.deepcopy(data)
    for place in wrong:
        here = kept
        for step in place[:-1]:
            here = here.get(step) if isinstance(here, dict) else None
        if isinstance(here, dict) and place:
            here.pop(place[-1], None)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return MISSING if value is None else value
