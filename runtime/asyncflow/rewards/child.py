"""A reward process: ``python -P -m asyncflow.rewards.child``. It reads from standard input what to load and score.

Invariants: the process restricts itself before it loads untrusted code. The function runs in the main thread, and
its output never reaches the pipe. An ``async`` function runs all requested calls concurrently, each with a deadline of
its own; any other function runs one call at a time. The process ends when its parent ends (PR_SET_PDEATHSIG, even while
the function runs) or when the pipe ends. This module never imports torch.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from asyncflow.errors import AsyncFlowError
from asyncflow.process import die_with_parent
from asyncflow.rewards import sandbox
from asyncflow.rewards.calling import Extractor, RewardFunction, end_of, failed, failed_with_traceback
from asyncflow.rewards.functions import EXTRACTORS, load
from asyncflow.rewards.wire import LENGTH, Load, Question, ScoreAnswer, frame

T = TypeVar("T", bound=msgspec.Struct)

_COMPUTE_FACTOR: Final = 2.0
"""CPU time of a call as a multiple of its deadline, which it may exceed with several threads."""


def answer(function: RewardFunction, extractor: Extractor, question: Question) -> ScoreAnswer:
    """Call the function, and return its result or its exception as an answer."""
    try:
        returned = function.call(**function.arguments(question.examples, extractor=extractor))
        return function.judge(returned, samples=len(question.examples))
    except Exception:  # noqa: BLE001  the exception of a user's function is the result of the call
        return failed_with_traceback()


async def answer_in_time(function: RewardFunction, extractor: Extractor, question: Question) -> ScoreAnswer:
    """Await the function until the question's deadline, and return its result or its exception as an answer."""
    limit = asyncio.timeout(question.seconds)
    try:
        async with limit:
            returned = await function.call(**function.arguments(question.examples, extractor=extractor))
        return function.judge(returned, samples=len(question.examples))
    except (Exception, asyncio.CancelledError):  # noqa: BLE001  as above
        if limit.expired():
            return failed("timeout", f"the call did not end within {question.seconds:g} s")
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
    except Exception as error:  # noqa: BLE001  a user's module may raise anything; the pool reports it
        traceback.print_exc()
        why = _cause(error, workdir=request.workdir)
        _write(answers, ScoreAnswer(nonce=request.nonce, failure="raised", detail=end_of(why)))
        return
    ready = ScoreAnswer(
        nonce=request.nonce, takes=function.takes, concurrent=function.concurrent, unrestricted=unrestricted
    )
    _write(answers, ready)
    extractor = EXTRACTORS[request.extractor]
    if function.concurrent:
        asyncio.run(_serve_concurrently(function, extractor, questions, answers))
        return
    while (question := _read(questions, Question)) is not None:
        sandbox.limit_cpu(_COMPUTE_FACTOR * question.seconds)
        _write(answers, answer(function, extractor, question), nonce=question.nonce)


def _cause(error: Exception, *, workdir: str) -> str:
    """Return the error in one line, with the last place of its traceback that is in a file of the job's folder."""
    if isinstance(error, AsyncFlowError):
        return str(error)
    (what,) = traceback.format_exception_only(error)[-1:]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    own = [(Path(file), line) for file, line in places if Path(file).is_relative_to(workdir)]
    return f"{what.strip()} ({own[-1][0].relative_to(workdir)}:{own[-1][1]})" if own else what.strip()


async def _serve_concurrently(
    function: RewardFunction, extractor: Extractor, questions: BinaryIO, answers: BinaryIO
) -> None:
    """Answer questions concurrently until the pipe ends."""
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
    serve(lambda wanted: load(wanted.function, workdir=Path(wanted.workdir), config=wanted.config, place=wanted.place))
