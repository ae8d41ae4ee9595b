"""Concurrent calls of an ``async`` function in a reward process, each with a deadline of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from asyncflow.rewards import sandbox
from asyncflow.rewards.calling import Extractor, RewardFunction, failed, failed_with_traceback
from asyncflow.rewards.wire import LENGTH, Question, ScoreAnswer

Reply = Callable[[ScoreAnswer, Question], None]


def serve_concurrently(function: RewardFunction, extractor: Extractor, questions: BinaryIO, reply: Reply) -> None:
    """Answer questions until their pipe ends."""
    asyncio.run(_serve(function, extractor, questions, reply))


async def _serve(function: RewardFunction, extractor: Extractor, questions: BinaryIO, reply: Reply) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
    calls: set[asyncio.Task[None]] = set()

    async def serve(question: Question) -> None:
        reply(await _answer_in_time(function, extractor, question), question)

    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            question = msgspec.msgpack.decode(await reader.readexactly(length), type=Question)
        except asyncio.IncompleteReadError:
            return
        sandbox.limit_cpu(question.seconds)
        call = asyncio.create_task(serve(question))
        calls.add(call)
        call.add_done_callback(calls.discard)


async def _answer_in_time(function: RewardFunction, extractor: Extractor, question: Question) -> ScoreAnswer:
    """Await the function until the question's deadline, and return its result or its exception as an answer."""
    limit = asyncio.timeout(question.seconds)
    try:
        async with limit:
            returned = await function.call(**function.arguments(question.examples, extractor=extractor))
        return function.judge(returned, samples=len(question.examples))
    except (Exception, asyncio.CancelledError):  # noqa: BLE001  the exception of a user's function is its result
        if limit.expired():
            return failed("timeout", f"the call did not end within {question.seconds:g} s")
        return failed_with_traceback()
