"""The fields that may change when a run is resumed or a queue is served again.

Invariant: fields that the contract declares frozen (``frozen_fields``, enforced by the API server on Kubernetes) never
change, and the number of a job's steps only grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncflow.api.base import Spec
from asyncflow.api.check import MISSING, Problem, place_of, refusal, shown
from asyncflow.api.document import Place
from asyncflow.api.job import RLJob
from asyncflow.api.queue import TransferQueue
from asyncflow.errors import ManifestError

_SETTINGS_OF_DATA: Place = ("spec", "data", "train", "config")
"""Path of a frozen field that CEL cannot check, since the settings have no schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One value that changed; ``MISSING`` represents an absent value."""

    place: Place
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place))}: {_text(self.old)} -> {_text(self.new)}"


def differences(old: RLJob, new: RLJob) -> list[Difference]:
    """Return every value that differs. Raises ManifestError if one of them must not change."""
    found = list(_differ(_plain(old), _plain(new), ()))
    frozen = {("metadata", "name"): "the folder belongs to the old job", _SETTINGS_OF_DATA: "it changes the prompts"}
    frozen.update(_frozen(new.spec, ("spec",), existence=False))
    existing = dict(_frozen(new.spec, ("spec",), existence=True))
    problems = [
        Problem(
            place=each.place, value=each.new, reason=f"was {_text(each.old)}, and {why}", fix="Keep it, or use --fresh"
        )
        for each in found
        for place, why in (frozen | existing).items()
        if each.place == place or (place in frozen and each.place[: len(place)] == place)
    ]
    steps, before = new.spec.algorithm.steps, old.spec.algorithm.steps
    if steps < before:
        place = ("spec", "algorithm", "steps")
        problems.append(Problem(place=place, value=steps, reason=f"was {before}", fix="Set at least as many"))
    if problems:
        raise refusal(problems, source="--resume")
    return found


def check_queue(old: TransferQueue, new: TransferQueue, *, where: str) -> None:
    """Raise ManifestError, with ``where`` as its place, if a queue cannot be continued with its new manifest."""
    for frozen in new.spec.frozen_fields:
        before, value = getattr(old.spec, frozen.reads), getattr(new.spec, frozen.reads)
        if before != value:
            what = f"{frozen.reads} was {before!r}, and is {value!r}: {frozen.why}"
            hint = "Keep it, or start from scratch with --fresh or another --output"
            raise ManifestError(what, where=where, hint=hint)


def _plain(job: RLJob) -> dict[str, Any]:
    return job.model_dump(mode="json", by_alias=True, exclude_none=True)


def _frozen(spec: Spec, at: Place, *, existence: bool) -> Iterator[tuple[Place, str]]:
    for frozen in spec.frozen_fields:
        if frozen.existence is existence:
            yield (*at, *place_of(frozen.reads)), frozen.why
    for name, info in type(spec).model_fields.items():
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from _frozen(value, (*at, info.alias or name), existence=existence)


def _differ(old: Any, new: Any, at: Place) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differ(old.get(key, MISSING), new.get(key, MISSING), (*at, key))
    elif old != new:
        yield Difference(place=at, old=old, new=new)


def _text(value: Any) -> str:
    return "absent" if value is MISSING else shown(value)
