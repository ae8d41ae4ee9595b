"""Recording of a process's own spans, and reading of all recordings as the timeline of a run.

A process has one recorder, which writes ``DIR/spans/ROLE-INDEX-ATTEMPT.spans`` (``span_file``). At any time it has
exactly one *main* span: ``enter`` ends it and begins the next one; ``main`` returns to the previous one afterwards.
Other spans run in the *background*. Overlapping ones of one kind are merged: the span begins with the first and ends
with the last. A recorder without a file records nothing, so callers need not check whether there is one.

Invariants: the main spans of a process fill its life without a gap. The time after the last record of a killed process
is shown as idle with the reason "lost". The clock is ``clock.now``.
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
"""Seconds of silence after which a process that did not record its end counts as killed: ten pulses."""
_TOGETHER_S: Final = 20.0
"""Maximum seconds between the starts of processes of a role that start together."""


class Spans:
    """Recorder of the activity of this process. Thread-safe.

    path: the file, None to record nothing; began: start of the process, by default now; most_bytes: maximum size of the
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
        self._background: dict[Kind, list[Span]] = {}
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
        """End the main span, and begin one of ``kind``; do nothing if the same span is already running.

        waits: the reason for being idle, from ``WAITS``; step, version: None to keep the current one, -1 for none.
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
        """Make the body the main span, and return to the previous one afterwards; see ``enter``."""
        before = (self._kind, self._waits, self._step, self._version)
        self.enter(kind, waits=waits, step=step, version=version)
        try:
            yield
        finally:
            self.enter(before[0], waits=before[1], step=before[2], version=before[3])

    @contextmanager
    def background(self, kind: Kind, *, step: int = -1, version: int = -1) -> Iterator[None]:
        """Record the body as a background span. Overlapping bodies of one kind form one span, named by the first."""
        if self._file is None:
            yield
            return
        with self._lock:
            running = self._background.setdefault(kind, [])
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
                    self._file.add(msgspec.structs.replace(span, end=self._now()), background=True)
                    self._keep()

    def note(self, kind: Kind, *, begin: float, end: float, step: int = -1, version: int = -1) -> None:
        """Record an ended background span."""
        if self._file is None:
            return
        with self._lock:
            self._file.add(Span(kind=kind, begin=begin, end=end, step=step, version=version), background=True)
            self._keep()

    def serve(self, *, waits: str) -> None:
        """From now on record, at each ``pulse``, the CPU time since the last one as ``compute``, and the rest as idle.

        For a process with many very short activities: their total time is exact, their position exact to one pulse.
        """
        self.enter("idle", waits=waits)
        self._cpu = time.process_time()

    def pulse(self) -> None:
        """Record that the process is alive."""
        with self._lock:
            if self._cpu is not None and self._kind == "idle":
                self._count_cpu(self._cpu)
            self._keep()

    def close(self) -> None:
        """End the main span, record the regular end of the process, and stop recording."""
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
        """End the main span, and begin the next one."""
        span = self._main(now)
        self._since = span.end
        if self._file is not None and span.seconds > 0:
            self._file.add(span, background=False)

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
"""A recorder without a file."""


def read_timeline(folder: Path) -> Timeline:
    """Read the timeline of a run from its folder, even if the run has not ended or was killed.

    The window is that of ``wall_s``: from the start of the first driver to the end of the run. If rings have
    overwritten old spans, it begins where all rings are complete. Time in which a process did not exist is idle: with
    the reason ``lost`` after a life of the process, ``start`` before one. It is omitted while no process of the job
    existed, and while a rollout that had left was not required. Raises ManifestError if there are no recordings.
    """
    files = sorted((folder / FOLDER).glob(f"*{ENDING}"))
    lives = [recording for path in files if (recording := read_recording(path)) is not None]
    if not lives:
        hint = "Use the folder of a run that this version of AsyncFlow made"
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
    """Return the valid lines of ``events.jsonl``, in order."""
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
    """Return the tracks in order, including the time in which their processes should have existed but did not.

    A life without a recorded end was killed if another life followed, or if it has been silent for a while.
    """
    job_up = _union((life.track.begin, life.track.end) for life in lives)
    by_name: defaultdict[str, list[Recording]] = defaultdict(list)
    for life in sorted(lives, key=lambda life: (life.track.role, life.track.index, life.track.begin)):
        by_name[life.track.name].append(life)
    firsts: dict[tuple[str, float], float] = {}
    for life in lives:
        key = life.track.role, _up_since(job_up, life.track)
        firsts[key] = min(life.track.begin, firsts.get(key, life.track.begin))
    tracks: list[Track] = []
    for own in by_name.values():
        before, optional = own[0].track.begin if own[0].wrapped else min(began, own[0].track.begin), True
        for life, after in zip(own, [*own[1:], None], strict=True):
            track, main = life.track, list(life.track.main)
            killed = not life.ended and (after is not None or seen - life.seen > _SILENT_S)
            up_since = _up_since(job_up, track)
            late = optional and track.begin > firsts[track.role, up_since] + _TOGETHER_S
            if not late and max(up_since, before) < track.begin:
                main.insert(0, Span(kind="idle", waits="start", begin=max(up_since, before), end=track.begin))
            until = after.track.begin if after is not None else ended if killed else track.end
            lost_until = min(next(end for begin, end in job_up if begin <= track.end <= end), until)
            optional = _left(track)
            if track.end < lost_until and not optional:
                main.append(Span(kind="idle", waits="lost", begin=track.end, end=lost_until))
            before = max(lost_until, track.end)
            tracks.append(msgspec.structs.replace(track, main=main, killed=killed))
    return tracks


def _up_since(job_up: Sequence[tuple[float, float]], track: Track) -> float:
    """Return the time since which at least one process of the job existed, up to the start of a track."""
    return max((begin for begin, _ in job_up if begin <= track.begin), default=track.begin)


def _left(track: Track) -> bool:
    """Return whether a rollout left on request, and returned its work: until it joins again it is not missing."""
    return track.role == "rollout" and not track.killed and track.main[-1].waits == "end"


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as disjoint intervals in order."""
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
    """Return marks for kills and restarts, and for processes that joined or left during the run."""
    marks: list[Mark] = []
    for place, track in enumerate(tracks):
        again = place > 0 and tracks[place - 1].name == track.name
        follows = place + 1 < len(tracks) and tracks[place + 1].name == track.name
        existing = [span for span in track.main if span.waits not in ("lost", "start")]
        late = track.main[0].waits != "start" and track.begin > min(one.begin for one in tracks) + _TOGETHER_S
        if again and not _left(tracks[place - 1]):
            marks.append(Mark(at=existing[0].begin, what="started again", of=track.name))
        elif again or late:
            marks.append(Mark(at=existing[0].begin, what="joined", of=track.name))
        if track.killed:
            marks.append(Mark(at=existing[-1].end, what="killed", of=track.name))
        elif (_left(track) or not follows) and existing[-1].end < ended:
            marks.append(Mark(at=existing[-1].end, what="left", of=track.name))
    return marks


def _at(mark: Mark) -> float:
    return mark.at
