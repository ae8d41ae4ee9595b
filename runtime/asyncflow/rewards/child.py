"""A reward process: ``python -P -m asyncflow.rewards.child``. It reads from standard input what to load and score.

Invariants: the process restricts itself before it loads untrusted code. The function runs in the main thread, and
its output never reaches the pipe. An ``async`` function runs all requested calls concurrently, each with a deadline of
its own (``concurrent``); any other function runs one call at a time, in a process that has not imported asyncio, which
takes as long as all other imports. The process ends when its parent ends (PR_SET_PDEATHSIG, even while the function
runs) or when the pipe ends. This module never imports torch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from asyncflow.errors import in_one_line
from asyncflow.process import die_with_parent
from asyncflow.rewards import sandbox
from asyncflow.rewards.calling import Extractor, RewardFunction, end_of, failed_with_traceback
from asyncflow.rewards.functions import EXTRACTORS, load
from asyncflow.rewards.wire import LENGTH, Load, Question, ScoreAnswer, frame

T = TypeVar("T", bound=msgspec.Struct)


def answer(function: RewardFunction, extractor: Extractor, question: Question) -> ScoreAnswer:
    """Call the function, and return its result or its exception as an answer."""
    try:
        returned = function.call(**function.arguments(question.examples, extractor=extractor))
        return function.judge(returned, samples=len(question.examples))
    except Exception:  # noqa: BLE001  the exception of a user's function is the result of the call
        return failed_with_traceback()


def serve(loaded: Callable[[Load], RewardFunction]) -> None:
    """Run the process. loaded: returns the function that a ``Load`` names."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    request = _read(questions, Load)
    if request is None:
        return
    die_with_parent(request.parent)
    unrestricted = sandbox.enter(request.sandbox)
    try:
        function = loaded(request)
        if function.concurrent:
            from asyncflow.rewards.concurrent import serve_concurrently
    except Exception as error:  # noqa: BLE001  a user's module may raise anything; the pool reports it
        traceback.print_exc()
        why = in_one_line(error, folder=Path(request.workdir))
        _write(answers, ScoreAnswer(nonce=request.nonce, failure="raised", detail=end_of(why)))
        return
    ready = ScoreAnswer(
        nonce=request.nonce, takes=function.takes, concurrent=function.concurrent, unrestricted=unrestricted
    )
    _write(answers, ready)
    extractor = EXTRACTORS[request.extractor]
    if function.concurrent:
        serve_concurrently(function, extractor, questions, partial(_write, answers))
        return
    while (question := _read(questions, Question)) is not None:
        sandbox.limit_cpu(question.seconds)
        _write(answers, answer(function, extractor, question), question)


def _read(pipe: BinaryIO, kind: type[T]) -> T | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(pipe.read(LENGTH.unpack(head)[0]), type=kind)


def _write(pipe: BinaryIO, answered: ScoreAnswer, question: Question | None = None) -> None:
    pipe.write(frame(answered if question is None else msgspec.structs.replace(answered, nonce=question.nonce)))
    pipe.flush()


if __name__ == "__main__":
    serve(lambda wanted: load(wanted.function, workdir=Path(wanted.workdir), config=wanted.config, place=wanted.place))
