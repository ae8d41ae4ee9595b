"""Many deadlines with one timer."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.net.deadlines import Deadlines


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_those_that_were_not_dropped_are_called_once_in_order(wanted):
    async def run():
        loop, called = asyncio.get_running_loop(), []
        deadlines, began = Deadlines(), asyncio.get_running_loop().time()
        made = []
        for number, (after, _) in enumerate(wanted):
            when = began + after / 1000
            made.append(deadlines.add(when, lambda n=number, w=when: called.append((n, loop.time() >= w))))
        for deadline, (_, dropped) in zip(made, wanted, strict=True):
            if dropped:
                deadlines.drop(deadline)
                deadlines.drop(deadline)
        end = asyncio.Event()
        deadlines.add(began + 0.006, end.set)
        await end.wait()
        for deadline in made:
            deadlines.drop(deadline)
        return called

    called = asyncio.run(run())
    kept = [(after, number) for number, (after, dropped) in enumerate(wanted) if not dropped]
    assert called == [(number, True) for _, number in sorted(kept)]


async def test_one_that_fails_keeps_no_other_from_its_time(caplog):
    deadlines, now, end = Deadlines(), asyncio.get_running_loop().time(), asyncio.Event()

    def fail():
        deadlines.add(now, end.set)
        raise RuntimeError("oh")

    deadlines.add(now, fail)
    await end.wait()
    assert "oh" in caplog.text


async def test_none_is_called_after_the_close():
    deadlines, called = Deadlines(), []
    dropped = deadlines.add(asyncio.get_running_loop().time(), lambda: called.append(1))
    deadlines.close()
    deadlines.drop(dropped)
    await asyncio.sleep(0.01)
    assert called == []


async def test_memory_is_that_of_those_still_to_come():
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.drop(deadlines.add(1e9 + number, int))
    assert len(deadlines._heap) < 200
    deadlines.close()
