"""A reward process: ``python -P -m asyncflow.rewards.child``; its standard input says what to load and to score.

Invariants: it has restricted itself before it loads anybody's code; the function runs in the main thread and nothing
that it prints reaches the pipe; a function that is ``async`` has as many calls under way as are asked, each with a
deadline of its own, any other one at a time; the process ends when its parent does (PR_SET_PDEATHSIG, also while the
function runs) or when the pipe ends; it never imports torch itself.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from asyncflow.process import die_with_parent
from asyncflow.rewards import sandbox
from asyncflow.rewards.calling import Extractor, RewardFunction, failed, failed_with_traceback, said
from asyncflow.rewards.functions import EXTRACTORS, load
from asyncflow.rewards.wire import LENGTH, Load, Question, ScoreAnswer, frame

T = TypeVar("T", bound=msgspec.Struct)

_COMPUTE_FACTOR: Final = 2.0
"""A call may compute for so many times the seconds that it may take: by several threads, say."""


def answer(function: RewardFunction, extractor: Extractor, question: Question) -> ScoreAnswer:
    """Call the function; whatever it raises or returns becomes an answer."""
    try:
        returned = function.call(**function.arguments(question.examples, extractor=extractor))
        return function.judge(returned, samples=len(question.examples))
    except Exception:  # noqa: BLE001  somebody else's code: what it raises is the outcome
        return failed_with_traceback()


async def answer_in_time(function: RewardFunction, extractor: Extractor, question: Question) -> ScoreAnswer:
    """Await the function for as long as the question says; whatever it raises or returns becomes an answer."""
    limit = asyncio.timeout(question.seconds)
    try:
        async with limit:
            returned = await function.call(**function.arguments(question.examples, extractor=extractor))
        return function.judge(returned, samples=len(question.examples))
    except (Exception, asyncio.CancelledError):  # noqa: BLE001  as above
        if limit.expired():
            return failed("timeout", f"a reward did not come in {question.seconds:g} s")
        return failed_with_traceback()


def serve(loaded: Callable[[Load], RewardFunction]) -> None:
    """Run the process. loaded: imports the function that it is told."""
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
        function = loaded(told)
    except Exception as error:  # noqa: BLE001  importing somebody else's code: the pool reports it
        traceback.print_exc()
        (why,) = traceback.format_exception_only(error)[-1:]
        _write(answers, ScoreAnswer(nonce=told.nonce, failure="raised", detail=said(why.strip())))
        return
    ready = ScoreAnswer(
        nonce=told.nonce, takes=function.takes, concurrent=function.concurrent, unrestricted=unrestricted
    )
    _write(answers, ready)
    extractor = EXTRACTORS[told.extractor]
    if function.concurrent:
        asyncio.run(_serve_concurrently(function, extractor, questions, answers))
        return
    while (question := _read(questions, Question)) is not None:
        sandbox.limit_cpu(_COMPUTE_FACTOR * question.seconds)
        _write(answers, answer(function, extractor, question), nonce=question.nonce)


async def _serve_concurrently(
    function: RewardFunction, extractor: Extractor, questions: BinaryIO, answers: BinaryIO
) -> None:
    """Answer questions side by side until the pipe ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
    calls: set[asyncio.Task[None]] = set()

    async def serve(question: Question) -> None:
        _write(answers, await answer_in_time(function, extractor, question), nonce=question.nonce)

    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            question = msgspec.msgpack.decode(await reader.readexactly(length), type=Question)
        except asyncio.IncompleteReadError:
            return
        sandbox.limit_cpu(_COMPUTE_FACTOR * question.seconds)
        call = asyncio.create_task(serve(question))
        calls.add(call)
        call.add_done_callback(calls.discard)


def _read(pipe: BinaryIO, kind: type[T]) -> T | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(pipe.read(LENGTH.unpack(head)[0]), type=kind)


def _write(pipe: BinaryIO, answered: ScoreAnswer, *, nonce: bytes | None = None) -> None:
    pipe.write(frame(answered if nonce is None else msgspec.structs.replace(answered, nonce=nonce)))
    pipe.flush()


if __name__ == "__main__":
    serve(lambda told: load(told.function, workdir=Path(told.workdir), config=told.config, place=told.place))
