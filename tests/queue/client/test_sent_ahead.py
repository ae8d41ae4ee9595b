"""Rows that waiting claims get are sent to who claimed them, from threads: controller and units on sockets."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncflow.errors import StaleHandle
from asyncflow.net.arena.unix import SHARED_MEMORY_ENV
from asyncflow.net.frames import Jagged
from asyncflow.net.keys import Keys
from asyncflow.net.rpc.blocking_link import BlockingLink
from asyncflow.queue.client.fresh import FRESH_S, Fresh
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.protocol.unit_calls import FetchRows

sys.path.insert(0, str(Path(__file__).parent))
from test_blocking import P, cluster, column, first_of


@pytest.fixture
def asked(monkeypatch):
    """The methods that clients call, in order."""
    methods, send = [], BlockingLink.send

    def listen(link, call, method, *words, **options):
        methods.append(method)
        send(link, call, method, *words, **options)

    monkeypatch.setattr(BlockingLink, "send", listen)
    return methods


def big(values):
    """Give rows of 100 KB, whose first item is the value."""
    return Jagged.from_rows([[value] * 12_500 for value in values], "int64")


class Pair:
    """Who puts, and who waits for it in a thread of its own with a client of its own."""

    def __init__(self, made, pool):
        self.made, self.pool = made, pool
        self.putter, self.taker = made.connect("putter"), made.connect("taker")

    def next(self, *puts, task="t", before=lambda: None, **options):
        """Have a claim wait; put while it does, after ``before``; give the lot."""
        options = {"max_rows": 8, "columns": ["x"], "timeout": 30} | options
        waiting = self.pool.submit(lambda: self.taker.claim_lot(partition=P, task=task, **options))
        while not self.putter.stats(timeout=10).parked:
            assert not waiting.done()
        before()
        for values in puts:
            self.putter.put(P, {"x": values}, timeout=10)
        return waiting.result(20).lot

    def fetch(self, lot, columns=("x",)):
        return self.taker.fetch(lot, columns, timeout=20)

    def meet(self):
        """Have all units know the taker."""
        lots = [self.next(column([-1])) for _ in self.made.units]
        assert {lot.homes[0] for lot in lots} == set(self.made.units)
        for lot in lots:
            self.fetch(lot)


@pytest.fixture
def pair(tmp_path, request):
    options = getattr(request, "param", {})
    with cluster(tmp_path, **options) as made, ThreadPoolExecutor(1) as pool:
        pair = Pair(made, pool)
        pair.meet()
        yield pair


@pytest.mark.parametrize(
    ("way", "keyed", "sync"),
    [
        ("tcp", False, "process"),
        ("tcp", True, "process"),
        ("shared memory", False, "process"),
        ("tcp", False, "always"),
    ],
)
def test_a_claim_that_waited_need_not_ask_for_its_rows(tmp_path, monkeypatch, asked, way, keyed, sync):
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off" if way == "tcp" else "on")
    keys = Keys.generate(tmp_path / "key") if keyed else None
    with cluster(tmp_path, keys=keys, sync=sync) as made, ThreadPoolExecutor(1) as pool:
        pair = Pair(made, pool)
        pair.meet()
        asked.clear()
        for number in range(10):
            values = column([number, number + 1]) if number % 2 else big([number])
            lot = pair.next(values, done=())
            got = pair.fetch(lot)["x"]
            assert first_of(got) == [number, number + 1][: len(lot.rows)]
            assert len(got.row(0)) == (3 if number % 2 else 12_500)
        assert asked.count("unit.fetch") == 0
        assert sum(unit.server.counters.calls["unit.fetch"] for unit in made.units.values()) == 12


def test_a_task_gets_what_another_has_written_of_rows_that_lie_there(pair, asked):
    pair.putter.declare([TaskSpec(partition=P, name="next", needs=["y"])], timeout=10)
    pair.putter.put(P, {"x": column([1, 2])}, timeout=10)
    held = pair.putter.claim_lot(partition=P, task="t", max_rows=2, min_rows=2, timeout=10).lot
    waiting = pair.pool.submit(
        lambda: (
            pair.taker.claim_lot(partition=P, task="next", max_rows=2, min_rows=2, columns=["y", "x"], timeout=30).lot
        )
    )
    while f"{P}/next" not in pair.putter.stats(timeout=10).parked:
        assert not waiting.done()
    assert pair.putter.complete(held, {"y": column([3, 4])}, timeout=10) == [True, True]
    got = pair.fetch(waiting.result(20), ["y", "x"])
    assert (first_of(got["x"]), first_of(got["y"]), asked.count("unit.fetch")) == ([1, 2], [3, 4], 0)


def test_rows_that_are_ready_already_and_rows_of_two_units_are_asked_for(pair, asked):
    pair.putter.put(P, {"x": column([1])}, timeout=10)
    ready = pair.taker.claim_lot(partition=P, task="t", max_rows=1, columns=["x"], timeout=10).lot
    assert first_of(pair.fetch(ready)["x"]) == [1]
    assert asked.count("unit.fetch") == 1
    both = pair.next(column([2]), column([3]), min_rows=2)
    assert set(both.homes) == {0, 1}
    assert sorted(first_of(pair.fetch(both)["x"])) == [2, 3]
    assert asked.count("unit.fetch") == 3


def test_what_is_asked_for_differs_from_what_was_said(pair, asked):
    lot = pair.next(column([5, 6]))
    assert first_of(pair.fetch(lot.rows[1:])["x"]) == [6]
    assert first_of(pair.fetch(lot)["x"]) == [5, 6]
    assert first_of(pair.fetch(lot)["x"]) == [5, 6]
    assert asked.count("unit.fetch") == 2


def fetch_for_ever(pair, lot, asked):
    """Fetch by asking until the unit has heard that the rows are gone."""
    while pair.fetch(lot):
        assert asked


CHANGES = {
    "write": lambda queue, lot: queue.write(lot.rows, {"x": column([2])}, timeout=10),
    "clear rows": lambda queue, lot: queue.clear_rows(P, lot.rows, timeout=10),
    "clear the partition": lambda queue, lot: queue.clear_partition(partition=P, timeout=10),
    "reset": lambda queue, lot: queue.reset(P, timeout=10),
    "acknowledge": lambda queue, lot: queue.acknowledge([lot.lease], timeout=10),
    "claim, with what is done": lambda queue, lot: queue.claim_lot(
        partition=P, task="t", max_rows=1, done=[lot.lease], timeout=0
    ),
}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its lane", "another lane"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_client_asks_for_what_it_has_changed(pair, asked, elsewhere, change):
    lot = pair.next(column([1]))
    idle = pair.taker._idle
    lanes, idle[:] = list(idle), [] if elsewhere else list(idle)
    CHANGES[change](pair.taker, lot)
    idle[:] = lanes
    asked.clear()
    if not change.startswith("clear"):
        assert first_of(pair.fetch(lot)["x"]) == [2 if change == "write" else 1]
    else:
        with pytest.raises(StaleHandle):
            fetch_for_ever(pair, lot, asked)
    assert asked[0] == "unit.fetch"


def test_a_client_that_writes_while_its_claim_waits_asks(pair, asked):
    first = pair.taker.put(P, {"y": column([1])}, timeout=10).rows
    lot = pair.next(column([1]), before=lambda: pair.taker.write(first, {"y": column([2])}, timeout=10))
    asked.clear()
    assert first_of(pair.fetch(lot)["x"]) == [1]
    assert asked == ["unit.fetch"]


def test_what_others_have_written_is_read_a_second_later(pair):
    now = [0.0]
    pair.taker.verbs.fresh = Fresh(lambda: now[0])
    lot = pair.next(column([1]))
    pair.putter.write(lot.rows, {"x": column([2])}, timeout=10)
    now[0] = FRESH_S
    assert first_of(pair.fetch(lot)["x"]) == [2]


@pytest.mark.parametrize("pair", [{"units": 1}], indirect=True)
def test_lots_that_are_not_fetched_do_not_pile_up(pair, asked):
    unit, link = pair.made.units[0], pair.taker._idle[0]._links.to(0)
    sent = unit.fetched_bytes
    for number in range(100):
        lot = pair.next(big([number]))
        pair.putter.clear_rows(P, lot.rows, timeout=10)
    assert unit.fetched_bytes - sent >= 100 * 100_000
    unread = 0
    while link.receive(0):
        unread += 1
    assert unread <= 1
    lot = pair.next(big([7]))
    assert (first_of(pair.fetch(lot)["x"]), asked.count("unit.fetch")) == ([7], 0)


def test_a_unit_that_was_replaced_is_asked(pair, asked):
    old = pair.made.units.pop(1)
    pair.made.run(old.close())
    pair.made.start_unit(1)
    lots = [pair.next(column([number])) for number in range(4)]
    assert {lot.homes[0] for lot in lots} == {0, 1}
    assert [first_of(pair.fetch(lot)["x"]) for lot in lots] == [[0], [1], [2], [3]]


def test_an_order_that_makes_no_sense_harms_nobody(pair):
    links = pair.taker._idle[0]._links
    unit = pair.made.units[0]

    async def order():
        for request in (
            FetchRows([-5], ["x"]),
            FetchRows([7, 7], ["x"]),
            FetchRows([], []),
            FetchRows([1 << 62], [""]),
        ):
            unit.server.answer_unasked(links.seat, 1 << 40, "unit.fetch", request)

    pair.made.run(order())
    pair.meet()


@pytest.mark.parametrize("pair", [{"units": 1}], indirect=True)
def test_a_claim_that_is_made_again_gets_its_lot(pair, asked):
    """The controller's answer is lost with it; the rows had been sent."""
    lot = pair.next(column([1]))
    pair.made.stop_controller()
    pair.made.start_controller()
    for number in range(3):
        assert first_of(pair.fetch(pair.next(column([number])))["x"]) == [number]
    assert first_of(pair.fetch(lot)["x"]) == [1]
