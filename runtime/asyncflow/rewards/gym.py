"""The reward ``gym``: reasoning-gym's own checker of the data set that the prompt came from.

Nine of its checkers run the answer as Python. Their modules are given the parsers of ``expressions`` in place of
``eval`` and ``sympy.parse_expr``; an audit hook sees to it that no other checker, of this version of reasoning-gym or
of another, does it unnoticed. Two take an answer for right that is none: every text for "True", and "nan" for any
complex number. Several raise on an answer that they cannot read, which is a wrong answer and no broken reward.

Invariants: while a checker runs, no text becomes code but the data set's own; the checker is made with the config that
the prompt was made with; what is slow to import is imported with this module, before the first sample's time runs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, Final

import reasoning_gym  # noqa: F401  importing it registers the datasets
import sympy
from reasoning_gym.factory import create_dataset

from asyncflow.rewards.expressions import algebra, arithmetic, literal


def _truth(answer: object) -> bool | None:
    """Return what a text says, None where that is neither yes nor no; Python takes every text for true."""
    return {"true": True, "false": False}.get(answer.strip().lower()) if isinstance(answer, str) else bool(answer)


def _least(*numbers: float) -> float:
    """Return the least of numbers, 0 where one is none; Python's ``min(1.0, nan)`` is 1."""
    return 0.0 if any(map(math.isnan, numbers)) else min(numbers)


_ALGEBRA: Final = SimpleNamespace(**(vars(sympy) | {"parse_expr": algebra}))
_PARSERS: Final[dict[str, dict[str, object]]] = {
    "algebra.complex_arithmetic": {"min": _least},
    "algebra.intermediate_integration": {"sympy": _ALGEBRA},
    "algebra.polynomial_multiplication": {"sp": _ALGEBRA},
    "algebra.simple_integration": {"sympy": _ALGEBRA},
    "algorithmic.binary_matrix": {"eval": literal},
    "algorithmic.game_of_life_halting": {"bool": _truth},
    "algorithmic.spiral_matrix": {"eval": literal},
    "algorithmic.string_insertion": {"eval": literal},
    "games.countdown": {"parse_expr": arithmetic},
    "games.n_queens": {"eval": literal},
    "games.puzzle24": {"parse_expr": arithmetic},
}
"""By module of reasoning_gym: the names that its checker finds in place of those that run text."""

for _place, _names in _PARSERS.items():
    vars(importlib.import_module(f"reasoning_gym.{_place}")).update(_names)


def score(*, response: str, prompt: str, answer: Any, meta: dict[str, Any]) -> float:
    """Score by the data set's ``score_answer``, which may give partial credit; 0 where it cannot read the response.

    Raises ValueError for other prompts, PermissionError where the checker tried to run the response, MemoryError, and
    what the checker raises on the data set's own answer too: then the prompt is at fault and not the response.
    """
    if "dataset" not in meta:
        message = "the reward `gym` scores prompts of gym:// only; this one says no dataset"
        raise ValueError(message)
    checker = _checker(meta["dataset"], json.dumps(meta["config"], sort_keys=True))
    entry = {"question": prompt, "answer": answer, "metadata": meta["metadata"]}
    with _guard.watching(meta["dataset"], entry):
        try:
            return float(checker.score_answer(response or None, entry))
        except (PermissionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  checkers raise of every kind on answers that they cannot read
            checker.score_answer(answer, entry)
            return 0.0


@functools.cache
def _checker(dataset: str, config: str) -> Any:
    return create_dataset(dataset, **{"size": 1, **json.loads(config), "seed": 0})


class _Guard:
    """An audit hook that lets a checker run no text but texts of its own entry."""

    def __init__(self) -> None:
        self._entry: dict[str, Any] | None = None
        self._compiled: object = None
        self._refused = False
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self, dataset: str, entry: dict[str, Any]) -> Iterator[None]:
        """Watch the checker of ``dataset``. Raises PermissionError if it tried, even where it went on after that."""
        self._entry, self._refused = entry, False
        try:
            yield
        finally:
            self._entry = None
        if self._refused:
            raise PermissionError(f"the checker of gym://{dataset} runs answers as Python, which is refused")

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._entry is None:
            return
        if event == "compile":
            self._compiled = arguments[0]
        elif event == "exec" and _runs_answers(inspect.currentframe()):
            source, self._compiled = self._compiled, None
            text = source.decode(errors="replace") if isinstance(source, bytes) else source
            if text not in set(_texts(self._entry)):
                self._refused = True
                raise PermissionError("an answer is not run as Python")


def _runs_answers(hook: FrameType | None) -> bool:
    """Return whether the running code comes from a checker or sympy's parser, and not from a module being imported."""
    caller = hook.f_back if hook is not None else None
    if caller is None or not _module(caller).startswith(("reasoning_gym.", "sympy.parsing.")):
        return False
    while caller is not None and _module(caller) != "importlib._bootstrap":
        caller = caller.f_back
    return caller is None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))


_guard = _Guard()
