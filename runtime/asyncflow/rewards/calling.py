"""The call of a reward function, which its parameters describe, and the meaning of what it returns.

    def score(*, response, prompt, answer, meta)         one sample
    def score(*, responses, prompts, answers, metas)     a batch: samples of any prompts
    def score(*, responses, prompt, answer, meta)        a group: all samples of one prompt

The name of a parameter is in the plural where there are many of it. ``length`` (``lengths``) is the number of tokens of
a response, ``transcript`` (``transcripts``) what was said so far where there is an environment, as it is asked with
it, ``config`` what the manifest gives the function. A function has those parameters that it needs; it may be
``async``. A class is made once, with those of ``config``, ``extractor`` (its name), ``device`` (torch's name of what it
computes with: ``cpu``, ``cuda``, ``npu``) and ``share`` (part of the device's memory) that it takes, and its object is
called. On the CPU a ``device`` or ``share`` that has a default keeps it.

A sample's answer is a finite number, ``{"reward": number, "details": {...}}``, or an object with these two attributes,
as a NamedTuple has. In the place of ``reward`` there may be ``turns``: a number for each turn of the model, in order,
whose sum is the reward. Of many samples it is a list of these, in order.

Invariant: whatever a function returns or raises becomes scores, one a sample, or one failure of the call.
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from asyncflow.errors import ManifestError
from asyncflow.rewards.wire import MOST_DETAILS, Example, Score, ScoreAnswer, Takes

_MOST_DETAIL: Final = 4000
_OF_DEVICE: Final = ("device", "share")
_MANY: Final = {
    "response": "responses",
    "prompt": "prompts",
    "answer": "answers",
    "meta": "metas",
    "length": "lengths",
    "transcript": "transcripts",
}
_OF_SAMPLE: Final = ("response", "length", "transcript")
"""What the samples of one prompt do not have in common."""
_NAMES: Final[dict[Takes, tuple[str, ...]]] = {
    "sample": tuple(_MANY),
    "batch": tuple(_MANY.values()),
    "group": tuple(_MANY[name] if name in _OF_SAMPLE else name for name in _MANY),
}
_HINT: Final = (
    "define it with parameters by name: response, prompt, answer, meta for one sample; responses, prompts, answers, "
    "metas for many; responses, prompt, answer, meta for all of one prompt (docs/guide/rewards.md)"
)

Extractor = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function that is loaded. names: the arguments that it is called with; concurrent: it is ``async``."""

    call: Callable[..., Any]
    takes: Takes
    names: frozenset[str]
    concurrent: bool
    config: dict[str, Any]

    @classmethod
    def of(
        cls, found: Any, *, name: str, config: dict[str, Any] | None, place: Mapping[str, Any] = MappingProxyType({})
    ) -> RewardFunction:
        """Return the function, or the object of the class, that a module has by ``name``.

        config: its settings, None where the manifest has none; place: ``extractor``, ``device`` and ``share`` of a
        class. Raises ManifestError where it cannot be called as it will be, and what a class raises.
        """
        made = isinstance(found, type)
        if made:
            asked, own = _parameters(found, name), place.get("device", "cpu") != "cpu"
            given = {
                each: value
                for each, value in place.items()
                if each in asked and (own or each not in _OF_DEVICE or asked[each].default is inspect.Parameter.empty)
            }
            if "config" in asked:
                given["config"] = dict(config or {})
            found, config = found(**given), None if "config" in given else config
        names, rest, required = _read(found, name)
        takes = _takes(names, rest=rest, name=name)
        known = {*_NAMES[takes], "config"}
        if unknown := sorted(required - known):
            what = f"{name!r} has the parameter {unknown[0]!r}, which is none of {', '.join(sorted(known))}"
            raise ManifestError(what, where="reward.function", hint=_HINT)
        named = frozenset(known if rest else names & known)
        if config and "config" not in named:
            what = f"{name!r} has no parameter config, and the manifest gives it settings"
            raise ManifestError(what, where="reward.config", hint="Add the parameter, or leave the settings out")
        return cls(
            call=found,
            takes=takes,
            names=named,
            concurrent=inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__),
            config=dict(config or {}),
        )

    def arguments(self, examples: Sequence[Example], *, extractor: Extractor) -> dict[str, Any]:
        """Return what the function is called with for ``examples``. Raises what the extractor raises."""
        given: dict[str, Any] = {"config": self.config}
        for name, plural in _MANY.items():
            values = [getattr(example, name) for example in examples]
            if name == "response":
                values = list(map(extractor, values))
            elif name == "transcript" and not self.names.isdisjoint((name, plural)):
                values = msgspec.to_builtins(values)
            given |= {name: values[0], plural: values}
        return {name: given[name] for name in self.names}

    def judge(self, returned: Any, *, samples: int) -> ScoreAnswer:
        """Return the answer that says what the function returned for so many samples. Raises what its types raise."""
        if self.takes == "sample":
            return ScoreAnswer(nonce=b"", scores=[_score(returned)])
        listed = _listed(returned)
        if listed is None or len(listed) != samples:
            count = f"a {type(returned).__name__}" if listed is None else f"{len(listed)} values"
            return failed("invalid", f"the reward function returned {count}; it must return a list of {samples}")
        return ScoreAnswer(nonce=b"", scores=[_judged_alone(each) for each in listed])


def failed_with_traceback() -> ScoreAnswer:
    """Return the answer that says what was just raised."""
    return failed("raised", traceback.format_exc(limit=-8))


def failed(failure: Any, detail: str) -> ScoreAnswer:
    """Return the answer of a call that has no scores."""
    return ScoreAnswer(nonce=b"", failure=failure, detail=said(detail))


def said(text: str) -> str:
    """Return the end of what somebody else's code says, as characters that can be sent."""
    return text[-_MOST_DETAIL:].encode(errors="replace").decode()


def _parameters(found: Any, name: str) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(found).parameters)
    except (TypeError, ValueError) as error:
        raise ManifestError(f"{name!r} does not say its parameters: {error}", where="reward.function") from error


def _read(found: Any, name: str) -> tuple[set[str], bool, set[str]]:
    """Return the parameters that can be given by name, whether it takes any others, and those that must be given."""
    names, required, rest = set(), set(), False
    for parameter in _parameters(found, name).values():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            by_name = parameter.kind is not parameter.POSITIONAL_ONLY
            names |= {parameter.name} if by_name else set()
            required |= {parameter.name} if parameter.default is parameter.empty else set()
            if not by_name and parameter.default is parameter.empty:
                what = f"{name!r} takes {parameter.name!r} by position, and is called with names"
                raise ManifestError(what, where="reward.function", hint=_HINT)
    return names, rest, required


def _takes(names: set[str], *, rest: bool, name: str) -> Takes:
    one, many = names.intersection(_OF_SAMPLE), names.intersection(_MANY[name] for name in _OF_SAMPLE)
    if many and one:
        what = f"{name!r} takes {min(one)} and {min(many)}, and is called with one sample or with many"
    elif many and ("prompt" in names) != ("prompts" in names):
        return "group" if "prompt" in names else "batch"
    elif many:
        what = f"{name!r} takes {min(many)}, and must say whether of one prompt (prompt) or of many (prompts)"
    elif one or rest:
        return "sample"
    else:
        what = f"{name!r} has no parameter response"
    raise ManifestError(what, where="reward.function", hint=_HINT)


def _listed(value: Any) -> list[Any] | None:
    """Return the values of a sequence that is no text, or of an array of one dimension; None of anything else."""
    if isinstance(value, list | tuple):
        return None if hasattr(value, "_fields") else list(value)
    return value.tolist() if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist") else None


def _judged_alone(value: Any) -> Score:
    try:
        return _score(value)
    except Exception:  # noqa: BLE001  somebody else's type: what it raises is the outcome of its sample
        return Score(failure="raised", detail=said(traceback.format_exc(limit=-8)))


def _score(value: Any) -> Score:
    """Return what one value says. Raises anything, since a type may say how it is a number."""
    details: Any = {}
    turns: list[float] = []
    if isinstance(value, dict) and value.keys() - {"details"} == {"turns"}:
        value, details = value["turns"], value.get("details", {})
        if not (listed := _listed(value)) or None in (found := list(map(_as_float, listed))):
            return _invalid(f"the rewards of the turns are {value!r}; they must be a list of numbers, one a turn")
        turns = [each for each in found if each is not None]
        value = math.fsum(turns)
    elif isinstance(value, dict) and "reward" in value and value.keys() <= {"reward", "details"}:
        value, details = value["reward"], value.get("details", {})
    elif not isinstance(value, numbers.Real) and hasattr(value, "reward"):
        value, details = value.reward, getattr(value, "details", {})
    reward = _as_float(value)
    if reward is None:
        if inspect.iscoroutine(value):
            value.close()
        kind = type(value).__name__
        return _invalid(f"the reward function returned a {kind}; it must return a finite number")
    if not math.isfinite(reward):
        return _invalid(f"the reward function returned {reward}")
    if not isinstance(details, dict):
        return _invalid(f"the details of the reward are a {type(details).__name__}; they must be a dict")
    try:
        return Score(value=reward, details=packed(details), turns=turns)
    except (TypeError, ValueError, RecursionError) as error:
        return _invalid(f"the details of the reward are no JSON: {error}")


def packed(details: dict[str, Any]) -> bytes:
    """Return details as JSON, empty where there are none; only their size where that is too large.

    Raises TypeError, ValueError or RecursionError for what is no JSON.
    """
    if not details:
        return b""
    text = msgspec.json.encode(details, enc_hook=_plain)
    return text if len(text) <= MOST_DETAILS else msgspec.json.encode({"omitted_bytes": len(text)})


def _plain(value: Any) -> Any:
    number = _as_float(value)
    if number is None:
        raise TypeError(f"a {type(value).__name__}")
    return number


def _invalid(why: str) -> Score:
    return Score(failure="invalid", detail=said(why))


def _as_float(value: object) -> float | None:
    """Return a number as a float, None for what is no number. Raises anything, since a type may say how."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # of an array without dimensions, and numpy's bool
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
