import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncflow.errors import CheckpointError, DiskError, Fenced
from asyncflow.training import checkpoint as module
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints

WRITER = """
import sys, time
from pathlib import Path
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
checkpoints.claim(1)
print("ready", flush=True)
step = 0
while True:
    step += 1
    def fill(folder):
        for part in range(4):
            (folder / f"part{part}").write_bytes(bytes([step % 256]) * 200_000)
    checkpoints.write(CheckpointManifest(attempt=1, step=step, samples=step), fill)
"""


def write(checkpoints: Checkpoints, step: int, *, attempt: int = 0, content: bytes = b"weights") -> None:
    manifest = CheckpointManifest(attempt=attempt, step=step, samples=8 * step)
    checkpoints.write(manifest, lambda folder: (folder / "data").write_bytes(content) and None)


def test_the_newest_complete_one_counts_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest() is None
    checkpoints.claim(0)
    for step in (5, 10, 15):
        write(checkpoints, step)
    assert sorted(path.name for path in (tmp_path / "c").glob("step-*")) == ["step-000010", "step-000015"]
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.manifest.step, latest.manifest.samples) == (15, 120)
    latest.verify()


def test_a_folder_without_a_manifest_is_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    (tmp_path / "step-000010").mkdir()
    (tmp_path / "step-000010" / "data").write_bytes(b"half")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.manifest.step == 5
    write(checkpoints, 10)
    latest = checkpoints.latest()
    assert latest is not None
    latest.verify()
    assert (latest.folder / "data").read_bytes() == b"weights"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_tensors_are_as_readable_as_the_other_files_of_a_run(tmp_path: Path, umask: int, mode: int) -> None:
    manifest = CheckpointManifest(attempt=0, step=5, samples=40)
    before = os.umask(umask)
    try:
        Checkpoints(tmp_path).write(manifest, lambda folder: save_file({"w": np.zeros(2)}, folder / "w.safetensors"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "step-000005" / "w.safetensors").stat().st_mode) == mode


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    file = tmp_path / "step-000005" / "data"
    {
        "flip": lambda: file.write_bytes(b"Weights"),
        "truncate": lambda: file.write_bytes(b"weight"),
        "remove": lambda: file.unlink(),
    }[damage]()
    latest = checkpoints.latest()
    assert latest is not None
    with pytest.raises(CheckpointError, match="data"):
        latest.verify()


def test_an_unreadable_manifest_is_said(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path), 5)
    manifest = tmp_path / "step-000005" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2 is not 1"):
        Checkpoints(tmp_path).latest()
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="manifest"):
        Checkpoints(tmp_path).latest()
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(DiskError, match="manifest cannot be read"):
        Checkpoints(tmp_path).latest()


@pytest.mark.parametrize("fails", ["sync", "write_whole"])
def test_a_commit_that_fails_commits_nothing_and_leaves_nothing(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = getattr(module, fails)

    def full(path: Path, *content: bytes) -> None:
        if path in (tmp_path, tmp_path / "step-000005" / "manifest.json"):
            raise OSError(28, "No space left on device")
        does(path, *content)

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr(module, fails, full)
        with pytest.raises(DiskError, match="No space left"):
            write(checkpoints, 5)
    assert checkpoints.latest() is None
    assert not list(tmp_path.iterdir())
    write(checkpoints, 5)
    assert checkpoints.steps() == [5]


def test_a_failed_write_commits_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def full(folder: Path) -> None:
        (folder / "data").write_bytes(b"part")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="No space left"):
        checkpoints.write(CheckpointManifest(attempt=0, step=5, samples=0), full)
    assert checkpoints.latest() is None
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        Checkpoints(tmp_path / "file" / "checkpoints").claim(0)


def test_an_older_attempt_is_fenced_even_in_the_middle_of_a_write(tmp_path: Path) -> None:
    old, new = Checkpoints(tmp_path), Checkpoints(tmp_path)
    old.claim(1)

    def overtaken(folder: Path) -> None:
        (folder / "data").write_bytes(b"old")
        new.claim(2)

    with pytest.raises(Fenced):
        old.write(CheckpointManifest(attempt=1, step=5, samples=0), overtaken)
    assert new.latest() is None
    with pytest.raises(Fenced):
        old.claim(1)
    write(new, 5, attempt=2)
    assert new.latest() is not None


def test_an_older_attempt_whose_disk_fails_leaves_what_a_newer_one_has_written_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Checkpoints(tmp_path), Checkpoints(tmp_path)
    old.claim(1)
    sync = module.sync

    def overtaken(path: Path) -> None:
        if path == tmp_path:
            monkeypatch.setattr(module, "sync", sync)
            new.claim(2)
            write(new, 5, attempt=2, content=b"new")
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(module, "sync", overtaken)
    with pytest.raises(DiskError, match="Input/output error"):
        write(old, 5, attempt=1, content=b"old")
    latest = new.latest()
    assert latest is not None
    assert (latest.manifest.attempt, (latest.folder / "data").read_bytes()) == (2, b"new")
    latest.verify()


@pytest.mark.process
def test_killed_at_any_time_it_leaves_whole_checkpoints(tmp_path: Path) -> None:
    for delay in (0.05, 0.11, 0.17, 0.31):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        latest = Checkpoints(tmp_path).latest()
        if latest is not None:
            latest.verify()


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\xff"])
def test_a_damaged_file_of_the_newest_attempt_is_named(tmp_path: Path, content: bytes) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.claim(3)
    (tmp_path / "attempt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the newest attempt is not a number.*remove this file"):
        checkpoints.claim(4)
    (tmp_path / "attempt").unlink()
    checkpoints.claim(4)
    assert checkpoints.newest_attempt() == 4


def test_it_can_be_seen_from_another_thread_that_a_slow_checkpoint_gets_on(tmp_path: Path) -> None:
    checkpoints, seen = Checkpoints(tmp_path), []

    def fill(folder: Path) -> None:
        with (folder / "data").open("wb", buffering=0) as file:
            for _ in range(3):
                file.write(bytes(1 << 20))
                seen.append(checkpoints.progress())

    written = checkpoints.write(CheckpointManifest(attempt=0, step=5, samples=0), fill)
    seen.append(checkpoints.progress())
    written.verify(read=checkpoints.handled)
    seen.append(checkpoints.progress())
    assert [value >> 20 for value in seen] == [1, 2, 3, 6, 9]
