"""Behaviours 13 to 21: when a row is ready, who gets it, and what has been done."""

import asyncio
import time

import numpy as np
import pytest

from asyncflow.errors import Refused


async def claimed(partition, task, rows=100, *, timeout=0.2):
    return [row.row for row in await partition.claim(task, rows, timeout=timeout)]


async def grade(partition, leased):
    assert all(await partition.complete(leased, {"score": np.zeros(len(leased))}))


async def test_13_a_row_is_ready_when_all_columns_that_the_task_names_are_there(scores):
    await scores.declare("both", ["text", "score"])
    rows = await scores.put({"text": ["a", "b"]})
    assert await claimed(scores, "both", timeout=0) == []
    waiting = asyncio.create_task(claimed(scores, "both", timeout=10))
    await scores.write(rows[1:], {"score": np.array([1.0])})
    assert await waiting == rows[1:]


async def test_14_production_is_told_by_column(scores):
    rows = await scores.put({"a": np.zeros(4), "b": np.zeros(4)})
    half, whole = ["a", "b"], ["a", "b", "c", "d"]
    assert (await scores.produced(half)).all
    assert not (await scores.produced(whole)).all
    await scores.write(rows[:3], {"c": np.zeros(3), "d": np.zeros(3)})
    told = await scores.produced(whole)
    assert (told.rows, told.done, told.all) == (4, 3, False)
    await scores.write(rows[3:], {"c": np.zeros(1), "d": np.zeros(1)})
    assert (await scores.produced(whole)).all


async def test_15_what_one_task_gets_another_gets_too(scores):
    for task in ("grade", "count"):
        await scores.declare(task, ["text"])
    rows = await scores.put({"text": ["a", "b", "c"]})
    assert await claimed(scores, "grade") == rows
    assert await claimed(scores, "count") == rows


async def test_16_a_task_gets_a_row_once_and_its_consumers_different_ones(two_units, scores):
    await scores.declare("grade", ["text"])
    rows = await scores.put({"text": [str(n) for n in range(40)]})
    workers = [two_units.partition("scores", worker=f"w{n}") for n in range(4)]

    async def work(partition):
        mine = []
        while part := await partition.claim("grade", 3, timeout=0.2):
            mine += [row.row for row in part]
            assert all(await partition.complete(part))
        return mine

    shares = await asyncio.gather(*map(work, workers))
    assert sorted(row for share in shares for row in share) == sorted(rows)
    assert await claimed(scores, "grade", timeout=0) == []


async def test_17_a_claim_that_finds_nothing_waits_or_gives_nothing_and_takes_nothing(scores):
    await scores.declare("pairs", ["text"], groups=True)
    assert await claimed(scores, "pairs", timeout=0) == []
    rows = await scores.put({"text": ["a", "b"]}, group_size=2)
    assert (await scores.peek("pairs")).ready == [True, True]
    assert await claimed(scores, "pairs", timeout=0) == rows


async def test_17_half_a_group_that_is_ready_is_waited_for_and_not_taken(scores):
    await scores.declare("pairs", ["text", "score"], groups=True)
    await scores.declare("each", ["text", "score"])
    rows = await scores.put({"text": ["a", "b"]}, group_size=2)
    await scores.write(rows[:1], {"score": np.zeros(1)})
    for timeout in (0, 0.3):
        began = time.monotonic()
        assert await scores.claim("pairs", 2, timeout=timeout) == []
        assert timeout <= time.monotonic() - began < timeout + 2
    told = await scores.consumed("pairs")
    assert (told.leased, told.done) == (0, 0)
    sight = await scores.peek("pairs")
    assert (sight.leased, sight.attempts, sight.lacks) == ([False] * 2, [0] * 2, [[], ["score"]])
    assert await claimed(scores, "each", timeout=0) == rows[:1]
    await scores.write(rows[1:], {"score": np.zeros(1)})
    whole = await scores.claim("pairs", 2, timeout=0)
    assert [(row.row, row.attempt) for row in whole] == [(row, 0) for row in rows]


async def test_17_fewer_rows_than_a_claim_wants_at_least_are_waited_for_and_not_taken(two_units, scores):
    await scores.declare("grade", ["text"])
    rows = await scores.put({"text": ["a"]})
    claim = {"partition": "scores", "task": "grade", "max_rows": 4, "min_rows": 2}
    for timeout in (0, 0.3):
        began = time.monotonic()
        assert not (await two_units.client.claim(**claim, timeout=timeout)).rows
        assert timeout <= time.monotonic() - began < timeout + 2
    assert (await scores.consumed("grade")).leased == 0
    rows += await scores.put({"text": ["b"]})
    assert sorted(row.row for row in (await two_units.client.claim(**claim, timeout=5)).rows) == sorted(rows)


async def test_18_all_is_consumed_after_the_last_row_and_never_before(scores):
    await scores.declare("grade", ["text"])
    assert not (await scores.consumed("grade")).all
    rows = await scores.put({"text": ["a", "b", "c"]})
    for _ in rows:
        assert not (await scores.consumed("grade")).all
        leased = await scores.claim("grade", 1, timeout=5)
        told = await scores.consumed("grade")
        assert (told.leased, told.all) == (1, False)
        assert all(await scores.complete(leased))
    assert (await scores.consumed("grade")).all


async def test_19_with_a_declared_total_nothing_is_all_before_that_many_rows_exist(two_units, scores):
    await scores.declare("grade", ["text"])
    await scores.expect(3)
    rows = await scores.put({"text": ["a", "b"]})
    assert all(await scores.complete(await scores.claim("grade", 2, timeout=5)))
    assert not (await scores.produced(["text"])).all
    assert not (await scores.consumed("grade")).all
    await two_units.restart_controller()
    assert (await scores.produced(["text"])).expected == 3
    await scores.put({"text": ["c"]})
    assert (await scores.produced(["text"])).all
    assert not (await scores.consumed("grade")).all
    assert all(await scores.complete(await scores.claim("grade", 1, timeout=5)))
    assert (await scores.consumed("grade")).all
    await scores.clear(rows)
    assert (await scores.consumed("grade")).all


async def test_20_a_reset_task_gets_its_rows_again_and_no_other_does(two_units, scores):
    for task in ("grade", "count"):
        await scores.declare(task, ["text"])
    rows = await scores.put({"text": ["a", "b"]})
    for task in ("grade", "count"):
        assert all(await scores.complete(await scores.claim(task, 2, timeout=5)))
    assert await scores.reset("grade") == 2
    assert (await scores.consumed("count")).all
    assert await claimed(scores, "count", timeout=0) == []
    await two_units.restart_controller()
    late = await scores.claim("grade", 2, timeout=5)
    assert [row.row for row in late] == rows
    assert await scores.reset() == 4
    assert await scores.complete(late) == [False, False]
    assert sorted(await claimed(scores, "grade")) == sorted(await claimed(scores, "count")) == sorted(rows)


async def test_20_the_audit_counts_what_was_reset_and_seen(two_units, scores):
    await scores.declare("grade", ["text"])
    await scores.put({"text": ["a", "b"]})
    assert all(await scores.complete(await scores.claim("grade", 2, timeout=5)))
    await scores.reset("grade")
    await scores.peek("grade")
    for _ in range(2):
        report = await two_units.client.audit(timeout=10)
        assert (report.resets, report.peeked, report.ok) == (2, 2, True)
        await two_units.restart_controller()


async def test_20_what_cannot_be_reset_is_refused(scores):
    with pytest.raises(Refused, match="there is no task 'nobody'"):
        await scores.reset("nobody")


async def test_21_a_look_shows_rows_whatever_became_of_them_and_says_which_are_ready(scores):
    await scores.declare("grade", ["text"])
    rows = await scores.put({"text": ["done", "held", "ready"]})
    rows += await scores.put({"note": ["not ready"]}, keys=["k"])
    assert all(await scores.complete(await scores.claim("grade", 1, timeout=5)))
    held = await scores.claim("grade", 1, timeout=5)
    for _ in range(2):
        sight = await scores.peek("grade")
        assert sight.rows == rows
        assert sight.ready == [False, False, True, False]
        assert sight.leased == [False, True, False, False]
        assert sight.done == [True, False, False, False]
        assert sight.keys == ["", "", "", "k"]
        assert sight.sizes["text"][3] == -1
    assert (await scores.peek("grade", rows=[rows[2], rows[0]])).ready == [True, False]
    assert (await scores.get(rows[:3], ["text"]))["text"] == ["done", "held", "ready"]
    assert all(await scores.complete(held))
    assert await claimed(scores, "grade") == rows[2:3]
