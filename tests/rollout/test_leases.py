"""Rows on lease are fetched, renewed, saved, delivered or given back, whatever the queue does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from asyncflow.data.base import Prompt
from asyncflow.errors import AsyncFlowError, PeerLost, Refused
from asyncflow.flow.instance import Instance
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta
from asyncflow.rewards.wire import RewardResult
from asyncflow.rollout.engines.base import Completion
from asyncflow.rollout.job import RESPONSE, Job, RolloutSettings, SampleOutcome
from asyncflow.rollout.leases import Delivery, InFlightTable
from asyncflow.rpc.columns import Jagged

SETTINGS = RolloutSettings(temperature=1.0, max_tokens=8, stop_ids=(1,), seed=7, lease_s=30.0, call_s=10.0)
BEGUN = dict.fromkeys(RESPONSE, 8)


def leased(
    serial: int, sample: int = 0, *, unit: int = 0, max_version: int = 9, there: Iterable[str] = ()
) -> LeasedRow:
    meta = RowMeta(partition="train", serial=serial, sample=sample, step=1, max_version=max_version)
    number = 10 * serial + sample
    return LeasedRow(
        row=number, meta=meta, attempt=0, lease=f"lease {number}", until=30.0, unit=unit, bytes=dict.fromkeys(there, 8)
    )


def response(length: int, *, finish: str = "aborted", first: int = 20) -> Completion:
    return Completion(
        ids=np.arange(first, first + length, dtype=np.int32),
        logprobs=np.full(length, -1.0, np.float32),
        versions=np.zeros(length, np.int64),
        finish=finish,
    )


def ids_of(columns: dict[str, Jagged]) -> list[list[int]]:
    return [columns["response_ids"].row(index).tolist() for index in range(len(columns["response_ids"]))]


class Queue:
    """A queue that takes everything, unless ``fails`` gives the error of a call. given_back: rows, reason, and ids."""

    def __init__(self) -> None:
        self.fails: Callable[[str, Sequence[str]], AsyncFlowError | None] = lambda call, names: None
        self.refuses: set[int] = set()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.fetched: list[tuple[list[int], tuple[str, ...]]] = []
        self.given_back: list[tuple[list[int], str, list[list[int]] | None]] = []
        self.saved: list[dict[int, list[int]]] = []
        self.renewed: list[list[str]] = []
        self.over: set[str] = set()

    async def _answer(self, call: str, names: Sequence[str] = ()) -> None:
        await self.goes_on.wait()
        if error := self.fails(call, names):
            raise error

    async def fetch(self, rows: Sequence[LeasedRow], names: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
        await self._answer("fetch", names)
        self.fetched.append(([row.row for row in rows], tuple(names)))
        task = np.frombuffer(Prompt(question="why?").packed(), np.uint8)
        cells = {
            "prompt_ids": Jagged.from_rows([[row.row, 2] for row in rows], np.int32),
            "task": Jagged.from_rows([task for _ in rows], np.uint8),
            "response_ids": Jagged.from_rows([[row.row, 5, 6] for row in rows], np.int32),
            "logprobs": Jagged.from_rows([[-1.0] * 3 for _ in rows], np.float32),
            "versions": Jagged.from_rows([[0] * 3 for _ in rows], np.int64),
        }
        return {name: cells[name] for name in names}

    async def give_back(
        self, rows: Sequence[LeasedRow], *, reason: str, timeout: float, columns: dict[str, Jagged] | None = None
    ) -> None:
        await self._answer("give_back", list(columns or {}))
        self.given_back.append(([row.row for row in rows], reason, None if columns is None else ids_of(columns)))

    async def save(self, rows: Sequence[LeasedRow], columns: dict[str, Jagged], *, timeout: float) -> list[bool]:
        await self._answer("save")
        self.saved.append(dict(zip([row.row for row in rows], ids_of(columns), strict=True)))
        return [row.row not in self.refuses for row in rows]

    async def renew(self, leases: list[str], *, timeout: float) -> list[str]:
        self.renewed.append(leases)
        return [lease for lease in leases if lease not in self.over]


class Table(SimpleNamespace):
    """A table of leased rows at a queue, and what it told its worker."""

    def __init__(self) -> None:
        self.queue, self.holding, self.tasks = Queue(), [], set()
        self.changed = asyncio.Event()
        self.instance = Instance(swap_at="sequence", slots=8)
        self.instance.loaded(Version(0, 3))
        self.unfinished: dict[tuple[str, tuple[int, int]], Completion] = {}
        self.trusted: Callable[[Completion], Completion] = lambda so_far: so_far
        self.rows = InFlightTable(
            queue=self.queue,  # type: ignore[arg-type]
            instance=self.instance,
            settings=SETTINGS,
            changed=self.changed.set,
            holding=self.holding.append,
            spawn=self.spawn,
            unfinished=lambda: self.unfinished,
            trusted=lambda so_far: self.trusted(so_far),
        )

    def spawn(self, work) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def take(self, *rows: LeasedRow) -> list[Job]:
        """Take rows, and wait until all that follows from it is done."""
        self.rows.take(rows)
        jobs = {job.row.row: job for job in self.rows}
        await asyncio.gather(*self.tasks)
        return [jobs[row.row] for row in rows]


@pytest.fixture
async def table() -> Table:
    return Table()


async def passes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_rows_may_begin_once_their_prompts_are_fetched_from_each_unit_at_once(table):
    table.queue.goes_on.clear()
    taking = asyncio.create_task(table.take(leased(1, 0), leased(1, 1, unit=2), leased(2)))
    await passes(lambda: len(table.rows) == 3 and table.changed.is_set())
    table.changed.clear()
    assert not table.instance.admit(), "their prompts are not here yet"
    table.queue.goes_on.set()
    first, second, other = await taking
    assert sorted(table.queue.fetched) == [([10, 20], ("prompt_ids", "task")), ([11], ("prompt_ids", "task"))]
    assert [(job.prompt_ids, job.prompt) for job in (first, second)] == [
        ((10, 2), Prompt(question="why?")),
        ((11, 2), Prompt(question="why?")),
    ]
    assert table.changed.is_set()
    assert {work.id for work in table.instance.admit()} == {first, second, other}
    assert first.group is second.group
    assert first.group is not other.group
    assert table.holding == [3]


async def test_rows_whose_prompts_cannot_be_had_are_given_back(table):
    table.queue.fails = lambda call, names: PeerLost("the unit is unreachable") if call == "fetch" else None
    (job,) = await table.take(leased(1))
    assert table.queue.given_back == [([10], "the prompt cannot be fetched", None)]
    assert (len(table.rows), table.holding, job.gone, table.instance.held) == (0, [1, 0], True, 0)


async def test_rows_that_need_a_version_that_will_not_come_are_given_back_at_once(table):
    await table.take(leased(1, max_version=2), leased(2))
    assert table.queue.given_back == [([10], "it needs another version", None)]
    assert [rows for rows, _ in table.queue.fetched] == [[20]]
    assert [job.row.row for job in table.rows] == [20]


@pytest.mark.parametrize("there", [True, False])
async def test_what_an_earlier_holder_left_is_gone_on_behind_or_made_again(table, there):
    lost = PeerLost("the response is gone")
    table.queue.fails = lambda call, names: lost if names == RESPONSE and not there else None
    begun, fresh, judged = await table.take(
        leased(1, there=RESPONSE), leased(2), leased(3, there=(*RESPONSE, "reward"))
    )
    assert [job.partial.ids.tolist() for job in (begun, fresh, judged)] == [[10, 5, 6] if there else [], [], []]
    assert [rows for rows, names in table.queue.fetched if names == RESPONSE] == ([[10]] if there else [])
    assert {work.id for work in table.instance.admit()} == {begun, fresh, judged}


async def test_a_row_that_went_to_another_is_forgotten_with_its_sequence(table, monkeypatch):
    mine, other = await table.take(leased(1), leased(1, 1))
    table.instance.admit()
    other.task = asyncio.create_task(asyncio.Event().wait())
    mine.group.scored = asyncio.get_running_loop().create_future()
    table.queue.over = {"lease 11"}
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))
    renewing = asyncio.create_task(table.rows.renew())
    async with asyncio.timeout(20):
        while len(table.queue.renewed) < 2:
            await sleep(0)
    renewing.cancel()
    assert table.queue.renewed[:2] == [["lease 10", "lease 11"], ["lease 10"]]
    await asyncio.wait([other.task], timeout=20)
    assert other.task.cancelled()
    assert (table.rows.lost, list(table.rows), other.gone, mine.gone) == (1, [mine], True, False)
    assert mine.group.scored.result() is None, "the group is not waited for any more"
    assert table.instance.running == 1
    assert not table.queue.given_back


async def test_rows_are_given_back_with_what_is_new_of_their_responses(table):
    grown, saved, empty, kept = await table.take(leased(1), leased(2), leased(3), leased(4))
    saved.saved_tokens = 2
    there = {grown: response(3), saved: response(2), kept: response(1)}
    await table.rows.give_back([grown, saved, empty], reason="it leaves", partial=there)
    assert table.queue.given_back == [
        ([20, 30], "it leaves", None),
        ([10], "it leaves", [[20, 21, 22]]),
    ]
    assert list(table.rows) == [kept]
    await table.rows.give_back([grown], reason="again")
    assert len(table.queue.given_back) == 2, "each row is given back once"


async def test_a_beginning_that_is_not_taken_keeps_no_row_from_others(table):
    jobs = await table.take(leased(1), leased(2, unit=1))
    table.queue.fails = lambda call, names: PeerLost("the unit is unreachable") if names else None
    await table.rows.give_back(jobs, reason="it leaves", partial={job: response(2) for job in jobs})
    assert sorted(table.queue.given_back) == [([10], "it leaves", None), ([20], "it leaves", None)]


async def test_a_row_that_cannot_be_given_back_waits_for_its_lease_to_end(table):
    (job,) = await table.take(leased(1))
    table.queue.fails = lambda call, names: PeerLost("the controller is unreachable")
    job.task = asyncio.current_task()
    table.changed.clear()
    await table.rows.give_back([job], reason="it leaves")
    assert not job.task.cancelling(), "who gives its own row back goes on"
    assert table.changed.is_set(), "there is room for another row"
    assert (job.gone, len(table.rows)) == (True, 0)


async def test_rows_are_returned_also_where_giving_back_is_cancelled(table):
    (job,) = await table.take(leased(1))
    table.queue.goes_on.clear()
    giving = asyncio.create_task(table.rows.give_back([job], reason="it leaves"))
    await passes(lambda: job.gone)
    giving.cancel()
    await asyncio.wait([giving])
    returned = asyncio.create_task(table.rows.returned())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not returned.done()
    table.queue.goes_on.set()
    await asyncio.wait([returned], timeout=20)
    assert table.queue.given_back == [([10], "it leaves", None)]


async def test_what_others_can_go_on_behind_is_all_but_the_last_token_of_what_has_ended(table):
    runs, ended, turned, waits = await table.take(leased(1), leased(2), leased(3), leased(4))
    table.unfinished = {("train", runs.row.meta.key): response(5)}
    ended.response, turned.turn = response(4, finish="stop"), response(2)
    assert {job: len(so_far) for job, so_far in table.rows.partial_responses().items()} == {
        runs: 5,
        ended: 3,
        turned: 2,
    }
    runs.saved_tokens, turned.saved_tokens = 4, 3
    assert table.rows.unsaved() == 1 + 3
    newer = np.array([0, 0, 0, Version(0, 1).packed, 0])
    table.unfinished = {("train", runs.row.meta.key): replace(response(5), versions=newer)}
    table.trusted = lambda so_far: so_far.before(Version(0, 1))
    assert [table.rows.partial_responses()[job].ids.tolist() for job in (runs, ended)] == [[20, 21, 22]] * 2
    assert table.rows.backlog() == 1
    assert not waits.gone


async def test_long_responses_are_saved_again_and_again_as_far_as_they_are_new(table, monkeypatch):
    long, refused, short = await table.take(leased(1), leased(2), leased(3))
    looks, slept, sleep = asyncio.Semaphore(0), [], asyncio.sleep

    async def pass_by(seconds: float) -> None:
        slept.append(seconds)
        await looks.acquire()

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    saving = asyncio.create_task(table.rows.save())

    async def look(**lengths: int) -> list[dict[int, list[int]]]:
        jobs = {"long": long, "refused": refused, "short": short}
        table.unfinished = {("train", jobs[name].row.meta.key): response(size) for name, size in lengths.items()}
        table.queue.saved.clear()
        looks.release()
        for _ in range(5):
            await sleep(0)
        await asyncio.gather(*table.tasks)
        return list(table.queue.saved)

    table.queue.refuses = {20}
    assert await look(long=1, refused=2) == [], "they may soon be delivered"
    assert await look(long=2, refused=2, short=1) == [{10: [20, 21], 20: [20, 21]}]
    assert (long.saved_tokens, refused.saved_tokens, short.saved_tokens) == (2, 0, 0)
    assert await look(long=2) == [], "nothing of it is new"
    table.queue.fails = lambda call, names: PeerLost("the unit is unreachable")
    assert await look(long=3) == []
    assert long.saved_tokens == 2
    table.queue.fails = lambda call, names: None
    assert await look(long=4) == [{10: [20, 21, 22, 23]}]
    assert set(slept) == {SETTINGS.lease_s / 3}
    saving.cancel()
    await asyncio.wait([saving])


class Writes:
    """A queue at which each write of samples waits for an answer: what became of each, or an error."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.content: list[tuple[list[list[int]], list[float], list[str]]] = []
        self.answers: list[asyncio.Future[list[bool]]] = []

    async def complete(self, rows, columns, *, tags, timeout) -> list[bool]:
        self.written.append([row.row for row in rows])
        rewards = [float(columns["reward"].row(index)[0]) for index in range(len(rows))]
        self.content.append((ids_of(columns), rewards, [tag["finish"] for tag in tags]))
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


class Delivering(SimpleNamespace):
    def __init__(self) -> None:
        self.queue, self.settled, self.ended = Writes(), [], []
        self.delivery = Delivery(
            self.queue,  # type: ignore[arg-type]
            settled=lambda outcome, taken: self.settled.append((outcome.job.row.row, taken)),
            ended=self.ended.append,
            settings=SETTINGS,
        )

    def put(self, row: LeasedRow, *, reward: float = 1.0) -> Job:
        job, made = Job(row=row), response(2, finish="stop", first=row.row)
        self.delivery.put(SampleOutcome(job=job, completion=made, reward=RewardResult(value=reward)))
        return job

    async def writes(self, count: int) -> None:
        await passes(lambda: len(self.queue.answers) >= count)


@pytest.fixture
async def delivering() -> Delivering:
    return Delivering()


async def test_one_write_at_a_time_goes_to_a_unit_with_all_that_has_piled_up(delivering):
    delivering.put(leased(1))
    await delivering.writes(1)
    delivering.put(leased(2), reward=0.5)
    delivering.put(leased(3), reward=0.25)
    delivering.put(leased(4, unit=1))
    await delivering.writes(2)
    assert delivering.queue.written == [[10], [40]], "another unit is not waited for"
    delivering.queue.answers[1].set_result([True])
    delivering.queue.answers[0].set_result([True])
    await delivering.writes(3)
    assert delivering.queue.written[2:] == [[20, 30]]
    assert delivering.queue.content[2] == ([[20, 21], [30, 31]], [0.5, 0.25], ["stop", "stop"])
    delivering.queue.answers[2].set_result([False, True])
    await passes(lambda: len(delivering.ended) == 2)
    assert sorted(delivering.settled) == [(10, True), (20, False), (30, True), (40, True)]
    delivering.put(leased(5))
    await delivering.writes(4)
    assert delivering.queue.written[3] == [50]


async def test_samples_that_come_all_at_once_are_written_in_parts(delivering):
    for serial in range(300):
        delivering.put(leased(serial))
    for number in range(2):
        await delivering.writes(number + 1)
        delivering.queue.answers[number].set_result([True] * len(delivering.queue.written[number]))
    await passes(lambda: len(delivering.settled) == 300)
    assert [len(rows) for rows in delivering.queue.written] == [256, 44]
    assert [row for row, _ in delivering.settled] == [10 * serial for serial in range(300)]


async def test_samples_that_are_refused_together_are_settled_as_not_taken(delivering):
    delivering.put(leased(1))
    delivering.put(leased(2))
    await delivering.writes(1)
    delivering.queue.answers[0].set_exception(Refused("the step is over"))
    await passes(lambda: len(delivering.settled) == 2)
    assert delivering.settled == [(10, False), (20, False)]


async def test_samples_are_written_again_until_the_unit_is_back_but_not_those_whose_lease_is_lost(
    delivering, monkeypatch
):
    sleep, slept = asyncio.sleep, []
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0, slept.append(seconds)))
    lost = delivering.put(leased(1))
    delivering.put(leased(2))
    await delivering.writes(1)
    lost.gone = True
    delivering.queue.answers[0].set_exception(PeerLost("the unit is unreachable"))
    await delivering.writes(2)
    delivering.queue.answers[1].set_result([True])
    await passes(lambda: bool(delivering.ended))
    assert delivering.queue.written == [[10, 20], [20]]
    assert max(slept) > 0, "it waits before the next attempt"
    assert delivering.settled == [(20, True)]


async def test_what_is_undelivered_is_waited_for_and_then_given_up(delivering):
    await delivering.delivery.flush(timeout=20)
    delivering.put(leased(1))
    delivering.put(leased(2, unit=1))
    await delivering.writes(2)
    delivering.queue.answers[0].set_result([True])
    await delivering.delivery.flush(timeout=0.01)
    assert delivering.settled == [(10, True)]
    assert [task.cancelled() for task in delivering.ended] == [False, True]


async def test_delivery_that_is_done_in_time_is_not_cut_short(delivering):
    delivering.put(leased(1))
    flushing = asyncio.create_task(delivering.delivery.flush(timeout=20))
    await delivering.writes(1)
    assert not flushing.done()
    delivering.queue.answers[0].set_result([True])
    await flushing
    assert delivering.settled == [(10, True)]
