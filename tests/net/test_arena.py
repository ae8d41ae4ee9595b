"""The memory itself: sealed, without a name, bounded in all, and gone when it is closed."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncflow.errors import ProtocolError
from asyncflow.net import arena as arenas
from asyncflow.net.arena import HALF, Arena


@pytest.fixture
def pair() -> Iterator[tuple[Arena, Arena]]:
    caller = Arena.made()
    answerer = Arena.taken(os.dup(caller.file))
    yield caller, answerer
    caller.close()
    answerer.close()


def shared() -> int:
    return sum("asyncflow" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_what_one_side_fills_the_other_empties_in_both_directions(pair: tuple[Arena, Arena]) -> None:
    for number, sender in enumerate(pair):
        assert sender.can_fill()
        sent = np.random.default_rng(number).integers(0, 255, 1000, np.uint8)
        for place in (slice(0, 1000), slice(HALF - 1000, HALF)):
            sender.fill(place, sent.data)
    for number, receiver in enumerate(pair[::-1]):
        came = bytearray(1000)
        for place in (slice(0, 1000), slice(HALF - 1000, HALF)):
            receiver.empty(place, memoryview(came))
            assert came == np.random.default_rng(number).integers(0, 255, 1000, np.uint8).tobytes()


def test_nobody_can_take_memory_away_under_the_other(pair: tuple[Arena, Arena]) -> None:
    for side in pair:
        for size in (0, HALF, 4 * HALF):
            with pytest.raises(PermissionError):
                os.ftruncate(side.file, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(side.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def sealed(size: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def ordinary() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * HALF)
        return os.dup(file.fileno())


@pytest.mark.parametrize(
    "made",
    [
        lambda: sealed(2 * HALF, seals=0),
        lambda: sealed(2 * HALF, seals=fcntl.F_SEAL_GROW),
        lambda: sealed(0),
        lambda: sealed(4096),
        lambda: sealed(12345),
        lambda: sealed(1 << 40),
        ordinary,
        lambda: os.pipe()[0],
    ],
    ids=["no seals", "can shrink", "empty", "one page", "odd", "huge", "an ordinary file", "a pipe"],
)
def test_no_other_file_is_taken_for_an_arena(made) -> None:
    file = made()
    with pytest.raises(ProtocolError, match="wants to share"):
        Arena.taken(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_rings_that_are_filled_are_bounded_and_what_is_closed_counts_no_more(monkeypatch) -> None:
    monkeypatch.setattr(arenas, "_ALLOWANCE", arenas._Allowance())
    monkeypatch.setattr(arenas, "MOST_FILLED", 2 * HALF)
    made = [Arena.made() for _ in range(5)]
    assert [arena.can_fill() for arena in made[:3]] == [True, True, False]
    made[0].close()
    made[0].close()
    assert [arena.can_fill() for arena in made[3:]] == [True, False]
    for arena in made:
        arena.close()
    assert arenas._ALLOWANCE._taken == 0


def test_a_ring_for_which_there_is_no_memory_is_done_without(monkeypatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(arenas, "_ALLOWANCE", arenas._Allowance())
    monkeypatch.setattr(os, "posix_fallocate", full)
    made = Arena.made()
    assert not made.can_fill()
    assert not made.can_fill()
    made.close()
    assert arenas._ALLOWANCE._taken == 0


def test_an_arena_has_no_pages_before_it_is_used_and_leaves_none_behind() -> None:
    files, mapped = os.listdir("/proc/self/fd"), shared()
    for _ in range(20):
        made = Arena.made()
        assert os.fstat(made.file).st_blocks == 0
        assert made.can_fill()
        made.fill(slice(0, 5), memoryview(b"bytes"))
        assert os.fstat(made.file).st_blocks * 512 == HALF
        made.close()
    assert (os.listdir("/proc/self/fd"), shared()) == (files, mapped)
