"""The write-ahead log of a queue: checksummed records, written in groups, compacted into a new file now and then.

A ledger is a directory with one file, ``<generation>.wal``. A compaction writes the next generation under another name
and renames it; older files are then removed, so the highest generation is always whole. A record is magic, length,
CRC-32 of the payload seeded with the length, and the payload (msgpack).

Invariants: what ``flushed`` has confirmed is read back after a crash of the class that ``sync`` covers (``process``: of
this process; ``interval``: of the machine, but for the last second; ``always``: of the machine); a record that was torn
off at the end is cut away; a damaged record with a sound one behind it is ``LedgerCorrupt``.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from asyncflow.errors import LedgerCorrupt, Refused
from asyncflow.queue.events import Event

Sync = Literal["process", "interval", "always"]

_MAGIC = b"\xa5AF1"
_HEADER = struct.Struct("<4sII")
_SUFFIX = ".wal"
_INTERVAL_S = 1.0
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


def pack(event: Event) -> bytes:
    """Give ``event`` as one record."""
    payload = _encode(event)
    return _HEADER.pack(_MAGIC, len(payload), _checksum(payload)) + payload


def read_ledger(directory: Path) -> Iterator[Event]:
    """Give the events of a ledger in order; nothing where there is none. Changes no file. Raises LedgerCorrupt."""
    while (path := newest(directory)) is not None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        yield from (event for event, _ in _records(data, path))
        return


def newest(directory: Path) -> Path | None:
    """Give the file of the highest generation."""
    return max(directory.glob(f"*{_SUFFIX}"), default=None)


def _checksum(payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, len(payload))


def _records(data: bytes, path: Path) -> Iterator[tuple[Event, int]]:
    """Give each event and where its record ends; stop at a torn end."""
    view, start = memoryview(data), 0
    while start < len(data):
        end = _sound(view, start)
        if end is None:
            _check_torn(data, start, path)
            return
        try:
            yield _decode(view[start + _HEADER.size : end]), end
        except msgspec.MsgspecError as wrong:
            raise LedgerCorrupt(f"the record at byte {start} is none: {wrong}", where=str(path)) from wrong
        start = end


def _sound(view: memoryview, start: int) -> int | None:
    """Give the end of the record at ``start``; None if none is whole there."""
    body = start + _HEADER.size
    if body > len(view):
        return None
    magic, length, checksum = _HEADER.unpack_from(view, start)
    end = body + int(length)
    if magic != _MAGIC or end > len(view) or _checksum(view[body:end]) != checksum:
        return None
    return end


def _check_torn(data: bytes, start: int, path: Path) -> None:
    """Refuse damage at ``start`` unless nothing sound comes after it."""
    view, after = memoryview(data), data.find(_MAGIC, start + 1)
    while after >= 0:
        if _sound(view, after) is not None:
            hint = "Restore the file from a copy; nothing was changed"
            raise LedgerCorrupt(f"the record at byte {start} is damaged", where=str(path), hint=hint)
        after = data.find(_MAGIC, after + 1)


class Ledger:
    """The log of one controller, open for appending.

    sync: the durability class; compact: gives the events of the present state, for a new generation; it is called when
    the file has grown beyond ``limit`` bytes and to twice its size after the last compaction.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sync: Sync = "process",
        compact: Callable[[], Iterable[Event]] = tuple,
        limit: int = 64 << 20,
    ) -> None:
        self.directory = directory
        self.bytes = 0
        self._sync = sync
        self._compact = compact
        self._limit = limit
        self._compacted = 0
        self._fd = -1
        self._lock = -1
        self._buffer: list[bytes] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._sync_due = False
        self._broken: OSError | None = None

    def recover(self) -> Iterator[Event]:
        """Take the ledger for this process, give its events as it was left, and cut a torn end away.

        Raises LedgerCorrupt, and Refused while another process has it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / "lock", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            hint = "Only one controller may write a ledger; end the other one"
            raise Refused("another process holds the ledger", where=str(self.directory), hint=hint) from error
        path = newest(self.directory)
        if path is None:
            return
        data = path.read_bytes()
        sound = 0
        for event, end in _records(data, path):
            sound = end
            yield event
        if sound < len(data):
            os.truncate(path, sound)

    def begin(self, events: Iterable[Event]) -> None:
        """Start a new generation that holds ``events``, the whole present state, and append to it from now on."""
        self._buffer.clear()
        last = newest(self.directory)
        generation = int(last.stem) + 1 if last is not None else 1
        path = self.directory / f"{generation:012d}{_SUFFIX}"
        draft = path.with_suffix(".draft")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            self.bytes = self._compacted = _write(fd, b"".join(pack(event) for event in events))
            os.fsync(fd)
            draft.rename(path)
            _sync_directory(self.directory)
        except BaseException:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        for old in self.directory.glob(f"*{_SUFFIX}"):
            if old != path:
                old.unlink()

    def append(self, events: Iterable[Event]) -> None:
        """Take ``events`` for the next group that is written; ``flushed`` says when they are safe."""
        self._buffer += [pack(event) for event in events]

    async def flushed(self) -> None:
        """Wait until everything appended before is as safe as ``sync`` says.

        Raises OSError when it cannot be; nothing is written after that, and this raises ever after.
        """
        if self._broken is not None:
            raise self._broken
        if not self._buffer and self._writer is None:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._write_soon()
        await done

    async def close(self) -> None:
        """Write what is left, sync it, and close the file."""
        await self.flushed()
        if self._late is not None:
            self._late.cancel()
        if self._writer is not None:
            await asyncio.wait([self._writer])
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            os.close(self._lock)
            self._fd = -1

    def _write_soon(self) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_groups(), name="ledger")

    async def _write_groups(self) -> None:
        while self._broken is None and (self._waiting or self._sync_due):
            waiting, self._waiting = self._waiting, []
            group, self._buffer = b"".join(self._buffer), []
            try:
                self.bytes += _write(self._fd, group)
                await self._make_safe()
                if self.bytes > max(self._limit, 2 * self._compacted):
                    self.begin(self._compact())
            except OSError as error:
                self._broken = error
            for future in waiting if self._broken is None else waiting + self._waiting:
                if future.done():
                    continue
                if self._broken is None:
                    future.set_result(None)
                else:
                    future.set_exception(self._broken)
        self._writer = None

    async def _make_safe(self) -> None:
        if self._sync == "always" or self._sync_due:
            self._sync_due = False
            await asyncio.to_thread(os.fdatasync, self._fd)
        elif self._sync == "interval" and self._late is None:
            self._late = asyncio.get_running_loop().call_later(_INTERVAL_S, self._sync_late)

    def _sync_late(self) -> None:
        self._late, self._sync_due = None, True
        self._write_soon()


def _write(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
