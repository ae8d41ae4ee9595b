"""The write-ahead log of a queue: a file of checksummed records, which is sometimes compacted into a new file.

A ledger is a folder with ``NNNNNNNNNNNN.wal``. A record is ``magic, length, crc32, payload`` with a msgpack payload.
Magic and checksum distinguish the end of the log, which may be torn, from damage within it. A compaction writes the
next generation of the file under a temporary name and renames it. Older files are then removed, so the highest
generation is always whole. The rename is final: the older file is never written to again.

Invariants: records that ``commit`` has confirmed survive a crash of the class that ``sync`` covers (``process``: a
crash of this process; ``interval``: a crash of the machine, except for the last second; ``always``: a crash of the
machine). Reading returns a prefix of the written records: a record torn at the end is cut off; damage before an intact
record, or another format, raises LedgerCorrupt. After a failed write, as on a full disk, nothing more is written, and
the records confirmed before are whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from asyncflow import durable
from asyncflow.errors import LedgerCorrupt, Refused
from asyncflow.queue.ledger.events import Event
from asyncflow.rpc.columns import weighed_batches

log = logging.getLogger(__name__)

Sync = Literal["process", "interval", "always"]

_INTERVAL_S = 1.0
_CHUNK = 1 << 20
_MAGIC = b"\xa5AF3"
_ANY_FORMAT = _MAGIC[:3]
_HEADER = struct.Struct("<4sII")
_GENERATIONS = "[0-9]" * 12 + ".wal"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


def pack(event: Event) -> bytes:
    """Encode ``event`` as one record."""
    payload = _encode(event)
    size = len(payload)
    return _HEADER.pack(_MAGIC, size, zlib.crc32(payload, size)) + payload


def read_ledger(directory: Path) -> Iterator[Event]:
    """Yield the events of a ledger in order, none if there is no ledger. Changes no file. Raises LedgerCorrupt."""
    while (path := newest(directory)) is not None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        yield from (event for event, _ in records(data, path))
        return


def newest(directory: Path) -> Path | None:
    """Return the file of the highest generation."""
    return max(directory.glob(_GENERATIONS), default=None)


def records(data: bytes, path: Path) -> Iterator[tuple[Event, int]]:
    """Yield each event and the end of its record; stop at a torn end."""
    view, start = memoryview(data), 0
    while start < len(data):
        end = _intact_end(view, start)
        if end is None:
            _check_torn(data, start, path)
            return
        try:
            yield _decode(view[start + _HEADER.size : end]), end
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            raise LedgerCorrupt(f"the record at byte {start} is invalid: {wrong}", where=str(path)) from wrong
        start = end


def _intact_end(view: memoryview, start: int) -> int | None:
    """Return the end of the record at ``start``, or None if there is no intact record."""
    body = start + _HEADER.size
    if body > len(view):
        return None
    magic, length, checksum = _HEADER.unpack_from(view, start)
    end = body + int(length)
    if magic != _MAGIC or end > len(view) or zlib.crc32(view[body:end], length) != checksum:
        return None
    return end


def _check_torn(data: bytes, start: int, path: Path) -> None:
    """Raise LedgerCorrupt if an intact record follows the damage at ``start``, or if the ledger has another format."""
    view, after = memoryview(data), data.find(_MAGIC, start + 1)
    while after >= 0:
        if _intact_end(view, after) is not None:
            hint = "Restore the file from a copy; nothing was changed"
            raise LedgerCorrupt(f"the record at byte {start} is damaged", where=str(path), hint=hint)
        after = data.find(_MAGIC, after + 1)
    magic = data[: len(_MAGIC)]
    if start == 0 and magic.startswith(_ANY_FORMAT) and magic not in (_ANY_FORMAT, _MAGIC):
        found, own = (name[1:].decode(errors="replace") for name in (magic, _MAGIC))
        hint = "Use the version of AsyncFlow that wrote it, or start with an empty folder; nothing was changed"
        what = f"the ledger has the format {found}, but this version reads and writes {own}"
        raise LedgerCorrupt(what, where=str(path), hint=hint)


class Ledger:
    """The log of one controller, open for appending.

    sync: the durability class; compact: returns the events of the current state for a new generation. It is called when
    the file is larger than ``limit`` bytes and twice its size after the last compaction. syncs, sync_s: number of syncs
    of the file to disk, and the seconds that they took.
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
        self.bytes = self.syncs = self._compacted = 0
        self.sync_s = 0.0
        self._sync = sync
        self._compact = compact
        self._limit = limit
        self._fd = self._lock = -1
        self._buffer: list[bytes] = []
        self._group: asyncio.Future[None] | None = None
        self._current_group: asyncio.Future[None] | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._unsafe_since: float | None = None
        self._broken: OSError | None = None

    def recover(self) -> Iterator[Event]:
        """Lock the ledger for this process, yield its events, and cut off a torn end.

        Raises LedgerCorrupt, and Refused while another process holds the ledger.
        """
        durable.make_folder(self.directory)
        lock = os.open(self.directory / "lock", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            hint = "Only one controller may write a ledger; end the other one"
            raise Refused("another process holds the ledger", where=str(self.directory), hint=hint) from error
        self._lock = lock
        path = newest(self.directory)
        if path is None:
            return
        data = path.read_bytes()
        intact = 0
        for event, end in records(data, path):
            intact = end
            yield event
        if intact < len(data):
            os.truncate(path, intact)

    def begin(self, events: Iterable[Event]) -> None:
        """Start a new generation with ``events``, which make up the whole current state, and append to it from then on.

        Raises OSError if it cannot be written. Nothing has changed then, unless the rename or a step after it failed:
        in that case it is unknown which file the next start will find, and nothing more is written.
        """
        self._buffer.clear()
        last = newest(self.directory)
        path = self.directory / f"{int(last.stem) + 1 if last is not None else 1:012d}.wal"
        draft = path.with_suffix(".draft")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            chunks = weighed_batches(map(pack, events), len, heaviest=_CHUNK)
            size = sum(_write(fd, b"".join(records)) for records in chunks)
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        self.bytes = self._compacted = size
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        try:
            draft.rename(path)
            durable.sync(self.directory)
        except OSError as error:
            self._broken = error
            raise
        for old in self.directory.glob(_GENERATIONS):
            if old != path:
                _remove(old)

    def append(self, events: Iterable[Event]) -> None:
        """Queue ``events`` for the next ``commit``."""
        self._buffer += [pack(event) for event in events]

    def commit(self) -> asyncio.Future[None] | None:
        """Write the appended events; return a future that is done when they are as safe as ``sync`` says.

        Returns None if they are already. Raises OSError, or sets it in the future, if they cannot be written; nothing
        is written after that.
        """
        if self._broken is not None:
            raise self._broken
        if self._buffer:
            self._write_out()
            if self._sync != "process":
                self._sync_soon()
        return (self._group or self._current_group) if self._sync == "always" else None

    async def flushed(self) -> None:
        """Wait until everything appended before is as safe as ``sync`` says. Raises OSError if that fails."""
        if (pending := self.commit()) is not None:
            await pending

    async def synced(self) -> None:
        """Wait until everything appended before is on disk, regardless of ``sync``. Raises OSError if that fails."""
        await self.flushed()
        if self._sync == "always":
            return
        try:
            await asyncio.to_thread(_sync, os.dup(self._fd))
        except OSError as error:
            self._broken = error
            raise

    def lag(self) -> float:
        """Return for how many seconds the oldest record has not been as safe as ``sync`` says; 0 if there is none."""
        return 0.0 if self._unsafe_since is None else asyncio.get_running_loop().time() - self._unsafe_since

    async def close(self) -> None:
        """Write the appended events, sync the file, and close it."""
        await self.flushed()
        await self._finish_syncing()
        if self._fd >= 0:
            os.fsync(self._fd)
        self.release()

    async def abandon(self) -> None:
        """Wait for a sync in progress, and close the file without another one."""
        await self._finish_syncing()
        self.release()

    async def _finish_syncing(self) -> None:
        if self._syncing is not None:
            if self._sync == "interval":
                self._syncing.cancel()
            await asyncio.wait([self._syncing])

    def release(self) -> None:
        """Close the file as it is, and unlock the ledger for other processes."""
        for file in (self._fd, self._lock):
            if file >= 0:
                os.close(file)
        self._fd = self._lock = -1

    def _write_out(self) -> None:
        """Write the appended events; compact the file if it has grown too long."""
        data, self._buffer = b"".join(self._buffer), []
        try:
            self.bytes += _write(self._fd, data)
        except OSError as error:
            self._broken = error
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.bytes)
            raise
        if self.bytes > max(self._limit, 2 * self._compacted):
            self._compact_now()

    def _compact_now(self) -> None:
        try:
            self.begin(self._compact())
        except OSError as error:
            if self._broken is not None:
                raise
            self._compacted = self.bytes
            log.warning("the ledger was not compacted and stays in the old file: %s", error)

    def _sync_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._group is None:
            self._group = loop.create_future()
        if self._unsafe_since is None:
            self._unsafe_since = loop.time()
        if self._syncing is None:
            self._syncing = asyncio.create_task(self._sync_groups(), name="ledger")

    async def _sync_groups(self) -> None:
        """Sync group after group, after a pause for ``interval``; events written meanwhile form the next group."""
        while self._group is not None:
            if self._sync == "interval":
                await asyncio.sleep(_INTERVAL_S)
            self._current_group, self._group, started = self._group, None, asyncio.get_running_loop().time()
            try:
                await asyncio.to_thread(_sync, os.dup(self._fd))
            except OSError as error:
                self._broken = error
                for waiting in filter(None, (self._current_group, self._group)):
                    waiting.set_exception(error)
                    waiting.exception()
                self._group = None
                break
            self.syncs, self.sync_s = self.syncs + 1, self.sync_s + asyncio.get_running_loop().time() - started
            self._current_group.set_result(None)
            self._unsafe_since = started if self._group is not None else None
        self._syncing = self._current_group = None


def _sync(fd: int) -> None:
    """Sync the file to disk, and close ``fd``, a duplicate, since the file may be replaced during the sync."""
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _write(fd: int, data: bytes) -> int:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
    return done


def _remove(old: Path) -> None:
    """Remove an older generation. If that fails, the file is not read, and the next compaction tries again."""
    try:
        old.unlink()
    except OSError as error:
        log.warning("%s was replaced, but cannot be removed: %s", old, error)
