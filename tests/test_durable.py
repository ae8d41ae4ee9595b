"""Files that are replaced in one step."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncflow.durable import make_folder, write_whole


def test_a_file_is_replaced_with_its_mode_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_whole(path, b"old", mode=0o600)
    reader = path.open("rb")
    write_whole(path, b"new", mode=0o600)
    assert (reader.read(), path.read_bytes()) == (b"old", b"new")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    write_whole(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as failed:
        write_whole(path, b"new")
    assert failed.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_with_all_of_its_names_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    make_folder(tmp_path / "run" / "ledger" / "1")
    assert (tmp_path / "run" / "ledger" / "1").is_dir()
    assert synced == [".", "run", "run/ledger"]
    make_folder(tmp_path / "run" / "ledger" / "1")
    assert len(synced) == 3


def test_threads_that_write_one_file_at_once_leave_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, others = tmp_path / "certificate", os.fsync, [b"second"]

    def overtaken(descriptor: int) -> None:
        """Let another thread write the same file before the first has synced its own."""
        if others:
            with ThreadPoolExecutor(max_workers=1) as thread:
                thread.submit(write_whole, path, others.pop()).result()
            assert path.read_bytes() == b"second"
        real(descriptor)

    monkeypatch.setattr(os, "fsync", overtaken)
    write_whole(path, b"1st")
    assert path.read_bytes() == b"1st"
    assert list(tmp_path.iterdir()) == [path]
