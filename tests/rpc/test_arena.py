"""The memory itself: sealed, without a name, bounded in all, used again, and gone when it is closed."""

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncflow.errors import ProtocolError
from asyncflow.rpc import shm
from asyncflow.rpc.shm import FREE, PAGE, SIZE, Incoming, Outgoing


@pytest.fixture
def pair() -> Iterator[tuple[Outgoing, Incoming]]:
    file = shm.new_arena()
    shm.check(file)
    outgoing, incoming = Outgoing(file), Incoming(os.dup(file))
    yield outgoing, incoming
    outgoing.close()
    incoming.close()


def sealed(size: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def small(pages: int) -> tuple[Outgoing, Incoming]:
    file = sealed(pages * PAGE)
    return Outgoing(file), Incoming(os.dup(file))


def kept(outgoing: Outgoing) -> int:
    """Return the pages of the file that exist."""
    return os.fstat(outgoing._file).st_blocks * 512 // PAGE


def mapped() -> int:
    gc.collect()
    return sum("asyncflow" in line or "memfd:test" in line for line in Path("/proc/self/maps").read_text().splitlines())


def noise(size: int, seed: int = 0) -> memoryview:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8).data


def test_what_one_side_puts_the_other_uses_where_it_lies(pair: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = pair
    sizes = [1, PAGE, PAGE + 1, 1 << 20]
    pages = [outgoing.put(noise(size, size)) for size in sizes]
    parts = [incoming.take(page, size) for page, size in zip(pages, sizes, strict=True)]
    assert [bytes(part) for part in parts] == [bytes(noise(size, size)) for size in sizes]
    assert not any(part.readonly for part in parts)
    parts[1][:] = bytes(PAGE)
    assert [bytes(parts[n]) for n in (0, 2)] == [bytes(noise(sizes[n], sizes[n])) for n in (0, 2)]


def test_a_place_is_used_again_when_the_last_view_is_gone_and_not_before(pair: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = pair
    part = incoming.take(outgoing.put(noise(1 << 20)), 1 << 20)
    column = np.frombuffer(part, np.uint8).view(np.float32)[1000:]
    expected = column.tobytes()
    del part
    second = outgoing.put(noise(1 << 20, 1))
    assert column.tobytes() == expected
    row = column[5:7]
    del column
    assert outgoing.put(noise(PAGE, 2)) > second
    del row
    assert outgoing.put(noise(1 << 20, 3)) < second


def test_nobody_can_take_memory_away_under_the_other(pair: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = pair
    for side in (outgoing._file, incoming._file):
        for size in (0, SIZE // 2, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(side, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(side, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def ordinary() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


@pytest.mark.parametrize(
    "made",
    [
        lambda: sealed(SIZE, seals=0),
        lambda: sealed(SIZE, seals=fcntl.F_SEAL_GROW),
        lambda: sealed(0),
        lambda: sealed(12345),
        lambda: sealed(1 << 40),
        ordinary,
        lambda: os.pipe()[0],
    ],
    ids=["no seals", "can shrink", "empty", "odd", "huge", "an ordinary file", "a pipe"],
)
def test_no_other_file_is_taken_for_an_arena(made) -> None:
    file = made()
    with pytest.raises(ProtocolError, match="wants to share"):
        shm.check(file)
    os.close(file)


def test_where_no_arena_can_be_made_no_file_stays_open(monkeypatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError("no seals here")

    files = os.listdir("/proc/self/fd")
    monkeypatch.setattr(fcntl, "fcntl", refused)
    with pytest.raises(PermissionError):
        shm.new_arena()
    assert os.listdir("/proc/self/fd") == files


def test_where_there_is_no_room_nothing_is_put_and_nothing_waits() -> None:
    outgoing, incoming = small(9)
    assert [outgoing.put(noise(PAGE)) for _ in range(9)] == [*range(1, 9), None]
    incoming.take(4, PAGE)
    assert outgoing.put(noise(PAGE + 1)) is None
    assert outgoing.put(noise(PAGE)) == 4
    outgoing.close()
    incoming.close()


def test_an_arena_of_one_page_has_no_room_at_all() -> None:
    outgoing, incoming = small(1)
    assert outgoing.put(noise(1)) is None
    with pytest.raises(ProtocolError):
        incoming.take(0, 1)
    outgoing.close()
    incoming.close()


def test_no_more_than_half_is_in_use_in_place_and_what_is_copied_out_is_the_receivers_own() -> None:
    outgoing, incoming = small(65)
    pages = [outgoing.put(noise(8 * PAGE, seed)) for seed in range(8)]
    parts = [incoming.take(page, 8 * PAGE) for page in pages]
    again = [outgoing.put(noise(8 * PAGE, 99)) for _ in range(9)]
    assert again == [*pages[4:], None, None, None, None, None]
    assert [bytes(part) for part in parts] == [bytes(noise(8 * PAGE, seed)) for seed in range(8)]
    del parts
    assert [outgoing.put(noise(8 * PAGE, 99)) for _ in range(5)] == [*pages[:4], None]
    later = [incoming.take(page, 8 * PAGE) for page in (*pages[:4], again[0])]
    assert outgoing.put(noise(PAGE)) == again[0]
    del later
    outgoing.close()
    incoming.close()


def test_pages_that_were_begun_are_bounded_and_what_is_closed_counts_no_more(monkeypatch) -> None:
    monkeypatch.setattr(shm, "_ALLOWANCE", shm._Allowance())
    monkeypatch.setattr(shm, "MOST_FILLED", 20 * PAGE)
    made = [Outgoing(sealed(65 * PAGE)) for _ in range(3)]
    assert [outgoing.put(noise(9 * PAGE)) is not None for outgoing in made] == [True, True, False]
    assert made[0].put(noise(PAGE)) is None
    made[0].close()
    made[0].close()
    assert made[0].put(noise(PAGE)) is None
    assert made[2].put(noise(9 * PAGE)) is not None
    for outgoing in made:
        outgoing.close()
    assert shm._ALLOWANCE.taken == 0


def test_pages_for_which_there_is_no_memory_are_done_without(monkeypatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(shm, "_ALLOWANCE", shm._Allowance())
    outgoing, incoming = small(65)
    with monkeypatch.context() as scarce:
        scarce.setattr(os, "posix_fallocate", full)
        assert outgoing.put(noise(PAGE)) is None
        assert outgoing.put(noise(PAGE)) is None
    assert shm._ALLOWANCE.taken == 0
    page = outgoing.put(noise(PAGE))
    assert bytes(incoming.take(page, PAGE)) == bytes(noise(PAGE))
    outgoing.close()
    incoming.close()


@pytest.mark.parametrize(
    ("page", "size"),
    [(0, PAGE), (0, 1), (1, 0), (64, PAGE + 1), (65, 1), (1, 64 * PAGE + 1), (1 << 40, PAGE), (2, 1 << 40), (5, 100)],
)
def test_a_part_that_cannot_lie_there_is_a_protocol_error(page, size) -> None:
    outgoing, incoming = small(65)
    lent = incoming.take(5, PAGE)
    with pytest.raises(ProtocolError, match="cannot lie"):
        incoming.take(page, size)
    del lent
    assert len(incoming.take(5, 100)) == 100
    outgoing.close()
    incoming.close()


def test_no_byte_that_the_other_side_writes_releases_what_it_was_not_given() -> None:
    outgoing, incoming = small(65)
    first, second = outgoing.put(noise(3 * PAGE)), outgoing.put(noise(3 * PAGE))
    memory = np.frombuffer(incoming._map_file(), np.uint8)
    memory[:PAGE] = 255
    memory[:PAGE][second : second + 1] = FREE
    assert outgoing.put(noise(62 * PAGE)) is None
    assert outgoing.put(noise(3 * PAGE)) == second
    memory[:PAGE] = FREE
    assert outgoing.put(noise(64 * PAGE)) == first
    memory[:PAGE] = FREE
    memory[:PAGE] = FREE
    assert [outgoing.put(noise(32 * PAGE)) is None for _ in range(2)] == [False, False]
    del memory
    outgoing.close()
    incoming.close()


def test_views_outlive_the_connection_and_only_their_pages_are_kept() -> None:
    before = mapped()
    outgoing, incoming = small(65)
    watched = Outgoing(os.dup(outgoing._file))
    parts = [incoming.take(outgoing.put(noise(8 * PAGE, seed)), 8 * PAGE) for seed in range(3)]
    outgoing.put(noise(20 * PAGE))
    outgoing.close()
    assert kept(watched) == 45
    incoming.close()
    incoming.close()
    assert kept(watched) == 25
    assert [bytes(part) for part in parts] == [bytes(noise(8 * PAGE, seed)) for seed in range(3)]
    del parts[1]
    assert kept(watched) == 17
    assert bytes(parts[1]) == bytes(noise(8 * PAGE, 2))
    assert mapped() == before + 1
    parts.clear()
    assert (kept(watched), mapped()) == (1, before)
    with pytest.raises(ProtocolError, match="closed"):
        incoming.take(1, PAGE)
    watched.close()


def test_a_forked_process_that_lets_go_gives_nothing_back(pair: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = pair
    pages = [outgoing.put(noise(1 << 20, seed)) for seed in range(3)]
    parts = [incoming.take(page, 1 << 20) for page in pages[:2]]
    child = os.fork()
    if not child:
        del parts[1]
        incoming.close()
        outgoing.close()
        parts.clear()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert outgoing.put(noise(1 << 20)) > max(pages)
    parts.append(incoming.take(pages[2], 1 << 20))
    assert [bytes(part) for part in parts] == [bytes(noise(1 << 20, seed)) for seed in range(3)]


def test_an_arena_has_no_pages_before_it_is_used_and_leaves_none_behind() -> None:
    gc.collect()  # what earlier tests have left
    files, before = os.listdir("/proc/self/fd"), mapped()
    for _ in range(20):
        file = shm.new_arena()
        outgoing, incoming = Outgoing(file), Incoming(os.dup(file))
        assert kept(outgoing) == 0
        part = incoming.take(outgoing.put(noise(5)), 5)
        assert kept(outgoing) == SIZE // PAGE // PAGE + 1
        del part
        outgoing.close()
        incoming.close()
    assert (os.listdir("/proc/self/fd"), mapped()) == (files, before)
