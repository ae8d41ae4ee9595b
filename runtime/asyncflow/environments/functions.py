"""Environments by their name in ``environment.function``: one of the project's, or the user's ``module:name``.

An environment is a function ``fn(*, transcript, prompt, answer, meta, config) -> str | None``, ``async`` or not, which
returns what the model reads next, or None where the episode ends; or a class, made by ``cls(prompt=, answer=, meta=,
config=)``, whose
``step(text)`` returns that for each turn of the model.

Invariant: an answer is a function of what is asked. The state of an environment is that of its transcript and nothing
more: an object of a class is made for each question, and goes through all turns so far. So an episode goes on wherever
it is asked for next, and random numbers must be drawn from the question (``meta``), never from time or the process.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.data.base import MODEL
from asyncflow.errors import ManifestError
from asyncflow.rewards.calling import Extractor, RewardFunction, failed
from asyncflow.rewards.functions import check_module
from asyncflow.rewards.wire import Example, Score, ScoreAnswer

BUILT_IN = {"calculator": "asyncflow.environments.calculator:answer"}
"""The environments of the project, by name."""
FIELD = "environment.function"

_CONTEXT = ("prompt", "answer", "meta", "config")


def check(function: str, *, workdir: Path) -> None:
    """Refuse what cannot be loaded, as far as that can be told without running anybody's code.

    workdir: the job's folder, where a user's module is looked for first. Raises ManifestError.
    """
    check_module(function, where=FIELD, known=BUILT_IN, workdir=workdir)


def load(function: str, *, workdir: Path, config: dict[str, Any] | None = None) -> EnvironmentFunction:
    """Import the environment; config: its settings.

    Raises ManifestError where there is none, or it cannot be called as it will be; an import may raise anything.
    """
    if str(workdir) not in sys.path:
        sys.path.insert(0, str(workdir))
    module, _, name = BUILT_IN.get(function, function).partition(":")
    found: Any = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ManifestError(f"module {module!r} has no function or class {name!r}", where=FIELD)
    stepped = inspect.isclass(found)
    names = _CONTEXT if stepped else ("transcript", *_CONTEXT)
    try:
        inspect.signature(found).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ManifestError(
            f"{function!r} cannot be called with {', '.join(names)} by name: {error}",
            where=FIELD,
            hint="docs/guide/multi-turn.md shows a function and a class",
        ) from error
    if stepped and not callable(getattr(found, "step", None)):
        raise ManifestError(f"class {name!r} has no method step(text)", where=FIELD)
    return EnvironmentFunction(
        call=_replaying(found) if stepped else found,
        takes="sample",
        names=frozenset(),
        concurrent=inspect.iscoroutinefunction(found),
        config=dict(config or {}),
    )


class EnvironmentFunction(RewardFunction):
    """An environment that is loaded, called as a reward function is, but with a transcript and for a text."""

    def arguments(self, examples: Sequence[Example], *, extractor: Extractor) -> dict[str, Any]:
        """Return what it is called with for one example."""
        del extractor
        (example,) = examples
        return {
            "transcript": [msgspec.to_builtins(turn) for turn in example.transcript],
            "prompt": example.prompt,
            "answer": example.answer,
            "meta": example.meta,
            "config": self.config,
        }

    def judge(self, returned: Any, *, samples: int) -> ScoreAnswer:
        """Return the answer that says what it returned."""
        del samples
        if returned is None:
            return ScoreAnswer(nonce=b"", scores=[Score()])
        if not isinstance(returned, str) or not returned:
            what = f"the environment returned {returned!r}; it must return a text, or None to end the episode"
            return failed("invalid", what)
        return ScoreAnswer(nonce=b"", scores=[Score(text=returned.encode(errors="replace").decode())])


def _replaying(made: Any) -> Callable[..., Any]:
    """Return a function that makes an object of a class, and has it go through all turns of a transcript."""

    def answer(*, transcript: Sequence[Mapping[str, str]], **context: Any) -> Any:
        instance, said = made(**context), None
        for turn in transcript:
            if turn["role"] == MODEL:
                said = instance.step(turn["content"])
        return said

    return answer
