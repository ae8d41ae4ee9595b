"""Answers that come later without a turn of the loop."""

import asyncio

import pytest

from asyncflow.net.later import Later


def test_who_was_added_is_told_at_once_and_once_whether_before_or_after():
    later, told = Later(), []
    later.add_done_callback(lambda done: told.append(("before", done.result())))
    assert not later.done()
    later.set_result(7)
    later.add_done_callback(lambda done: told.append(("after", done.result())))
    assert told == [("before", 7), ("after", 7)]
    assert not later.cancel()
    with pytest.raises(asyncio.InvalidStateError):
        later.set_result(8)


def test_an_error_is_raised_where_the_result_is_asked_for():
    later = Later()
    with pytest.raises(asyncio.InvalidStateError):
        later.result()
    later.set_exception(ValueError("no"))
    assert not later.cancelled()
    with pytest.raises(ValueError, match="no"):
        later.result()


def test_what_nobody_wants_is_cancelled_and_told_so():
    later, told = Later(), []
    later.add_done_callback(lambda done: told.append(done.cancelled()))
    assert later.cancel()
    assert told == [True]
    with pytest.raises(asyncio.CancelledError):
        later.result()


def test_one_that_fails_when_it_is_told_harms_nobody(caplog):
    later, told = Later(), []

    def fail(_done):
        raise RuntimeError("oh")

    later.add_done_callback(fail)
    later.add_done_callback(told.append)
    later.set_result(None)
    assert told == [later]
    assert "oh" in caplog.text


async def test_it_can_be_awaited_before_and_after_and_by_several():
    later = Later()
    waiting = [asyncio.create_task(_wait(later)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    later.set_result(5)
    assert await asyncio.gather(*waiting[1:]) == [5, 5]
    assert waiting[0].cancelled()
    assert await later == 5


async def _wait(later):
    return await later
