"""Calls of a reward function: the arguments, which its parameters select, and the interpretation of its results.

    def score(*, response, prompt, answer, meta)         one sample
    def score(*, responses, prompts, answers, metas)     a batch: samples of any prompts
    def score(*, responses, prompt, answer, meta)        a group: all samples of one prompt

A parameter for a list of values has a name in the plural. Further parameters are ``length`` (``lengths``), the number
of tokens of a response; ``transcript`` (``transcripts``), all turns and observations so far if there is an environment;
and ``config``, the settings of the function in the manifest. A function declares only the parameters that it needs. It
may be ``async``. A class is instantiated once, and the object is called. Its constructor may take ``config``,
``extractor`` (the name), ``device`` (torch's name of the device: ``cpu``, ``cuda``, ``npu``) and ``share`` (part of the
device's memory). On the CPU, ``device`` and ``share`` are not passed if they have defaults.

The result for a sample is a finite number, ``{"reward": number, "details": {...}}``, or an object with these two
attributes, e.g. a NamedTuple. A dict may contain ``turns`` in place of ``reward``: a number for each turn of the model,
in order, whose sum is the reward. The result for several samples is a list of such values, in order.

Invariant: every returned value or exception becomes either one score for each sample, or one failure of the call.
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
"""Parameters that differ between the samples of one prompt."""
_NAMES: Final[dict[Takes, tuple[str, ...]]] = {
    "sample": tuple(_MANY),
    "batch": tuple(_MANY.values()),
    "group": tuple(_MANY[name] if name in _OF_SAMPLE else name for name in _MANY),
}
_HINT: Final = (
    "Declare keyword parameters: response, prompt, answer, meta for one sample; responses, prompts, answers, metas for "
    "samples of several prompts; responses, prompt, answer, meta for all samples of one prompt (docs/guide/rewards.md)"
)

Extractor = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A loaded reward function. names: the arguments with which it is called; concurrent: whether it is ``async``."""

    call: Callable[..., Any]
    takes: Takes
    names: frozenset[str]
    concurrent: bool
    config: dict[str, Any]

    @classmethod
    def of(
        cls, found: Any, *, name: str, config: dict[str, Any] | None, place: Mapping[str, Any] = MappingProxyType({})
    ) -> RewardFunction:
        """Return the reward function for ``found``, a function or a class that a module has under ``name``.

        config: its settings, None if the manifest has none; place: ``extractor``, ``device`` and ``share`` for a class.
        Raises ManifestError if its parameters are not supported, and any exception of the constructor of a class.
        """
        if isinstance(found, type):
            parameters, on_device = _parameters(found, name), place.get("device", "cpu") != "cpu"
            arguments = {
                each: value
                for each, value in place.items()
                if each in parameters
                and (on_device or each not in _OF_DEVICE or parameters[each].default is inspect.Parameter.empty)
            }
            if "config" in parameters:
                arguments["config"] = dict(config or {})
            found, config = found(**arguments), None if "config" in arguments else config
        names, rest, required = _read(found, name)
        takes = _takes(names, rest=rest, name=name)
        known = {*_NAMES[takes], "config"}
        if unknown := sorted(required - known):
            what = f"{name!r} has the parameter {unknown[0]!r}, which is none of {', '.join(sorted(known))}"
            raise ManifestError(what, where="spec.reward.function", hint=_HINT)
        named = frozenset(known if rest else names & known)
        if config and "config" not in named:
            what = f"{name!r} has no parameter config, but the manifest has settings for it"
            raise ManifestError(what, where="spec.reward.config", hint="Add the parameter, or remove the settings")
        return cls(
            call=found,
            takes=takes,
            names=named,
            concurrent=inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__),
            config=dict(config or {}),
        )

    def arguments(self, examples: Sequence[Example], *, extractor: Extractor) -> dict[str, Any]:
        """Return the arguments of a call for ``examples``. Raises any exception of the extractor."""
        arguments: dict[str, Any] = {"config": self.config}
        for name, plural in _MANY.items():
            values = [getattr(example, name) for example in examples]
            if name == "response":
                values = list(map(extractor, values))
            elif name == "transcript" and not self.names.isdisjoint((name, plural)):
                values = msgspec.to_builtins(values)
            arguments |= {name: values[0], plural: values}
        return {name: arguments[name] for name in self.names}

    def judge(self, returned: Any, *, samples: int) -> ScoreAnswer:
        """Return the scores in the function's result for so many samples.

        Raises any exception that the returned object raises when it is read.
        """
        if self.takes == "sample":
            return ScoreAnswer(nonce=b"", scores=[_score(returned)])
        listed = _listed(returned)
        if listed is None or len(listed) != samples:
            count = f"a {type(returned).__name__}" if listed is None else f"a list of {len(listed)}"
            return failed("invalid", f"the reward function returned {count}; it must return a list of {samples}")
        return ScoreAnswer(nonce=b"", scores=[_score_or_failure(each) for each in listed])


def failed_with_traceback() -> ScoreAnswer:
    """Return the answer of a call that raised the current exception."""
    return failed("raised", traceback.format_exc(limit=-8))


def failed(failure: Any, detail: str) -> ScoreAnswer:
    """Return the answer of a call that has no scores."""
    return ScoreAnswer(nonce=b"", failure=failure, detail=end_of(detail))


def end_of(text: str) -> str:
    """Return the end of a text from untrusted code, without characters that cannot be encoded."""
    return text[-_MOST_DETAIL:].encode(errors="replace").decode()


def _parameters(found: Any, name: str) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(found).parameters)
    except (TypeError, ValueError) as error:
        what = f"the parameters of {name!r} cannot be determined: {error}"
        raise ManifestError(what, where="spec.reward.function", hint="Wrap it in a Python function") from error


def _read(found: Any, name: str) -> tuple[set[str], bool, set[str]]:
    """Return the keyword parameters, whether there is a ``**`` parameter, and the parameters without a default."""
    names, required, rest = set(), set(), False
    for parameter in _parameters(found, name).values():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            by_name = parameter.kind is not parameter.POSITIONAL_ONLY
            names |= {parameter.name} if by_name else set()
            required |= {parameter.name} if parameter.default is parameter.empty else set()
            if not by_name and parameter.default is parameter.empty:
                what = f"{name!r} takes {parameter.name!r} by position only, but is called with keyword arguments"
                raise ManifestError(what, where="spec.reward.function", hint=_HINT)
    return names, rest, required


def _takes(names: set[str], *, rest: bool, name: str) -> Takes:
    one, many = names.intersection(_OF_SAMPLE), names.intersection(_MANY[name] for name in _OF_SAMPLE)
    if many and one:
        what = f"{name!r} takes {min(one)} and {min(many)}, but a call has either one sample or several"
    elif many and ("prompt" in names) != ("prompts" in names):
        return "group" if "prompt" in names else "batch"
    elif many:
        what = (
            f"{name!r} takes {min(many)}, but must have exactly one of the parameters prompt (one prompt) and prompts"
        )
    elif one or rest:
        return "sample"
    else:
        what = f"{name!r} has no parameter response"
    raise ManifestError(what, where="spec.reward.function", hint=_HINT)


def _listed(value: Any) -> list[Any] | None:
    """Return the values of a list, a plain tuple, or an array with one dimension; None for anything else."""
    if isinstance(value, list | tuple):
        return None if hasattr(value, "_fields") else list(value)
    return value.tolist() if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist") else None


def _score_or_failure(value: Any) -> Score:
    try:
        return _score(value)
    except Exception:  # noqa: BLE001  an exception of a user's type is the result of its sample
        return Score(failure="raised", detail=end_of(traceback.format_exc(limit=-8)))


def _score(value: Any) -> Score:
    """Return the score in one value. Raises any exception, since a user's type may define the conversion."""
    details: Any = {}
    turns: list[float] = []
    if isinstance(value, dict) and value.keys() - {"details"} == {"turns"}:
        value, details = value["turns"], value.get("details", {})
        if not (listed := _listed(value)) or None in (found := list(map(_as_float, listed))):
            return _invalid(f"the rewards of the turns are {value!r}; they must be a list with one number per turn")
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
        if isinstance(value, dict):
            has = f"a dict with {', '.join(map(repr, value)) or 'no keys'}"
            wanted = "it must have 'reward' or 'turns', and may have 'details'"
            return _invalid(f"the reward function returned {has}; {wanted}")
        kind = type(value).__name__
        return _invalid(f"the reward function returned a {kind}; it must return a finite number")
    if not math.isfinite(reward):
        return _invalid(f"the reward function returned {reward}; it must return a finite number")
    if not isinstance(details, dict):
        return _invalid(f"the details of the reward are a {type(details).__name__}; they must be a dict")
    try:
        return Score(value=reward, details=packed(details), turns=turns)
    except (TypeError, ValueError, RecursionError) as error:
        return _invalid(f"the details of the reward cannot be written as JSON: {error}")


def packed(details: dict[str, Any]) -> bytes:
    """Return details as JSON: empty if there are none, and only their size if they are too large.

    Raises TypeError, ValueError or RecursionError if JSON cannot represent them.
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
    return Score(failure="invalid", detail=end_of(why))


def _as_float(value: object) -> float | None:
    """Return a number as a float, None for other values. Raises any exception of a user's type."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # arrays without dimensions, and numpy's bool
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
