"""Loading of an environment by its name in ``environment.function``: a built-in one, or the user's ``module:name``.

An environment is either of these:

* A function ``fn(*, transcript, prompt, answer, meta, config) -> str | None``, ``async`` or not. It returns the text
  that the model reads next, or None to end the episode.
* A class, instantiated by ``cls(prompt=, answer=, meta=, config=)``. Its method ``step(text)`` returns the same for
  each turn of the model.

Invariant: an answer is a function of the request alone. An environment has no state except the transcript: each request
creates a new object of the class and replays all turns so far. Therefore any process can continue an episode, and an
environment must derive random numbers from the request (``meta``), never from the time or the process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.data.base import MODEL
from asyncflow.errors import ManifestError
from asyncflow.functions import import_function
from asyncflow.plugins import read_options
from asyncflow.rewards.calling import Extractor, RewardFunction, failed
from asyncflow.rewards.functions import check_module
from asyncflow.rewards.wire import Example, Score, ScoreAnswer

BUILT_IN = {"calculator": "asyncflow.environments.calculator:answer"}
"""The built-in environments, by name. The module of each has its settings, ``Options``."""
FIELD = "spec.environment.function"

_CONTEXT = ("prompt", "answer", "meta", "config")


def check(function: str, *, workdir: Path) -> None:
    """Check that an environment can be found, without running user code.

    workdir: the job's folder, which is searched first for a user's module. Raises ManifestError if it cannot be found.
    """
    check_module(function, where=FIELD, known=BUILT_IN, workdir=workdir)


def load(function: str, *, workdir: Path, config: dict[str, Any] | None = None) -> EnvironmentFunction:
    """Import the environment. config: its settings.

    Raises ManifestError if the module has no such function or class, if its parameters do not match, or if a built-in
    environment does not know a setting. The import of the user's module may raise any exception.
    """
    found = import_function(BUILT_IN.get(function, function), workdir=workdir)
    if function in BUILT_IN:
        options = sys.modules[found.__module__].Options
        read_options(config or {}, options, where="spec.environment.config")
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
    step = getattr(found, "step", None)
    if stepped and (not callable(step) or inspect.iscoroutinefunction(step)):
        hint = "Define it: it returns the text that the model reads next, or None to end the episode"
        what = f"the class of {function!r} has no method step(text), or it is async"
        raise ManifestError(what, where=FIELD, hint=hint)
    return EnvironmentFunction(
        call=_replaying(found) if stepped else found,
        takes="sample",
        names=frozenset(),
        concurrent=inspect.iscoroutinefunction(found),
        config=dict(config or {}),
    )


class EnvironmentFunction(RewardFunction):
    """A loaded environment. It is called like a reward function, but receives a transcript and returns a text."""

    def arguments(self, examples: Sequence[Example], *, extractor: Extractor) -> dict[str, Any]:
        """Return the keyword arguments of the call for one example."""
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
        """Return the answer that carries the returned text, or a failure if the returned value is invalid."""
        del samples
        if returned is None:
            return ScoreAnswer(nonce=b"", scores=[Score()])
        if not isinstance(returned, str) or not returned:
            what = f"the environment returned {returned!r}; it must return a text, or None to end the episode"
            return failed("invalid", what)
        return ScoreAnswer(nonce=b"", scores=[Score(text=returned.encode(errors="replace").decode())])


def _replaying(environment_class: Any) -> Callable[..., Any]:
    """Return a function that creates an object of the class and replays all turns of a transcript on it."""

    def answer(*, transcript: Sequence[Mapping[str, str]], **context: Any) -> Any:
        instance, reply = environment_class(**context), None
        for turn in transcript:
            if turn["role"] == MODEL:
                reply = instance.step(turn["content"])
        return reply

    return answer
