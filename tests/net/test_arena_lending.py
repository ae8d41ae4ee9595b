"""What came through one arena, lent to peers of others, without any I/O: never overwritten, never lost."""

import fcntl
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.net.arena import lending, memfd
from asyncflow.net.arena.borrowing import Borrowed, Borrowing, mark_of
from asyncflow.net.arena.lending import MOST_FILES, Lending, forget_gone, inode_of, take_back
from asyncflow.net.arena.loans import Incoming, Mapping, hide, owner_of, show
from asyncflow.net.arena.memfd import PAGE, SHOWN, Outgoing
from asyncflow.net.arena.messages import ArenaInbox, ArenaOutbox
from asyncflow.net.frames import LARGE
from asyncflow.net.rpc.staging import staging

MOST = 1 << 24
PAGES = 200
THERE, LENT, NEW = 1 << 63, 1 << 62, 1 << 61


def made(pages: int) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, pages * PAGE)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return file


def noise(size: int, seed: int = 0) -> memoryview:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8).data


class Way:
    """One direction of a connection, with what sockets do. wire: bytes that were sent; files: those that went along."""

    def __init__(self, *, lends: bool = False, pages: int = PAGES) -> None:
        file = made(pages)
        self.outgoing = Lending(file) if lends else Outgoing(file)
        self.incoming = Borrowing(os.dup(file)) if lends else Incoming(os.dup(file))
        self.outbox = ArenaOutbox(self.outgoing)
        self.inbox = ArenaInbox(self.incoming, most=MOST, staging=staging())
        self.wire = bytearray()
        self.files = 0

    def pass_on(self, *parts: memoryview) -> list[memoryview]:
        """Send a message, and receive it."""
        self.outbox.push(0, parts)
        while views := self.outbox.views():
            for view in views:
                self.wire += view
            self.outbox.sent(sum(map(len, views)))
        return self.receive()

    def receive(self) -> list[memoryview]:
        if isinstance(self.outgoing, Lending) and isinstance(self.incoming, Borrowing):
            self.files += len(self.outgoing.files)
            self.incoming.come([os.dup(file) for file in self.outgoing.files])
            self.outgoing.went()
        came: list[list[memoryview]] = []
        while self.wire:
            room = self.inbox.room()
            count = min(len(room), len(self.wire))
            room[:count] = self.wire[:count]
            del self.wire[:count]
            came += self.inbox.took(count)
        return came[0] if came else []

    def close(self) -> None:
        self.outgoing.close()
        self.incoming.close()


@pytest.fixture(autouse=True)
def _nothing_of_other_tests(monkeypatch):
    monkeypatch.setattr(lending, "_REMAINING", {})


@pytest.fixture
def to_unit():
    way = Way()
    yield way
    way.close()


@pytest.fixture
def to_consumer():
    way = Way(lends=True)
    yield way
    way.close()


def test_a_part_is_lent_where_it_lies_and_can_only_be_read(to_unit, to_consumer):
    sent = noise(50 * PAGE)
    (cells,) = to_unit.pass_on(sent)
    rows = np.frombuffer(cells, np.uint8)[3 * PAGE + 5 : 30 * PAGE + 7].data
    (came,) = to_consumer.pass_on(rows)
    assert came == rows == sent[3 * PAGE + 5 : 30 * PAGE + 7]
    assert came.readonly
    cells[3 * PAGE + 5] ^= 255
    assert came[0] == sent[3 * PAGE + 5] ^ 255


def test_the_file_goes_once_and_parts_need_no_bytes(to_unit, to_consumer):
    columns = to_unit.pass_on(noise(20 * PAGE), noise(20 * PAGE, 1), b"small")
    for _ in range(30):
        came = to_consumer.pass_on(*columns)
        assert came == columns
        assert to_consumer.outgoing._filled == 1
    assert to_consumer.files == 1


def test_pages_go_back_to_their_sender_when_nobody_looks_at_them_on_either_side(to_unit, to_consumer):
    cells = to_unit.pass_on(noise(60 * PAGE))
    came = to_consumer.pass_on(*cells)
    expected = bytes(came[0])
    cells.clear()
    for seed in range(1, 5):
        to_unit.pass_on(noise(50 * PAGE, seed))
        assert bytes(came[0]) == expected
    row = came[0][7:99]
    came.clear()
    take_back()
    assert to_unit.outgoing.put(noise(120 * PAGE)) is not None
    assert to_unit.outgoing.put(noise(50 * PAGE)) is None
    assert row == expected[7:99]
    del row
    take_back()
    assert to_unit.outgoing.put(noise(50 * PAGE)) == 1


@pytest.mark.parametrize("goes_first", ["lender", "consumer", "producer"])
def test_what_is_looked_at_is_not_given_back_whoever_ends_first(goes_first):
    to_unit, to_consumer = Way(), Way(lends=True)
    cells = to_unit.pass_on(noise(60 * PAGE))
    (came,) = to_consumer.pass_on(*cells)
    cells.clear()
    if goes_first == "producer":
        to_unit.close()
    elif goes_first == "consumer":
        to_consumer.incoming.close()
        to_consumer.outgoing.close()
    else:
        to_consumer.outgoing.close()
        to_consumer.incoming.close()
    for seed in range(1, 4):
        assert goes_first == "producer" or to_unit.pass_on(noise(60 * PAGE, seed))
        assert came == noise(60 * PAGE)
        assert not forget_gone() or goes_first == "producer"
    del came, to_consumer.inbox
    take_back()
    assert forget_gone()
    assert goes_first == "producer" or to_unit.outgoing.put(noise(190 * PAGE)) == 1
    to_unit.close()
    to_consumer.close()


LOOKER = """
import mmap, sys
there = mmap.mmap(int(sys.argv[1]), 0, mmap.MAP_SHARED, mmap.PROT_READ)
import os; os.close(int(sys.argv[1]))
print("looks", flush=True)
sys.stdin.read()
"""


def test_the_kernel_says_when_a_process_that_was_killed_looks_no_more(to_unit, to_consumer):
    cells = to_unit.pass_on(noise(60 * PAGE))
    assert to_consumer.outgoing.lend(cells[0]) is not None
    (file,) = to_consumer.outgoing.files
    looker = subprocess.Popen(
        [sys.executable, "-c", LOOKER, str(file)], pass_fds=[file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert looker.stdout is not None
    assert looker.stdin is not None
    assert looker.stdout.readline() == b"looks\n"
    cells.clear()
    to_consumer.outgoing.close()
    assert not forget_gone()
    assert to_unit.outgoing.put(noise(190 * PAGE)) is None
    looker.kill()
    looker.wait()
    looker.stdin.close()
    looker.stdout.close()
    assert forget_gone()
    assert to_unit.outgoing.put(noise(190 * PAGE)) == 1


def test_only_what_came_through_an_arena_is_lent(to_unit, to_consumer):
    cells = to_unit.pass_on(noise(50 * PAGE))
    borrowed = to_consumer.pass_on(*cells)
    again = Way(lends=True)
    for own in (noise(LARGE), bytes(LARGE), *borrowed, memoryview(bytearray(LARGE))):
        part = memoryview(own)
        assert again.outgoing.lend(part) is None
        assert again.pass_on(part) == [part]
    assert (again.files, to_consumer.files) == (0, 1)
    again.close()


def test_without_pages_for_tokens_or_memory_parts_go_as_any_others(to_unit, monkeypatch):
    few = Way(lends=True, pages=4)
    columns = to_unit.pass_on(*[noise(LARGE, seed) for seed in range(5)])
    came = few.pass_on(*columns)
    assert came == columns
    assert [part.readonly for part in came] == [True] * 3 + [False] * 2
    monkeypatch.setattr(memfd, "MOST_FILLED", 0)
    none = Way(lends=True)
    assert none.pass_on(*columns) == columns
    assert none.files == 0
    few.close()
    none.close()


def test_a_host_without_such_locks_lends_nothing(to_unit, to_consumer, monkeypatch):
    cells = to_unit.pass_on(noise(LARGE))

    def refuse(*_: object, **__: object) -> int:
        raise OSError

    monkeypatch.setattr(lending, "_opened", refuse)
    came = to_consumer.pass_on(*cells)
    assert came == cells
    assert (to_consumer.files, came[0].readonly) == (0, False)


def test_files_that_nobody_looks_at_make_room_for_others(to_consumer):
    producers = [Way(pages=40) for _ in range(MOST_FILES + 3)]
    held = [producer.pass_on(noise(LARGE, seed)) for seed, producer in enumerate(producers)]
    came = [to_consumer.pass_on(*cells) for cells in held]
    assert [bytes(part) for (part,) in came] == [bytes(noise(LARGE, seed)) for seed in range(len(producers))]
    assert [part.readonly for (part,) in came] == [True] * MOST_FILES + [False] * 3
    came[5].clear()
    came[7].clear()
    again = [to_consumer.pass_on(*held[-1]), to_consumer.pass_on(*held[5])]
    assert [part.readonly for (part,) in again] == [True, True]
    assert again == [held[-1], held[5]]
    assert to_consumer.files == MOST_FILES + 2
    for producer in producers:
        producer.close()


def test_a_mark_says_whether_a_whole_part_is_still_shown(to_unit, to_consumer):
    cells = np.frombuffer(to_unit.pass_on(noise(50 * PAGE))[0], np.float32)
    assert show(cells)
    assert not show(cells[1:])
    assert not show(np.zeros(LARGE))
    came = np.frombuffer(to_consumer.pass_on(cells.view(np.uint8).data)[0], np.float32)
    mark = mark_of(came)
    assert mark is not None
    assert mark.shown
    hide(cells)
    assert not mark.shown
    assert show(cells)
    del cells
    assert mark.shown
    assert mark_of(np.zeros(3)) is None


sizes = st.sampled_from([LARGE, LARGE + 1, 3 * LARGE])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 1), sizes),
        st.tuples(st.just("clear"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("fetch"), st.integers(0, 9), st.integers(0, 1)),
        st.tuples(st.just("let go"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_whoever_does_what_when_nobody_reads_what_was_overwritten(steps):
    ways = [Way(), Way(), Way(lends=True), Way(lends=True)]
    cells: list[tuple[memoryview, int]] = []
    looked: list[tuple[memoryview, int]] = []
    for seed, (what, which, more) in enumerate(steps):
        if what == "put":
            (part,) = ways[which].pass_on(noise(more, seed))
            cells.append((part, seed))
        elif what == "clear" and cells:
            cells.pop(which % len(cells))
            take_back()
        elif what == "fetch" and cells:
            part, of = cells[which % len(cells)]
            (came,) = ways[2 + more].pass_on(part)
            looked.append((came, of))
        elif what == "let go" and looked:
            looked.pop(which % len(looked))
        elif what == "end":
            ways[which].close()
            ways[which] = Way(lends=which >= 2)
        part = came = None
        for view, of in [*cells, *looked]:
            assert view == noise(len(view), of)
        view = None
    while ways:
        ways.pop().close()
    assert all(view == noise(len(view), of) for view, of in [*cells, *looked])
    cells.clear()
    looked.clear()
    assert forget_gone()


def filled(memory: Mapping | Borrowed) -> int:
    """Give how many pages of a file there are."""
    file = os.open(f"/proc/self/map_files/{memory.address:x}-{memory.address + len(memory):x}", os.O_RDONLY)
    try:
        return os.fstat(file).st_blocks * 512 // PAGE
    finally:
        os.close(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may see the files of mappings")
@pytest.mark.parametrize("goes_first", ["producer", "consumer"])
def test_of_a_producer_that_ended_no_page_is_kept_that_nobody_looks_at(goes_first, to_consumer):
    producer = Way()
    cells = producer.pass_on(noise(100 * PAGE))
    came = to_consumer.pass_on(*cells)
    (file,) = to_consumer.incoming._files.values()
    assert filled(file) > 100
    cells.clear()
    if goes_first == "producer":
        producer.close()
        assert came[0] == noise(100 * PAGE)
        assert filled(file) == 101
    came.clear()
    take_back()
    producer.close()
    assert not to_consumer.outgoing._lent
    assert filled(file) <= 1


def test_what_was_borrowed_leaves_nothing_at_the_client(to_unit, to_consumer):
    cells = to_unit.pass_on(noise(LARGE))
    for _ in range(50):
        to_consumer.pass_on(*cells)
    mapping = to_consumer.incoming._mapping
    assert not mapping.loans
    assert not mapping.ended


@pytest.mark.parametrize("goes_first", ["lender", "consumer"])
def test_what_was_given_back_before_a_link_ended_does_not_remain(goes_first, to_unit):
    way = Way(lends=True)
    cells = to_unit.pass_on(*[noise(LARGE, seed) for seed in range(4)])
    came = way.pass_on(*cells)
    cells.clear()
    del came[1:]
    for side in [way.outgoing, way.incoming] if goes_first == "lender" else [way.incoming, way.outgoing]:
        side.close()
    (remaining,) = lending._REMAINING.values()
    assert len(remaining) == 1
    assert to_unit.outgoing._heap.take(150) is None
    assert to_unit.outgoing.put(noise(LARGE)) is not None
    assert came == [noise(LARGE)]


def test_what_remains_of_a_peer_is_each_part_once(to_unit):
    way = Way(lends=True)
    one, other = to_unit.pass_on(noise(LARGE), noise(3 * LARGE))
    held = [way.pass_on(one, other[LARGE // 2 :], np.frombuffer(other, np.int16)[9:].view(np.uint8).data)]
    held += [way.pass_on(one, other) for _ in range(20)]
    way.outgoing.close()
    (remaining,) = lending._REMAINING.values()
    assert len(remaining) == 2
    del one, other, remaining
    assert held[0][0] == noise(LARGE)
    assert to_unit.outgoing.put(noise(190 * PAGE)) is None
    held.clear()
    way.close()
    del way.inbox
    assert forget_gone()
    assert to_unit.outgoing.put(noise(190 * PAGE)) == 1


def test_taking_back_asks_nothing_of_those_that_are_gone(to_unit, monkeypatch):
    way = Way(lends=True)
    held = way.pass_on(*to_unit.pass_on(noise(LARGE)))
    way.outgoing.close()
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: pytest.fail("it asked the kernel"))
    take_back()
    assert len(lending._REMAINING) == 1
    monkeypatch.undo()
    held.clear()
    way.close()


def test_a_process_that_was_forked_gives_nothing_back_in_the_name_of_its_parent(to_unit, to_consumer):
    came = to_consumer.pass_on(*to_unit.pass_on(noise(LARGE)))
    came.clear()
    if (child := os.fork()) == 0:
        to_consumer.outgoing.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(to_consumer.outgoing._lent) == 1
    take_back()
    assert not to_consumer.outgoing._lent


def test_words_that_name_another_file_than_the_one_that_came_are_found_out():
    """As after a message whose file went, but not its words."""
    one, other, way = Way(), Way(), Way(lends=True)
    (a,), (b,) = one.pass_on(noise(LARGE, 1)), other.pass_on(noise(LARGE, 2))
    assert way.outgoing.lend(a) is not None
    with pytest.raises(ProtocolError, match="is not file 1"):
        way.pass_on(b)
    for each in (one, other, way):
        each.close()


def test_no_part_is_marked_where_not_all_can_be(to_unit):
    cells = np.frombuffer(to_unit.pass_on(noise(50 * PAGE))[0], np.float32)
    memory = owner_of(cells)
    assert isinstance(memory, Mapping)
    assert not show(cells, np.zeros(LARGE))
    assert not show(cells, cells[1:])
    assert SHOWN not in memory[:PAGES]
    assert show(cells)


def block(*words: int) -> bytes:
    body = struct.pack(f"<I{len(words)}Q", len(words), *words)
    return struct.pack("<Q", len(body)) + body


def lent(number: int, token: int, offset: int, size: int, *, new: bool = False) -> tuple[int, int]:
    return THERE | LENT | (NEW if new else 0) | number << 32 | token, offset << 32 | size


def named(words: Sequence[int], *files: int) -> list[int]:
    """Name files, in that order, in the words that say that the next one came."""
    inodes = itertools.chain(map(inode_of, files), itertools.repeat(0))
    new = THERE | LENT | NEW
    return [word | next(inodes) << 40 if at % 2 == 0 and word & new == new else word for at, word in enumerate(words)]


def test_a_lender_that_tells_the_truth_is_believed(to_consumer):
    file = made(40)
    to_consumer.incoming.come([file])
    to_consumer.wire += block(*named([*lent(0, 50, 0, LARGE, new=True), *lent(0, 51, 7, LARGE)], file))
    assert to_consumer.receive() == [bytes(LARGE), bytes(LARGE)]


@pytest.mark.parametrize(
    "words",
    [
        lent(0, 50, 0, LARGE),
        lent(0, 50, 0, LARGE, new=True) * 2,
        (*lent(0, 50, 0, LARGE, new=True), *lent(1, 51, 0, LARGE, new=True)),
        (*lent(0, 50, 0, LARGE, new=True), *lent(1, 51, 0, LARGE)),
        (*lent(0, 50, 0, LARGE, new=True), *lent(0, 50, 0, LARGE)),
        lent(MOST_FILES, 50, 0, LARGE, new=True),
        lent(255, 50, 0, LARGE, new=True),
        lent(0, 0, 0, LARGE, new=True),
        lent(0, PAGES, 0, LARGE, new=True),
        lent(0, (1 << 32) - 1, 0, LARGE, new=True),
        lent(0, 50, 40 * PAGE, 1, new=True),
        lent(0, 50, 1, 40 * PAGE, new=True),
        lent(0, 50, (1 << 32) - 1, (1 << 32) - 1, new=True),
        lent(0, 50, 0, LARGE, new=True)[:1],
        lent(0, 50, 0, LARGE)[:1],
        (*lent(0, 50, 0, LARGE, new=True), MOST),
    ],
)
def test_a_lender_that_lies_about_places_is_found_out(words, to_consumer):
    file = made(40)
    to_consumer.incoming.come([file])
    to_consumer.wire += block(*named(words, file))
    with pytest.raises(ProtocolError):
        to_consumer.receive()


def test_who_may_not_lend_is_found_out(to_unit):
    to_unit.wire += block(*lent(0, 50, 0, LARGE, new=True))
    with pytest.raises(ProtocolError, match="where none may"):
        to_unit.receive()


def unsealed() -> int:
    file = os.memfd_create("test")
    os.ftruncate(file, 40 * PAGE)
    return file


@pytest.mark.parametrize("files", [lambda: [unsealed()], lambda: [os.pipe()[0]], lambda: [made(1)] * (MOST_FILES + 1)])
def test_files_that_are_no_arenas_or_too_many_are_refused(files, to_consumer):
    brought = files()
    with pytest.raises(ProtocolError):
        to_consumer.incoming.come([brought[0], *map(os.dup, brought[1:])])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, PAGES + 1),
            st.integers(0, 41 * PAGE),
            st.integers(0, 41 * PAGE),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
)
def test_whatever_a_lender_says_is_messages_or_a_protocol_error(places, words):
    way = Way(lends=True)
    files = [made(40), made(10)]
    way.incoming.come(list(files))
    came: list[list[memoryview]] = []
    said = [lent(number, token, offset, size, new=new) for number, token, offset, size, new in places]
    way.wire += block(*named([word for pair in said for word in pair], *files)) + block(*words)
    try:
        came.append(way.receive())
    except ProtocolError:
        came.clear()
    way.close()
    assert all(len(bytes(part)) == len(part) for message in came for part in message)
