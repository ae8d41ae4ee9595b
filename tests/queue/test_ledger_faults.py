"""The ledger on a disk that fails, or loses its power, at any of its operations: what was confirmed is read back.

The disk is real except for one operation, which fails or after which nothing is done. After a power cut, a file has
the bytes that were synced, and its folder the names that were synced.
"""

import asyncio
import errno
import itertools
import os
import shutil
from contextlib import contextmanager

import pytest

from asyncflow.queue.ledger.events import Committed
from asyncflow.queue.ledger.log import Ledger, read_ledger

P = "train"
STEPS = 40
OPERATIONS = ("open", "write", "fsync", "fdatasync", "ftruncate", "rename", "unlink")


class Crash(BaseException):
    """The process, or the machine, is no more."""


class Disk:
    """Counts the operations in ``folder``; the one with number ``at`` fails, or is the first that is not done."""

    def __init__(self, folder, *, at=-1, crash=False):
        self.folder, self.at, self.crash = folder, at, crash
        self.done = 0
        self.sizes = {}
        self.names = {}
        self.dead = False

    @contextmanager
    def watched(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, self._watching(name, getattr(os, name)))
            yield self

    def _watching(self, name, real):
        def do(*args, **options):
            if not self._is_ledger_file(args[0]):
                return real(*args, **options)
            number, self.done = self.done, self.done + 1
            if self.dead or (number == self.at and self.crash):
                self.dead = True
                raise Crash
            if number == self.at:
                raise OSError(errno.EIO, f"{name} failed")
            result = real(*args, **options)
            if name in ("fsync", "fdatasync"):
                self._synced(args[0])
            return result

        return do

    def _is_ledger_file(self, file):
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        return path.startswith(str(self.folder)) and not path.endswith("lock")

    def _synced(self, descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path == str(self.folder):
            self.names = {entry.name: entry.inode() for entry in os.scandir(self.folder)}
        else:
            told = os.fstat(descriptor)
            self.sizes[told.st_ino] = told.st_size

    def cut_power(self, into):
        """Copy what is on the disk without the power."""
        into.mkdir()
        there = {entry.inode(): entry.path for entry in os.scandir(self.folder)}
        for name, inode in self.names.items():
            if inode in there:
                shutil.copy(there[inode], into / name)
                os.truncate(into / name, self.sizes.get(inode, 0))


async def write(ledger, history, confirmed):
    """Append to a ledger and compact it again and again, until it is done or nothing more can be written."""
    ledger.begin([Committed(P, step) for step in history])
    while len(history) < STEPS:
        history.append(len(history))
        ledger.append([Committed(P, history[-1])])
        await ledger.flushed()
        confirmed[:] = history
    await ledger.close()


def live(folder, sync, confirmed, history, disk=None):
    """Be one process that writes the ledger; history: the state, of which a compacted ledger is made."""

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # a process that is no more tells nobody
        ledger = Ledger(folder, sync=sync, compact=lambda: [Committed(P, step) for step in history], limit=150)
        try:
            history[:] = [event.step for event in ledger.recover()]
            writing = asyncio.create_task(write(ledger, history, confirmed))
            while not (await asyncio.wait([writing], timeout=0.01))[0]:
                if disk is not None and disk.dead:
                    raise Crash
            writing.result()
        except OSError:
            await ledger.abandon()
        except Crash:
            ledger.release()
            raise

    asyncio.run(run())


def steps(folder):
    return [event.step for event in read_ledger(folder)]


def is_prefix_with(confirmed, found):
    return found == list(range(len(found))) and len(found) >= len(confirmed)


@pytest.mark.parametrize("sync", ["process", "interval", "always"])
def test_after_an_error_of_the_disk_a_ledger_is_what_was_confirmed_and_goes_on(tmp_path, sync):
    for at in itertools.count():
        folder, confirmed = tmp_path / str(at), []
        folder.mkdir()
        with Disk(folder, at=at).watched() as disk:
            live(folder, sync, confirmed, [])
            assert is_prefix_with(confirmed, steps(folder)), f"operation {at}"
        live(folder, sync, confirmed, [])
        assert steps(folder) == list(range(STEPS)), f"operation {at}"
        if disk.done <= at:
            break
    assert at > 60


@pytest.mark.parametrize("sync", ["process", "interval", "always"])
def test_after_a_crash_at_any_operation_a_ledger_is_what_was_confirmed(tmp_path, monkeypatch, sync):
    monkeypatch.setattr("asyncflow.queue.ledger.log._INTERVAL_S", 0.0)
    for at in itertools.count():
        folder, confirmed = tmp_path / str(at), []
        folder.mkdir()
        with Disk(folder, at=at, crash=True).watched() as disk:
            try:
                live(folder, sync, confirmed, [], disk)
            except Crash:
                disk.dead = False
                assert is_prefix_with(confirmed, steps(folder)), f"operation {at}"
            else:
                break
        if sync != "process":
            disk.cut_power(tmp_path / f"{at}-cut")
            survives = confirmed if sync == "always" else []
            assert is_prefix_with(survives, steps(tmp_path / f"{at}-cut")), f"operation {at}"
    assert at > 60
