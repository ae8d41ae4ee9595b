"""Whatever a replica is told, by a primary that lies or by no one, it takes in or calls corrupt, in bounded memory.

The items are well formed and mostly about the same few rows, so that they get far; what they say makes no sense.
"""

import typing

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from msgspec import Struct

from asyncflow.errors import LedgerCorrupt, ManifestError
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table import replication
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.table import Table

WORDS = st.sampled_from(["p", "t", "a", "b", "key", "", "880000100000000"])
NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 9, -1, -2, 1 << 20, 1 << 32, (1 << 63) - 1])
RAW = st.sampled_from([b"", b"a client", b"\3\0\0\0"])
FLOATS = st.floats(allow_nan=False)
LEAVES = {int: NUMBERS, str: WORDS, bool: st.booleans(), bytes: RAW, float: FLOATS, type(None): st.none()}
BEGINNING = [
    ev.Declared(TaskSpec(partition="p", name="t", needs=["a"]), 1),
    ev.Declared(TaskSpec(partition="p", name="b", needs=["a", "b"], groups=True), 1),
]


def anything(kind):
    """Return a strategy for values of an annotation."""
    if kind in LEAVES:
        return LEAVES[kind]
    if isinstance(kind, type) and issubclass(kind, Struct):
        hints = typing.get_type_hints(kind)
        return st.deferred(lambda: st.builds(kind, **{name: anything(of) for name, of in hints.items()}))
    of, args = typing.get_origin(kind), typing.get_args(kind)
    if of is list:
        return st.lists(anything(args[0]), max_size=3)
    if of is dict:
        return st.dictionaries(anything(args[0]), anything(args[1]), max_size=3)
    if of is tuple:
        return st.tuples(*map(anything, args))
    if of is typing.Literal:
        return st.sampled_from(args)
    return st.one_of(*map(anything, args))


PARTITION = ev.SnapshotPartition("q", "train", {}, 0, None, None, *[0] * 5, [], [0, 0, 0], {}, [])


def group_of(*, serial=0, size=2, row=7, state=0):
    """Return an unfinished group whose rows are alike."""
    return ev.GroupRecord(serial, 1, 0, 1, "", [ev.RowRecord(row + n, state, False, 0, []) for n in range(size)])


def finished(outcome):
    """Return a group that has an outcome only."""
    return ev.GroupRecord(0, 1, 0, 0, outcome, [])


ITEMS = st.one_of(
    anything(replication.Change),
    st.just(PARTITION),
    st.builds(group_of, serial=st.integers(0, 3), row=st.sampled_from([7, 20]), state=st.integers(0, 6)).map(
        lambda group: ev.SnapshotGroups("q", [group])
    ),
    st.builds(
        ev.RowsPut,
        *map(st.just, ["p", "open"]),
        st.lists(st.sampled_from([1 << 32, 1 + (1 << 32)]), max_size=2),
        st.integers(1, 2),
        st.lists(st.sampled_from([7, 8, 9]), max_size=4),
    ),
    st.builds(ev.RowsPut, *map(st.just, ["q", "train"]), st.just([0]), *map(st.just, [2, [20, 21], 1, 0, 1])),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ITEMS, max_size=8), st.lists(ITEMS, max_size=8))
def test_what_a_replica_is_told_it_takes_in_or_calls_corrupt(told, snapshot):
    state, draft = QueueState(1), QueueState(1)
    for into, items in ((state, told), (draft, snapshot)):
        for item in [*BEGINNING, *items]:
            try:
                replication.take(into, replication.decode(replication.encode(item)))
            except LedgerCorrupt:
                break
        else:
            if into is draft:
                replication.install(state, draft)
                assert state.rows is draft.rows


@given(st.binary(max_size=60) | st.sampled_from(BEGINNING).map(replication.encode).map(lambda said: said[:-1]))
def test_bytes_that_are_no_item_are_called_corrupt(said):
    with pytest.raises(LedgerCorrupt):
        replication.decode(said)


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (PARTITION, "the partition q exists already"),
        (ev.SnapshotGroups("p", [group_of()]), "no purpose"),
        (ev.SnapshotGroups("p", [finished("t")]), "no purpose"),
        (ev.SnapshotGroups("q", [group_of(size=0)]), "both or none"),
        (ev.SnapshotGroups("q", [group_of(), group_of()]), "exists already"),
        (ev.SnapshotGroups("q", [finished("t"), group_of()]), "exists already"),
        (ev.SnapshotGroups("q", [group_of(state=9)]), "9 is not a valid RowState"),
        (ev.SnapshotGroups("q", [finished("tx")]), "tx is no outcome"),
        (ev.RowsPut("q", "train", [0], 2, [20, 21, 22]), "3 rows do not make 1 groups of 2"),
    ],
)
def test_a_snapshot_that_cannot_be_one_is_called_corrupt(record, what):
    state = QueueState()
    replication.take(state, PARTITION)
    with pytest.raises(LedgerCorrupt, match=what):
        replication.take(state, record)


def test_a_task_in_an_order_that_is_none_is_refused_before_anybody_is_told() -> None:
    spec, told, table = TaskSpec(partition="p", name="t", needs=["a"], order="pigeon"), [], Table()
    table.state.observer = told.append
    with pytest.raises(ManifestError, match="task p/t: no installed package offers 'pigeon'"):
        table.declare([spec])
    assert (told, table.state.outbox) == ([], [])
    with pytest.raises(LedgerCorrupt, match="pigeon"):
        replication.take(QueueState(), ev.Declared(spec, 0))


@pytest.mark.parametrize("module", [calls, unit_calls])
def test_no_bytes_make_anything_but_a_message_or_an_error(module):
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    assert len(kinds) > 5

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def run(data):
        kind = data.draw(st.sampled_from(kinds))
        said = bytearray(msgspec.msgpack.encode(data.draw(anything_plain(kind))))
        place, byte = data.draw(st.integers(0, len(said))), data.draw(st.integers(0, 255))
        said[place:place] = [byte]
        try:
            assert isinstance(msgspec.msgpack.decode(said, type=kind), kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return

    run()


def anything_plain(kind):
    """Return a strategy for what looks like a message of ``kind`` to its decoder, whose bounds it does not keep."""
    return st.fixed_dictionaries(
        {name: st.one_of(NUMBERS, WORDS, st.lists(NUMBERS, max_size=3)) for name in kind.__struct_fields__}
    )


@given(st.text(max_size=40) | st.integers().map(lambda number: f"{number:x}"))
def test_a_lease_names_one_of_the_controllers_that_there_may_be(lease):
    assert 0 <= calls.controller_of(lease) < 1 << 64 - calls.LEASE_BITS


@pytest.mark.parametrize("size", [-1, 1 << 32])
def test_a_cell_of_a_size_that_none_can_have_is_no_message(size):
    held = unit_calls.Held(row=8, columns={"x": size}, partial={}, tokens=0, tags={})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(held), type=unit_calls.Held)
