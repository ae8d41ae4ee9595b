"""A reward process: ``python -P -m asyncflow.rewards.child``; its standard input says what to load and to score.

Invariants: it has restricted itself before it loads anybody's code; the function runs in the main thread and nothing
that it prints reaches the pipe; the process ends when its parent does (PR_SET_PDEATHSIG, also while the function runs)
or when the pipe ends; it never imports torch itself.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from asyncflow.process import die_with_parent
from asyncflow.rewards import sandbox
from asyncflow.rewards.functions import EXTRACTORS, RewardFunction, load
from asyncflow.rewards.wire import LENGTH, Load, Question, ScoreAnswer, frame

T = TypeVar("T", bound=msgspec.Struct)

_MOST_DETAIL = 4000


def answer(function: RewardFunction, extractor: Callable[[str], str], question: Question) -> ScoreAnswer:
    """Call the function; whatever it raises or returns becomes an answer."""
    example, nonce = question.example, question.nonce
    try:
        response = extractor(example.response)
        value: object = function(response=response, prompt=example.prompt, answer=example.answer, meta=example.meta)
        reward = _as_float(value)
        if reward is None:
            if inspect.iscoroutine(value):
                value.close()
            detail = _said(f"the reward function returned a {type(value).__name__}; it must return a finite number")
            return ScoreAnswer(nonce=nonce, failure="invalid", detail=detail)
    except Exception:  # noqa: BLE001  somebody else's code: what it raises is the outcome
        return ScoreAnswer(nonce=nonce, failure="raised", detail=_said(traceback.format_exc(limit=-8)))
    if not math.isfinite(reward):
        return ScoreAnswer(nonce=nonce, failure="invalid", detail=f"the reward function returned {reward}")
    return ScoreAnswer(nonce=nonce, value=reward)


def _as_float(value: object) -> float | None:
    """Return a number as a float, None for what is no number. Raises anything, since a type may say how."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _said(text: str) -> str:
    """Return the end of what somebody else's code says, as characters that can be sent."""
    return text[-_MOST_DETAIL:].encode(errors="replace").decode()


def main() -> None:
    """Run the process."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    told = _read(questions, Load)
    if told is None:
        return
    die_with_parent(told.parent)
    unrestricted = sandbox.enter(told.sandbox)
    try:
        function = load(told.function, workdir=Path(told.workdir))
    except Exception as error:  # noqa: BLE001  importing somebody else's code: the pool reports it
        traceback.print_exc()
        (why,) = traceback.format_exception_only(error)[-1:]
        _write(answers, ScoreAnswer(nonce=told.nonce, failure="raised", detail=_said(why.strip())))
        return
    _write(answers, ScoreAnswer(nonce=told.nonce, unrestricted=unrestricted))
    while (question := _read(questions, Question)) is not None:
        sandbox.limit_cpu(question.seconds)
        _write(answers, answer(function, EXTRACTORS[told.extractor], question))


def _read(pipe: BinaryIO, kind: type[T]) -> T | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(pipe.read(LENGTH.unpack(head)[0]), type=kind)


def _write(pipe: BinaryIO, said: ScoreAnswer) -> None:
    pipe.write(frame(said))
    pipe.flush()


if __name__ == "__main__":
    main()
