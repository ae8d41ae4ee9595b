import asyncio

import pytest

from asyncflow.net.eager import begin


async def test_what_does_not_wait_is_done_at_once():
    async def work(value):
        return value

    assert begin(work(1)) == 1


async def test_an_error_before_the_first_wait_is_raised_at_once():
    async def work():
        raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        begin(work())


async def test_what_waits_goes_on_as_a_task_through_results_and_errors():
    first, second = asyncio.Future(), asyncio.Future()
    seen = []

    async def work():
        seen.append("begun")
        seen.append(await first)
        try:
            await second
        except KeyError:
            seen.append("failed")
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        return len(seen)

    task = begin(work())
    assert seen == ["begun"]
    first.set_result("first")
    await asyncio.sleep(0)
    second.set_exception(KeyError())
    assert await task == 3
    assert seen == ["begun", "first", "failed"]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_cancelled_task_cancels_what_it_waits_for(begun):
    forever, ended = asyncio.Future(), []

    async def work():
        try:
            await forever
        finally:
            ended.append(True)

    task = begin(work())
    if begun:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    assert forever.cancelled() == begun


async def test_a_cancelled_task_may_still_answer():
    async def work():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "tidied"

    task = begin(work())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "tidied"
