"""Spans of a process, which it records itself, and their reading as the timeline of a run.

A process has one recorder, which writes ``DIR/spans/ROLE-INDEX-ATTEMPT.spans`` (``span_file``). Its *main* span is
exclusive: ``enter`` ends one and begins the next; ``main`` goes on afterwards with what was before. *Beside* it run
others, of each kind their union: it begins with the first and ends with the last. A recorder without a file records
nothing, so that nobody has to ask whether there is one.

Invariants: the main spans of a process fill its life without a gap; what nobody recorded any more, as the process was
killed, is there as idle and lost; the clock is ``clock.now``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from asyncflow import clock
from asyncflow.errors import ManifestError
from asyncflow.telemetry.span_file import MOST_BYTES, Recording, SpanFile, read_recording
from asyncflow.timeline.tracks import Kind, Mark, Span, Timeline, Track

log = logging.getLogger(__name__)

FOLDER: Final = "spans"
ENDING: Final = ".spans"
_EVENTS: Final = "events.jsonl"
_STARTED, _LAST = "driver started", ("Succeeded", "Suspended")
_LEAST_CPU_S: Final = 0.02
_SILENT_S: Final = 5.0
"""Seconds after which a process that did not say that it ended is taken for killed: ten pulses."""
_TOGETHER_S: Final = 20.0
"""Seconds within which the processes of a role start together."""


class Spans:
    """Records what this process does. Thread-safe.

    path: the file, None to record nothing; began: when the process began, by default now; most_bytes: limit of the
    file; now: the clock.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        role: str = "",
        index: int = 0,
        attempt: int = 0,
        began: float | None = None,
        most_bytes: int = MOST_BYTES,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._kind: Kind = "starting"
        self._waits = ""
        self._step = self._version = -1
        self._since = now() if began is None else began
        self._beside: dict[Kind, list[Span]] = {}
        self._cpu: float | None = None
        self._file: SpanFile | None = None
        if path is None:
            return
        try:
            self._file = SpanFile(
                path, role=role, index=index, attempt=attempt, began=self._since, most_bytes=most_bytes
            )
            self._keep()
        except OSError as error:
            log.warning("%s cannot be written, no timeline is recorded: %s", path, error)

    @classmethod
    def of(cls, folder: Path, *, role: str, index: int, attempt: int, began: float) -> Spans:
        """Return the recorder of one life of one process in the folder of a run."""
        path = folder / FOLDER / f"{role}-{index}-{attempt}{ENDING}"
        return cls(path, role=role, index=index, attempt=attempt, began=began)

    def enter(self, kind: Kind, *, waits: str = "", step: int | None = None, version: int | None = None) -> None:
        """End the main span, and begin one of ``kind``; nothing happens where that is what runs.

        waits: of ``WAITS``, why it is idle; step, version: as before where None, -1 for none.
        """
        if self._file is None:
            return
        with self._lock:
            step = self._step if step is None else step
            version = self._version if version is None else version
            if (kind, waits, step, version) == (self._kind, self._waits, self._step, self._version):
                return
            self._end_main(self._now())
            self._kind, self._waits, self._step, self._version = kind, waits, step, version
            self._keep()

    @contextmanager
    def main(
        self, kind: Kind, *, waits: str = "", step: int | None = None, version: int | None = None
    ) -> Iterator[None]:
        """Make the body the main span, and go on afterwards with what was before; see ``enter``."""
        before = (self._kind, self._waits, self._step, self._version)
        self.enter(kind, waits=waits, step=step, version=version)
        try:
            yield
        finally:
            self.enter(before[0], waits=before[1], step=before[2], version=before[3])

    @contextmanager
    def beside(self, kind: Kind, *, step: int = -1, version: int = -1) -> Iterator[None]:
        """Record the body beside the main span; bodies of one kind that overlap are one span, named by the first."""
        if self._file is None:
            yield
            return
        with self._lock:
            running = self._beside.setdefault(kind, [])
            now = self._now()
            running.append(Span(kind=kind, begin=now, end=now, step=step, version=version))
            if len(running) == 1:
                self._file.runs(kind, since=now)
                self._keep()
        try:
            yield
        finally:
            with self._lock:
                span = running.pop()
                if not running:
                    self._file.runs(kind, since=0.0)
                    self._file.add(msgspec.structs.replace(span, end=self._now()), beside=True)
                    self._keep()

    def note(self, kind: Kind, *, begin: float, end: float, step: int = -1, version: int = -1) -> None:
        """Record a span beside that is over already."""
        if self._file is None:
            return
        with self._lock:
            self._file.add(Span(kind=kind, begin=begin, end=end, step=step, version=version), beside=True)
            self._keep()

    def serve(self, *, waits: str) -> None:
        """Record from now on, at each ``pulse``, the CPU time since the last one as ``compute``, and the rest as idle.

        For a process that does very much that is very short: when it worked is known up to a pulse, how long exactly.
        """
        self.enter("idle", waits=waits)
        self._cpu = time.process_time()

    def pulse(self) -> None:
        """Record that the process is there."""
        with self._lock:
            if self._cpu is not None and self._kind == "idle":
                self._count_cpu(self._cpu)
            self._keep()

    def close(self) -> None:
        """End what runs, record that the process ended by itself, and record nothing more."""
        with self._lock:
            if self._file is not None:
                self._end_main(self._now())
                self._keep(ended=True)
                self._file.close()
                self._file = None

    def _count_cpu(self, before: float) -> None:
        now, used = self._now(), time.process_time() - before
        if used < _LEAST_CPU_S:
            return
        self._cpu = before + used
        self._end_main(now - used)
        waits, self._kind, self._waits = self._waits, "compute", ""
        self._end_main(now)
        self._kind, self._waits = "idle", waits

    def _end_main(self, now: float) -> None:
        """End the main span, and let the next one begin."""
        span = self._main(now)
        self._since = span.end
        if self._file is not None and span.seconds > 0:
            self._file.add(span, beside=False)

    def _keep(self, *, ended: bool = False) -> None:
        if self._file is not None:
            self._file.keep(self._main(self._now()), ended=ended)

    def _main(self, now: float) -> Span:
        return Span(
            kind=self._kind,
            waits=self._waits,
            step=self._step,
            version=self._version,
            begin=self._since,
            end=max(now, self._since),
        )


NO_SPANS: Final = Spans()
"""The recorder of whoever has no file."""


def read_timeline(folder: Path) -> Timeline:
    """Read the timeline of a run, also of one that is going on, or was killed, from its folder.

    The window is that of ``wall_s``: from the start of the first driver to the end of the run. Where rings have let go
    of older spans, it begins where all still have theirs. The time in which a process was not there is idle, its reason
    ``lost`` behind a life of it, ``start`` before one, but for that in which nothing of the job was there, or a rollout
    that had left was not wanted. Raises ManifestError where nothing was recorded.
    """
    files = sorted((folder / FOLDER).glob(f"*{ENDING}"))
    lives = [recording for path in files if (recording := read_recording(path)) is not None]
    if not lives:
        hint = "Give the folder of a run that this version of AsyncFlow made"
        raise ManifestError("no spans were recorded there", where=str(folder), hint=hint)
    events = _events_of(folder)
    seen = max(life.seen for life in lives)
    starts = [event.at for event in events if event.event == _STARTED] or [min(life.track.begin for life in lives)]
    ended = max((event.at for event in events if event.event in _LAST and event.at > starts[-1]), default=seen)
    kept = max((life.track.begin for life in lives if life.wrapped), default=starts[0])
    tracks = _tracks_of(lives, began=starts[0], ended=ended, seen=seen)
    return Timeline(
        tracks=tracks,
        marks=sorted([*_marks_of(events), *_changes_of(tracks, ended=ended)], key=_at),
        begin=max(starts[0], kept),
        end=ended,
    )


class _Event(msgspec.Struct, kw_only=True):
    event: str
    at: float
    step: int = -1


def _events_of(folder: Path) -> list[_Event]:
    """Return the lines of ``events.jsonl`` that can be read, in their order."""
    try:
        lines = (folder / _EVENTS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            events.append(msgspec.json.decode(line, type=_Event))
    return events


def _tracks_of(lives: Sequence[Recording], *, began: float, ended: float, seen: float) -> list[Track]:
    """Return the tracks in order, with the time in which their processes should have been there and were not.

    A life that did not say that it ended was killed where another followed, or where it has been silent for a while.
    """
    there = _union((life.track.begin, life.track.end) for life in lives)
    by_name: defaultdict[str, list[Recording]] = defaultdict(list)
    for life in sorted(lives, key=lambda life: (life.track.role, life.track.index, life.track.begin)):
        by_name[life.track.name].append(life)
    firsts: dict[tuple[str, float], float] = {}
    for life in lives:
        key = life.track.role, _up_since(there, life.track)
        firsts[key] = min(life.track.begin, firsts.get(key, life.track.begin))
    tracks: list[Track] = []
    for own in by_name.values():
        before, unasked = own[0].track.begin if own[0].wrapped else min(began, own[0].track.begin), True
        for life, after in zip(own, [*own[1:], None], strict=True):
            track, main = life.track, list(life.track.main)
            killed = not life.ended and (after is not None or seen - life.seen > _SILENT_S)
            back = _up_since(there, track)
            late = unasked and track.begin > firsts[track.role, back] + _TOGETHER_S
            if not late and max(back, before) < track.begin:
                main.insert(0, Span(kind="idle", waits="start", begin=max(back, before), end=track.begin))
            until = after.track.begin if after is not None else ended if killed else track.end
            gone = min(next(end for begin, end in there if begin <= track.end <= end), until)
            unasked = _left(track)
            if track.end < gone and not unasked:
                main.append(Span(kind="idle", waits="lost", begin=track.end, end=gone))
            before = max(gone, track.end)
            tracks.append(msgspec.structs.replace(track, main=main, killed=killed))
    return tracks


def _up_since(there: Sequence[tuple[float, float]], track: Track) -> float:
    """Return since when anything of the job was there, up to the begin of a track."""
    return max((begin for begin, _ in there if begin <= track.begin), default=track.begin)


def _left(track: Track) -> bool:
    """Return whether a rollout went as it was told to, and handed its work on: until it comes again nobody lacks it."""
    return track.role == "rollout" and not track.killed and track.main[-1].waits == "end"


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as intervals in order that do not touch."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def _marks_of(events: Sequence[_Event]) -> list[Mark]:
    return [Mark(at=event.at, what=event.event, of=f"step {event.step}" if event.step >= 0 else "") for event in events]


def _changes_of(tracks: Sequence[Track], *, ended: float) -> list[Mark]:
    """Return the kills, the restarts, and what joined or left while the job went on."""
    marks: list[Mark] = []
    for place, track in enumerate(tracks):
        again = place > 0 and tracks[place - 1].name == track.name
        follows = place + 1 < len(tracks) and tracks[place + 1].name == track.name
        there = [span for span in track.main if span.waits not in ("lost", "start")]
        late = track.main[0].waits != "start" and track.begin > min(one.begin for one in tracks) + _TOGETHER_S
        if again and not _left(tracks[place - 1]):
            marks.append(Mark(at=there[0].begin, what="started again", of=track.name))
        elif again or late:
            marks.append(Mark(at=there[0].begin, what="joined", of=track.name))
        if track.killed:
            marks.append(Mark(at=there[-1].end, what="killed", of=track.name))
        elif (_left(track) or not follows) and there[-1].end < ended:
            marks.append(Mark(at=there[-1].end, what="left", of=track.name))
    return marks


def _at(mark: Mark) -> float:
    return mark.at
