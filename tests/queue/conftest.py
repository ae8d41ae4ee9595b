"""A pure table with a counterfeit unit, in short words."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import debian
from asyncflow.identity import NEWEST, RowPlace, location_at
from asyncflow.queue.protocol.calls import ClaimRows
from asyncflow.queue.protocol.messages import Samples, TaskSpec
from asyncflow.queue.protocol.unit_calls import Cells, Held, NewRows
from asyncflow.queue.table.rows import put
from asyncflow.queue.table.state import RowState, TaskWork
from asyncflow.queue.table.table import Table

sys.path.insert(0, str(Path(__file__).parent / "storage"))

from store_world import MemoryWorld, make_world

P = "train"
TASKS = [
    TaskSpec(partition=P, name="rollout", needs=["prompt"], writes=["response"], groups=True, lease_s=10),
    TaskSpec(partition=P, name="score", needs=["response"], writes=["reward"], order="key", lease_s=10),
    TaskSpec(partition=P, name="advantage", needs=["reward"], writes=["advantage"], groups=True, lease_s=10),
    TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang"),
]


class Queue:
    """A table with one unit and short words for what tests do."""

    def __init__(self, tasks=TASKS):
        self.log = []
        self.held = {}
        self.table = Table()
        self.table.start(0.0)
        self.table.declare(tasks)
        self.epoch = self.table.join_unit(0, "unit-a")
        self.counter = 0
        self.tickets = 0
        self.creator = 0

    def create(
        self, *serials, size=2, step=1, oldest=0, newest=NEWEST, purpose="train", partition=P, tokens=(), skipped=()
    ):
        """Put groups; return whether each row is new."""
        samples = Samples(
            serials=list(serials),
            step=step,
            purpose=purpose,
            oldest=oldest,
            newest=newest,
            tokens=list(tokens),
            skipped=list(skipped),
        )
        rows = [RowPlace(self.epoch, 0, self.counter + i).row for i in range(len(serials) * size)]
        self.counter += len(rows)
        cells = self.cells(len(rows), "prompt")
        entry = NewRows(partition, b"a client", 0, size, rows, cells, [], samples, self.creator)
        admitted, _ = put(self.table.state, entry)
        self.keep([row for row, ok in zip(rows, admitted, strict=True) if ok], ["prompt"])
        return admitted

    def create_wanted(self, *, size=2):
        """Put the groups that are wanted again; return whether each row is new."""
        wanted = sorted({(meta.step, meta.serial) for meta in self.table.wanted(P).keys})
        return [new for step, serial in wanted for new in self.create(serial, size=size, step=step)]

    def cells(self, count, *columns, dtype="int32"):
        return Cells(dtypes=dict.fromkeys(columns, dtype), sizes=dict.fromkeys(columns, [8] * count))

    def park(self, task, *, now=0.0, worker="w", ticket=None, version=None, accept=(), rows=100, groups=None):
        claim = ClaimRows(P, task, worker, ticket or f"t{self.tickets}", rows, groups, version, list(accept))
        self.tickets += 1
        self.table.claims.park(claim)
        return claim

    def claim(self, task, *, now=0.0, **options):
        claim = self.park(task, **options)
        grants = dict(self.table.claims.serve(now))
        self.table.claims.withdraw(claim)
        return grants.get(claim, [])

    def complete(self, rows, column, tags=None):
        cells = self.cells(len(rows), column)
        numbers = [row.row for row in rows]
        admitted = self.table.complete(rows[0].lease, numbers, cells, tags or [])
        there = self.table.state.rows
        self.keep([row for row, ok in zip(numbers, admitted, strict=True) if ok and row in there], [column])
        return admitted

    def through(self, *serials, upto="advantage"):
        """Take everything that is ready through the lease tasks, up to and including ``upto``."""
        for task, column in (("rollout", "response"), ("score", "reward"), ("advantage", "advantage")):
            rows = self.claim(task, rows=10_000)
            if rows:
                assert all(self.complete(rows, column))
            if task == upto:
                return

    def work(self, task, row):
        """Return how far ``task`` has come with a leased row."""
        held = self.table.state.rows.get(row.row)
        return held.work.get(task, TaskWork()) if held else TaskWork()

    def ready_by_hand(self, queue):
        """Return the rows or groups that are ready for a task, found by looking at every row."""
        ready = set()
        for group in self.table.state.partitions[P].groups.values():
            is_open, blocked = [], False
            for row in group.rows:
                work = row.work.get(queue.spec.name, TaskWork())
                idle = row.state is RowState.LIVE and not (work.lease or work.done)
                if idle and set(queue.spec.needs) <= row.columns.keys():
                    is_open.append(row)
                elif not row.state.final and not (row.state is RowState.LIVE and work.done):
                    blocked = True
            if queue.by_group:
                ready |= {group} if is_open and not blocked else set()
            else:
                ready |= set(is_open)
        return ready

    @property
    def counts(self):
        return {state: n for state, n in self.table.state.partitions[P].counts.items() if n}

    def events(self):
        """Return everything that was recorded so far; free what is to be freed."""
        state = self.table.state
        self.log += state.outbox
        state.outbox.clear()
        for row in state.to_free:
            self.held.pop(row.row, None)
        state.to_free.clear()
        return self.log

    def restart(self, now=0.0, *, told=True):
        """Replace the controller by one that has read the log and, if ``told``, what the unit says that it holds."""
        log = list(self.events())
        self.table = Table()
        for event in log:
            self.table.state.apply(event)
        self.table.start(now)
        if told:
            self.tell()

    def tell(self):
        """Tell the controller what the unit holds."""
        for row in self.table.hold(location_at(self.epoch, 0), self.held.values()):
            del self.held[row]
        self.table.miss(location_at(self.epoch, 0))

    def replace_unit(self, incarnation):
        """Replace the unit by an empty one."""
        self.held.clear()
        self.counter = 0
        self.epoch = self.table.join_unit(0, incarnation)

    def keep(self, numbers, columns, *, partial=False):
        """Make the unit hold columns that were admitted."""
        for number in numbers:
            old = self.held.get(number)
            full = dict(old.columns) if old else {}
            part = dict(old.partial) if old else {}
            (part if partial else full).update(dict.fromkeys(columns, 8))
            row = self.table.state.rows[number]
            self.held[number] = Held(row=number, columns=full, partial=part, tokens=row.tokens, tags=row.tags)


@pytest.fixture(scope="session")
def make_queue():
    return Queue


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture(scope="session")
def tasks():
    return TASKS


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch what the stores need of the system before the first test, which is no part of any test's time limit."""
    if session.config.option.collectonly or not any("stores" in item.fixturenames for item in session.items):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    try:
        debian.prepare(say=reporter.write_line if reporter is not None else lambda _: None)
    except debian.DebianError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], MemoryWorld]]:
    """Yield a world by the name of its backend: one for all tests, so nobody may kill anything in it."""
    worlds: dict[str, MemoryWorld] = {}

    def world(name: str) -> MemoryWorld:
        if name not in worlds:
            worlds[name] = make_world(name, tmp_path_factory.mktemp(name))
        return worlds[name]

    yield world
    for made in worlds.values():
        made.close()
