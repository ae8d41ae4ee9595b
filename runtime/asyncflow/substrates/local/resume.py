"""May a run go on under a changed manifest? Pure.

Invariant: what the contract declares frozen (``frozen_fields``, which the API server enforces on Kubernetes) never
changes between two lives of one run folder; steps only grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncflow.api.base import Spec
from asyncflow.api.job import RLJob
from asyncflow.api.paths import place_of
from asyncflow.api.problems import MISSING, Place, Problem, refusal, shown

_SETTINGS_OF_DATA: Place = ("spec", "data", "train", "config")
"""Frozen as well; CEL cannot say it, for the settings are free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One value that changed; ``MISSING`` stands for one that is not there."""

    place: Place
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place))}: {_said(self.old)} -> {_said(self.new)}"


def differences(old: RLJob, new: RLJob) -> list[Difference]:
    """Return every value that differs. Raises ManifestError where one of them must not."""
    found = list(_differ(_plain(old), _plain(new), ()))
    frozen = {("metadata", "name"): "the folder belongs to the old job", _SETTINGS_OF_DATA: "it makes other prompts"}
    frozen.update(_frozen(new.spec, ("spec",)))
    problems = [
        Problem(
            place=each.place, value=each.new, reason=f"was {_said(each.old)}, and {why}", fix="Keep it, or use --fresh"
        )
        for each in found
        for place, why in frozen.items()
        if each.place[: len(place)] == place
    ]
    steps, before = new.spec.algorithm.steps, old.spec.algorithm.steps
    if steps < before:
        place = ("spec", "algorithm", "steps")
        problems.append(Problem(place=place, value=steps, reason=f"was {before}", fix="Give at least as many"))
    if problems:
        raise refusal(problems, source="--resume")
    return found


def _plain(job: RLJob) -> dict[str, Any]:
    return job.model_dump(mode="json", by_alias=True, exclude_none=True)


def _frozen(spec: Spec, at: Place) -> Iterator[tuple[Place, str]]:
    for frozen in spec.frozen_fields:
        yield (*at, *place_of(frozen.reads)), frozen.why
    for name, info in type(spec).model_fields.items():
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from _frozen(value, (*at, info.alias or name))


def _differ(old: Any, new: Any, at: Place) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differ(old.get(key, MISSING), new.get(key, MISSING), (*at, key))
    elif old != new:
        yield Difference(place=at, old=old, new=new)


def _said(value: Any) -> str:
    return "absent" if value is MISSING else shown(value)
