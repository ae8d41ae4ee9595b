"""The records of a ledger as bytes, and how they are read back.

A record is magic, length, CRC-32 of the payload seeded with the length, and the payload (msgpack). The magic names the
format; this version reads and writes one. A ledger is a folder with one file, ``<generation>.wal``; while it is being
replaced there are two.

Invariant: what is read is a prefix of what was written; it ends before the first record that is not whole, and
damage with a sound record behind it, or a ledger of another format, is LedgerCorrupt.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncflow.errors import LedgerCorrupt
from asyncflow.queue.ledger.events import Event

_MAGIC = b"\xa5AF2"
_ANY_FORMAT = _MAGIC[:3]
_HEADER = struct.Struct("<4sII")
SUFFIX = ".wal"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


def pack(event: Event) -> bytes:
    """Return ``event`` as one record."""
    payload = _encode(event)
    size = len(payload)
    return _HEADER.pack(_MAGIC, size, zlib.crc32(payload, size)) + payload


def read_ledger(directory: Path) -> Iterator[Event]:
    """Yield the events of a ledger in order; nothing where there is none. Changes no file. Raises LedgerCorrupt."""
    while (path := newest(directory)) is not None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        yield from (event for event, _ in records(data, path))
        return


def newest(directory: Path) -> Path | None:
    """Return the file of the highest generation."""
    return max(directory.glob(f"*{SUFFIX}"), default=None)


def _checksum(payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, len(payload))


def records(data: bytes, path: Path) -> Iterator[tuple[Event, int]]:
    """Yield each event and where its record ends; stop at a torn end."""
    view, start = memoryview(data), 0
    while start < len(data):
        end = _sound(view, start)
        if end is None:
            _check_torn(data, start, path)
            return
        try:
            yield _decode(view[start + _HEADER.size : end]), end
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            raise LedgerCorrupt(f"the record at byte {start} is none: {wrong}", where=str(path)) from wrong
        start = end


def _sound(view: memoryview, start: int) -> int | None:
    """Return the end of the record at ``start``; None if none is whole there."""
    body = start + _HEADER.size
    if body > len(view):
        return None
    magic, length, checksum = _HEADER.unpack_from(view, start)
    end = body + int(length)
    if magic != _MAGIC or end > len(view) or _checksum(view[body:end]) != checksum:
        return None
    return end


def _check_torn(data: bytes, start: int, path: Path) -> None:
    """Refuse damage at ``start`` unless nothing sound comes after it, and a ledger of another format."""
    view, after = memoryview(data), data.find(_MAGIC, start + 1)
    while after >= 0:
        if _sound(view, after) is not None:
            hint = "Restore the file from a copy; nothing was changed"
            raise LedgerCorrupt(f"the record at byte {start} is damaged", where=str(path), hint=hint)
        after = data.find(_MAGIC, after + 1)
    magic = data[: len(_MAGIC)]
    if start == 0 and magic.startswith(_ANY_FORMAT) and magic not in (_ANY_FORMAT, _MAGIC):
        theirs, ours = (name[1:].decode(errors="replace") for name in (magic, _MAGIC))
        hint = "Go on with the version of AsyncFlow that wrote it, or start with an empty folder; nothing was changed"
        what = f"the ledger has the format {theirs}, but this version reads and writes {ours}"
        raise LedgerCorrupt(what, where=str(path), hint=hint)
