"""The file of spans of one life of one process: written while it runs, readable at any time, even after a kill.

    0     magic, length, checksum, JSON: role, index, attempt, pid, names of kinds and of reasons to wait
    2048  two copies of the state, written alternately: current activity of the process, time of the write, and the
    3072  seconds by kind and by reason to wait since its start
    4096  a ring of records, one for each ended span

Invariants: all data is in the kernel when a call returns, so SIGKILL loses nothing. Every record has a number and a
checksum, and one of the two states is always intact, so data that a crash of the machine damaged is detected and
skipped. The file never exceeds its limit: new records overwrite the oldest ones, and the seconds by kind stay exact. A
full disk makes the ring smaller, and a failing one ends the recording, never the process.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from asyncflow.timeline.tracks import KINDS, WAITS, Kind, Span, Track

log = logging.getLogger(__name__)

MOST_BYTES: Final = 4 << 20
"""Default limit of a file: 104,755 records."""

_MAGIC: Final = b"AFspans1"
_HEAD = struct.Struct("<8sII")
_RECORD = struct.Struct("<QBBBxiiddI")
"""Number from 1, kind, reason, 1 if background, step, version, begin, end, checksum of the preceding bytes."""
_STATE = struct.Struct("<QdddBBBxii")
"""Number from 1, start of the process, time of the write; of the main span: begin, kind, reason; 1 after the end; step,
version."""
_MANY: Final = 32
"""Maximum number of kinds, and of reasons, in a state."""
_SECONDS = struct.Struct(f"<{_MANY}d")
_SUM = struct.Struct("<I")
_STATE_AT: Final = (2048, 3072)
_STATE_BYTES: Final = _STATE.size + 3 * _SECONDS.size
_RING_AT: Final = 4096
_KIND: Final = {kind: index for index, kind in enumerate(KINDS)}
_WAIT: Final = {waits: index for index, waits in enumerate(WAITS)}
_ROUNDING_S: Final = 1e-6
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class _Head(msgspec.Struct, kw_only=True):
    role: str
    index: int
    attempt: int
    pid: int
    kinds: list[str]
    waits: list[str]


class SpanFile:
    """Writer of a file of spans. Raises OSError if the file cannot be created.

    began: start of the process, Unix seconds; most_bytes: maximum size of the file.
    """

    def __init__(
        self, path: Path, *, role: str, index: int, attempt: int, began: float, most_bytes: int = MOST_BYTES
    ) -> None:
        self._began = began
        self._seconds = [0.0] * (2 * _MANY)
        self._background = [0.0] * _MANY
        self._written = self._states = self._place = 0
        self._places = max(1, (most_bytes - _RING_AT) // _RECORD.size)
        self._buffer = bytearray(_STATE_BYTES + _SUM.size)
        head = _Head(role=role, index=index, attempt=attempt, pid=os.getpid(), kinds=[*KINDS], waits=[*WAITS])
        packed = msgspec.json.encode(head)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._put(_HEAD.pack(_MAGIC, len(packed), zlib.crc32(packed)) + packed, 0)

    @property
    def open(self) -> bool:
        """True while the file can be written."""
        return self._file >= 0

    def add(self, span: Span, *, background: bool) -> None:
        """Add an ended span."""
        if not background:
            self._seconds[_KIND[span.kind]] += span.seconds
            self._seconds[_MANY + _WAIT[span.waits]] += span.seconds if span.kind == "idle" else 0.0
        self._written += 1
        what = (_KIND[span.kind], _WAIT[span.waits], background, span.step, span.version, span.begin, span.end)
        packed = bytearray(_RECORD.pack(self._written, *what, 0))
        _SUM.pack_into(packed, _RECORD.size - _SUM.size, zlib.crc32(packed[: -_SUM.size]))
        if self._place == self._places:
            self._place = 0
        if not self._put(packed, _RING_AT + self._place * _RECORD.size) and self._place:
            self._places, self._place = self._place, 0
            self._put(packed, _RING_AT)
        self._place += 1

    def runs(self, kind: Kind, *, since: float) -> None:
        """Set the start of the running background span of ``kind``, 0 for none, in the next state."""
        self._background[_KIND[kind]] = since

    def keep(self, main: Span, *, ended: bool = False) -> None:
        """Write the state. main: the running main span, with the current time as its end."""
        self._states += 1
        what = (_KIND[main.kind], _WAIT[main.waits], ended, main.step, main.version)
        _STATE.pack_into(self._buffer, 0, self._states, self._began, main.end, main.begin, *what)
        for number, seconds in enumerate((self._seconds[:_MANY], self._seconds[_MANY:], self._background)):
            _SECONDS.pack_into(self._buffer, _STATE.size + number * _SECONDS.size, *seconds)
        _SUM.pack_into(self._buffer, _STATE_BYTES, zlib.crc32(memoryview(self._buffer)[:_STATE_BYTES]))
        self._put(self._buffer, _STATE_AT[self._states % 2])

    def close(self) -> None:
        """Stop recording."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _put(self, packed: bytes | bytearray, at: int) -> bool:
        """Write, and return False if the disk is full; any other error of the disk ends the recording."""
        if self._file < 0:
            return True
        try:
            return os.pwrite(self._file, packed, at) == len(packed)
        except OSError as error:
            if error.errno in _FULL:
                return False
            log.warning("recording of the timeline ends: %s", error)
            self.close()
            return True


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The content of a file of spans.

    track: of this life, as far as its spans are still in the ring; ended: whether the process recorded its end; seen:
    time of its last write, Unix seconds; wrapped: whether spans were overwritten; seconds: by kind and by reason to
    wait (``idle: REASON``) since the start of the process, independent of the ring.
    """

    track: Track
    ended: bool
    seen: float
    wrapped: bool
    seconds: Mapping[str, float]


def read_recording(path: Path) -> Recording | None:
    """Read a file of spans, which may still be written; None if it is not such a file, or holds no span yet.

    Raises OSError if it cannot be read.
    """
    data = path.read_bytes()
    head = _head_of(data)
    state = max((_state_of(data, at) for at in _STATE_AT), key=lambda state: state.number)
    if head is None or not state.number:
        return None
    main, background = _records_of(data, head)
    begin = max(main[-1].end, state.since) if main else state.since
    if not state.ended and (state.seen > begin or not main):
        main.append(
            _span(head, state.kind, state.waits, step=state.step, version=state.version, begin=begin, end=state.seen)
        )
    for index, begin in enumerate(state.background[: len(head.kinds)]):
        if begin:
            background.append(_span(head, index, 0, step=-1, version=-1, begin=begin, end=max(begin, state.seen)))
    if not main:
        return None
    seconds = {kind: spent for kind, spent in zip(head.kinds, state.kinds, strict=False) if spent}
    seconds |= {f"idle: {why}": spent for why, spent in zip(head.waits, state.reasons, strict=False) if spent}
    track = Track(
        role=head.role,
        index=head.index,
        attempt=head.attempt,
        main=_without_gaps(main),
        background=sorted(background, key=_begin_of),
        killed=not state.ended,
    )
    return Recording(
        track=track,
        ended=bool(state.ended),
        seen=state.seen,
        wrapped=track.begin > state.began + _ROUNDING_S,
        seconds=seconds,
    )


class _State(NamedTuple):
    number: int = 0
    began: float = 0.0
    seen: float = 0.0
    since: float = 0.0
    kind: int = 0
    waits: int = 0
    ended: int = 0
    step: int = -1
    version: int = -1
    kinds: Sequence[float] = ()
    reasons: Sequence[float] = ()
    background: Sequence[float] = ()


def _head_of(data: bytes) -> _Head | None:
    if len(data) < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(data)
    packed = data[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or zlib.crc32(packed) != checksum:
        return None
    return msgspec.json.decode(packed, type=_Head)


def _state_of(data: bytes, at: int) -> _State:
    """Return the state at an offset, with number 0 if there is none or it is damaged."""
    packed = data[at : at + _STATE_BYTES + _SUM.size]
    if (
        len(packed) < _STATE_BYTES + _SUM.size
        or zlib.crc32(packed[:_STATE_BYTES]) != _SUM.unpack_from(packed, _STATE_BYTES)[0]
    ):
        return _State()
    sums = [_SECONDS.unpack_from(packed, _STATE.size + number * _SECONDS.size) for number in range(3)]
    return _State(*_STATE.unpack_from(packed), *sums)


def _records_of(data: bytes, head: _Head) -> tuple[list[Span], list[Span]]:
    """Return the intact main spans of the ring, and the intact background spans, in order."""
    found: list[tuple[int, bool, Span]] = []
    for at in range(_RING_AT, len(data) - _RECORD.size + 1, _RECORD.size):
        number, kind, waits, background, step, version, begin, end, checksum = _RECORD.unpack_from(data, at)
        if number and zlib.crc32(data[at : at + _RECORD.size - _SUM.size]) == checksum:
            span = _span(head, kind, waits, step=step, version=version, begin=begin, end=end)
            found.append((number, bool(background), span))
    found.sort(key=lambda record: record[0])
    main = [span for _, background, span in found if not background]
    return main, [span for _, background, span in found if background]


def _span(head: _Head, kind: int, waits: int, *, step: int, version: int, begin: float, end: float) -> Span:
    named = head.kinds[kind] if kind < len(head.kinds) else ""
    why = head.waits[waits] if waits < len(head.waits) else ""
    known: Kind = named if named in KINDS else "compute"
    return Span(kind=known, waits=why, step=step, version=version, begin=begin, end=end)


def _without_gaps(main: Sequence[Span]) -> list[Span]:
    """Return the main spans with each gap, left by a damaged record, filled by an idle span with the reason "lost"."""
    whole: list[Span] = []
    for span in main:
        if whole and span.begin > whole[-1].end:
            whole.append(Span(kind="idle", waits="lost", begin=whole[-1].end, end=span.begin))
        if not whole or span.begin == whole[-1].end:
            whole.append(span)
    return whole


def _begin_of(span: Span) -> float:
    return span.begin
