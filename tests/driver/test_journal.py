"""Files of lines that people read: whatever becomes of them, a driver starts and goes on."""

import json
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncflow.driver.journal import Journal, read_summary


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Line(msgspec.Struct):
    a: int


def journal_at(path: Path) -> Journal:
    return Journal(path, check=lambda line: msgspec.convert(line, Line))


@contextmanager
def room(size: int) -> Iterator[None]:
    """Keep every file of this process from growing beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2')
    journal = journal_at(path)
    journal.append({"a": 3})
    assert lines_of(path) == journal.lines == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize(
    "bad",
    [b'{"a":1', b"[]", b"7", b'"a"', b'{"b":1}', b'{"a":"x"}', b'{"a":null}', b"\0" * 90, b"\xff\xfe", b"", b"null"],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_line_that_is_none_is_set_aside_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: bytes, place: int
) -> None:
    path = tmp_path / "lines.jsonl"
    sound = [b'{"a":1}', b'{"a":2}']
    path.write_bytes(b"".join(line + b"\n" for line in [*sound[:place], bad, *sound[place:]]))
    with caplog.at_level(logging.WARNING):
        journal = journal_at(path)
    assert len(caplog.records) == 1
    assert "1 line of lines.jsonl cannot be read" in caplog.text
    assert (tmp_path / "lines.jsonl.bad").read_bytes() == bad + b"\n"
    journal.append({"a": 3})
    assert lines_of(path) == journal.lines == [{"a": 1}, {"a": 2}, {"a": 3}]
    caplog.clear()
    assert journal_at(path).lines == journal.lines
    assert not caplog.records


def test_a_file_that_cannot_be_changed_is_read_without_its_bad_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\nnothing\n')

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("asyncflow.durable.write_whole", fail)
    assert journal_at(path).lines == [{"a": 1}]
    assert path.read_bytes() == b'{"a":1}\nnothing\n'


def test_what_finds_no_room_is_undone_and_written_when_there_is_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines.jsonl"
    journal = journal_at(path)
    journal.append({"a": 1})
    with room(path.stat().st_size + 5), caplog.at_level(logging.WARNING):
        for number in (2, 3):
            journal.append({"a": number})
        assert lines_of(path) == [{"a": 1}]
        assert journal.lines == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    journal.append({"a": 4})
    assert lines_of(path) == journal.lines == [{"a": n} for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("broken", ["write", "ftruncate", "open"])
def test_while_the_disk_fails_nothing_is_raised_and_afterwards_every_line_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n')
    real_write = os.write

    def half(descriptor: int, data: bytes) -> int:
        return real_write(descriptor, data[: len(data) // 2])

    def fail(*_: object, **__: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        if broken != "write":
            patch.setattr(os, broken, fail)
        journal = journal_at(path)
        for number in (2, 3):
            journal.append({"a": number})
    journal.append({"a": 4})
    assert lines_of(path) == [{"a": n} for n in (1, 2, 3, 4)]
    journal.close()


def test_a_folder_that_cannot_be_written_costs_lines_and_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    journal = journal_at(tmp_path / "file" / "lines.jsonl")
    journal.append({"a": 1})
    assert journal.lines == [{"a": 1}]
    journal.close()


@pytest.mark.parametrize("damaged", [b"", b"[]", b'{"phase": ', b'{"phase": "\xff"}', b'{"a": ' + b"[" * 100_000])
def test_a_summary_that_is_damaged_is_none(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "summary.json").write_bytes(damaged)
    assert read_summary(tmp_path / "summary.json") is None
