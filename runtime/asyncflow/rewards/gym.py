"""The reward ``gym``: reasoning-gym's own checker for the data set of the prompt.

Nine of its checkers execute the answer as Python code. In their modules, the parsers of ``expressions`` replace
``eval`` and ``sympy.parse_expr``. An audit hook detects any other checker that executes an answer, also in other
versions of reasoning-gym. Two checkers accept wrong answers: one accepts every text as "True", the other accepts "nan"
as any complex number; they are patched, too. Several checkers raise an exception for an answer that they cannot parse;
such an answer is scored as wrong, and not as a failure of the reward.

Invariants: while a checker runs, only texts of the data set are executed as code. The checker is created with the same
config as the prompt. Slow imports happen together with this module, before the deadline of the first sample starts.
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
    """Return the truth value of a text, None if it is neither "true" nor "false"; in Python every text is true."""
    return {"true": True, "false": False}.get(answer.strip().lower()) if isinstance(answer, str) else bool(answer)


def _least(*numbers: float) -> float:
    """Return the smallest number, or 0 if one is nan; Python's ``min(1.0, nan)`` is 1."""
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
"""Replacements of unsafe or wrong functions in modules of reasoning_gym: module -> name -> replacement."""

for _name, _replacements in _PARSERS.items():
    vars(importlib.import_module(f"reasoning_gym.{_name}")).update(_replacements)


def score(*, response: str, prompt: str, answer: Any, meta: dict[str, Any]) -> float:
    """Return the data set's ``score_answer``, which may give partial credit; 0 if it cannot parse the response.

    Raises ValueError for other prompts, PermissionError if the checker tried to execute the response, MemoryError, and
    any exception that the checker also raises for the data set's own answer: then the prompt is wrong, not the
    response.
    """
    if "dataset" not in meta:
        message = "the function gym scores prompts of gym:// only, but the meta of this prompt names no dataset"
        raise ValueError(message)
    checker = _checker(meta["dataset"], json.dumps(meta["config"], sort_keys=True))
    entry = {"question": prompt, "answer": answer, "metadata": meta["metadata"]}
    with _guard.watching(meta["dataset"], entry):
        try:
            return float(checker.score_answer(response or None, entry))
        except (PermissionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  checkers raise exceptions of any type for answers that they cannot parse
            checker.score_answer(answer, entry)
            return 0.0


@functools.cache
def _checker(dataset: str, config: str) -> Any:
    return create_dataset(dataset, **{"size": 1, **json.loads(config), "seed": 0})


class _Guard:
    """An audit hook that lets a checker execute only texts of its own entry."""

    def __init__(self) -> None:
        self._entry: dict[str, Any] | None = None
        self._compiled: object = None
        self._refused = False
        sys.addaudithook(self._on_event)

    @contextmanager
    def watching(self, dataset: str, entry: dict[str, Any]) -> Iterator[None]:
        """Watch the checker of ``dataset``.

        Raises PermissionError if the checker tried to execute another text, even if it caught the first error.
        """
        self._entry, self._refused = entry, False
        try:
            yield
        finally:
            self._entry = None
        if self._refused:
            raise PermissionError(f"the checker of gym://{dataset} tried to execute the answer as Python code")

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._entry is None:
            return
        if event == "compile":
            self._compiled = arguments[0]
        elif event == "exec" and _runs_answers(inspect.currentframe()):
            source, self._compiled = self._compiled, None
            text = source.decode(errors="replace") if isinstance(source, bytes) else source
            if text not in set(_texts(self._entry)):
                self._refused = True
                raise PermissionError("an answer must not be executed as Python code")


def _runs_answers(hook: FrameType | None) -> bool:
    """Return whether the running code belongs to a checker or to sympy's parser, and not to a module import."""
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
