"""The timeline as the page draws it: columns of numbers instead of objects, without spans shorter than a pixel.

Invariants:

* The spans of an answer are in order, and the lengths of main spans sum to the part of the track's life in the window.
  Spans that are too short to be seen are joined into one, which is described by the kind with most of their time.
* The size of an answer is bounded by its window and width, however long the run is.
* Reading takes at most a twentieth of one core: answers are made from the last reading until enough time has passed.
* Causes are computed again for the most recent part only.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncflow.errors import ManifestError
from asyncflow.telemetry.spans import read_timeline
from asyncflow.timeline.causes import attribute, shares
from asyncflow.timeline.tracks import CAUSES, KINDS, Mark, Span, Timeline

COLUMNS: Final = 1000
"""Number of columns into which a window is divided if the request sets no width."""
MOST_COLUMNS: Final = 6000
"""Most columns into which a window is divided."""
CHART_COLUMNS: Final = 200_000
"""Number of columns of the chart of a whole timeline in a file, which cannot request details."""
SETTLED_S: Final = 60.0
"""Seconds after which the cause of an idle span is final, since the spans of all other processes are recorded then."""
_READ_INTERVAL: Final = 20.0
"""Time between two readings, as a multiple of the CPU time of the last one."""
_KIND: Final = {kind: index for index, kind in enumerate(KINDS)}
_CAUSE: Final = {cause: index for index, cause in enumerate(CAUSES)}


class Timelines:
    """The timeline of the run in ``folder``, read again when enough time has passed. clock: monotonic seconds.

    The first answer has no causes, since these take longer to compute than the spans to read; the next answer has them.
    While one caller reads, other callers get the last known timeline.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._reading = threading.Lock()
        self._known: Timeline | None = None
        self._shares: dict[str, Any] = {}
        self._read_at = 0.0

    def shown(self, *, begin: float | None = None, end: float | None = None, width: float = 0.0) -> dict[str, Any]:
        """Return the part of the timeline between two times as ``shown`` does, and ``role_shares`` of the whole run.

        ``explained``: whether the causes are known.
        """
        known = self._known
        if known is None:
            with self._reading:
                known = self._known = self._known or self._read()
        elif self._clock() >= self._read_at and self._reading.acquire(blocking=False):
            try:
                known = self._known = self._with_causes()
            finally:
                self._reading.release()
        spent = self._shares if known is not None else {}
        return {**shown(known, begin=begin, end=end, width=width), "shares": spent, "explained": bool(spent)}

    def _read(self) -> Timeline | None:
        try:
            return read_timeline(self._folder)
        except ManifestError:
            return None

    def _with_causes(self) -> Timeline | None:
        now, used = self._clock(), time.thread_time()
        timeline = self._read()
        if timeline is None:
            self._shares = {}
            return None
        found = attributed(timeline, known=self._known if self._shares else None)
        self._shares = role_shares(found)
        self._read_at = now + _READ_INTERVAL * (time.thread_time() - used)
        return found


def attributed(timeline: Timeline, *, known: Timeline | None) -> Timeline:
    """Return the timeline with causes. known: an earlier timeline of the run, whose settled causes are reused."""
    settled = known.end - SETTLED_S if known is not None else 0.0
    if known is None or known.begin != timeline.begin or settled <= timeline.begin:
        return attribute(timeline)
    recent = attribute(timeline.since(settled))
    before = {(track.name, track.attempt): track for track in known.tracks}
    after = {(track.name, track.attempt): track for track in recent.tracks}
    tracks = []
    for track in timeline.tracks:
        key = track.name, track.attempt
        if key not in after:
            tracks.append(before.get(key, track))
        elif track.begin >= settled:
            tracks.append(after[key])
        elif key not in before or before[key].begin != track.begin or before[key].end < settled:
            return attribute(timeline)
        else:
            tracks.append(msgspec.structs.replace(track, main=_seamed(before[key].main, after[key].main, settled)))
    return msgspec.structs.replace(timeline, tracks=tracks)


def role_shares(timeline: Timeline) -> dict[str, list[tuple[str, str, str, float]]]:
    """Return for each role how its processes spent the time: kind, cause, awaited role, and seconds."""
    roles = {track.name: track.role for track in timeline.tracks}
    spent: dict[str, dict[tuple[str, str, str], float]] = defaultdict(lambda: defaultdict(float))
    for process in shares(timeline).values():
        by_activity = spent[process.role]
        for kind, seconds in process.kinds.items():
            by_activity[kind, "", ""] += seconds
        for cause, parts in process.by.items():
            for by, seconds in parts.items():
                by_activity["idle", cause, roles.get(by, by)] += seconds
    return {role: [(*what, round(seconds, 3)) for what, seconds in parts.items()] for role, parts in spent.items()}


def chart(timeline: Timeline) -> dict[str, Any]:
    """Return a whole timeline with causes as ``Timelines.shown`` does, with the resolution for a file."""
    width = (timeline.end - timeline.begin) / CHART_COLUMNS
    spent = role_shares(timeline)
    return {**shown(timeline, width=width, columns=CHART_COLUMNS), "shares": spent, "explained": True}


def shown(
    timeline: Timeline | None,
    *,
    begin: float | None = None,
    end: float | None = None,
    width: float = 0.0,
    columns: int = MOST_COLUMNS,
) -> dict[str, Any]:
    """Return a timeline's spans between two times (Unix seconds); short adjacent spans are joined.

    width: length in seconds below which spans are joined, 0 for the window divided by ``COLUMNS``; columns: most
    columns into which the window is divided, which limits ``width`` from below.

    A track's ``main`` and ``background`` have the columns k: index of the kind; t: begin in seconds after ``zero``; d:
    length in seconds; s: step; v: version; c: index of the cause; b: index of the awaited process; n: number of joined
    spans. ``from``: begin of the answer.
    """
    if timeline is None:
        return {"begin": 0.0, "end": 0.0, "from": 0.0, "zero": 0, "width": 0.0, "tracks": [], "marks": []}
    low = max(timeline.begin, begin or 0.0)
    high = min(timeline.end, end or timeline.end)
    width = max(width or (high - low) / COLUMNS, (high - low) / columns)
    window = _Columns(low, high, width=width, zero=int(timeline.begin))
    tracks = [
        {
            "role": track.role,
            "index": track.index,
            "attempt": track.attempt,
            "killed": track.killed,
            "main": window.main(track.main),
            "background": window.background(track.background),
        }
        for track in timeline.tracks
        if track.end > low and track.begin < high
    ]
    return {
        "begin": timeline.begin,
        "end": timeline.end,
        "from": low,
        "zero": window.zero,
        "width": width,
        "kinds": KINDS,
        "causes": CAUSES,
        "bys": list(window.bys),
        "tracks": tracks,
        "marks": [_mark(mark) for mark in timeline.marks],
    }


class _Columns:
    """Converts spans to columns, cut to the window from ``low`` to ``high``."""

    def __init__(self, low: float, high: float, *, width: float, zero: int) -> None:
        self._low, self._high, self._width = low, high, width
        self.zero = zero
        self.bys: dict[str, int] = {"": 0}

    def main(self, spans: Sequence[Span]) -> dict[str, list[float]]:
        """Return main spans; consecutive spans shorter than the width are joined until they reach it."""
        rows: list[tuple[float, ...]] = []
        short: list[Span] = []
        since, width, high = 0.0, self._width, self._high
        for place in range(max(0, bisect_right(spans, self._low, key=_begin) - 1), len(spans)):
            span = spans[place]
            begin, end = max(span.begin, self._low), min(span.end, high)
            if begin >= high:
                break
            if end <= begin:
                continue
            if end - begin < width:
                since = since if short else begin
                short.append(span)
                if end - since >= width:
                    rows.append(self._row(_dominant(short), since, end, len(short)))
                    short = []
                continue
            if short:
                rows.append(self._row(_dominant(short), since, begin, len(short)))
                short = []
            rows.append(self._row(span, begin, end, 1))
        if short:
            rows.append(self._row(_dominant(short), since, min(short[-1].end, high), len(short)))
        return _by_name(rows)

    def background(self, spans: Iterable[Span]) -> dict[str, list[float]]:
        """Return the background spans; short spans of the same kind at short distances are joined."""
        rows: list[tuple[float, ...]] = []
        last: dict[str, tuple[Span, float, float, int]] = {}
        for span in spans:
            begin, end = max(span.begin, self._low), min(span.end, self._high)
            if end <= begin:
                continue
            before = last.get(span.kind)
            if before is not None and max(begin - before[2], end - begin) < self._width:
                last[span.kind] = (before[0], before[1], max(before[2], end), before[3] + 1)
                continue
            if before is not None:
                rows.append(self._row(*before))
            last[span.kind] = (span, begin, end, 1)
        rows += [self._row(*each) for each in last.values()]
        return _by_name(sorted(rows, key=lambda row: row[1]))

    def _row(self, span: Span, begin: float, end: float, count: int) -> tuple[float, ...]:
        by = self.bys.setdefault(span.by, len(self.bys))
        at, length = round(begin - self.zero, 4), round(end - begin, 4)
        return _KIND[span.kind], at, length, span.step, span.version, _CAUSE[span.cause], by, count


def _by_name(rows: Sequence[tuple[float, ...]]) -> dict[str, list[float]]:
    columns = zip(*rows, strict=True) if rows else ((),) * 8
    return {name: list(column) for name, column in zip("ktdsvcbn", columns, strict=True)}


def _dominant(short: Sequence[Span]) -> Span:
    """Return the first span with the kind, cause and version that have the largest total time."""
    spent: dict[tuple[str, str, int], float] = defaultdict(float)
    first: dict[tuple[str, str, int], Span] = {}
    for span in short:
        key = span.kind, span.cause, span.version
        spent[key] += span.end - span.begin
        first.setdefault(key, span)
    return first[max(spent, key=lambda key: spent[key])]


def _seamed(old: Sequence[Span], new: Sequence[Span], at: float) -> list[Span]:
    """Return main spans: the old ones up to the time ``at``, then the new ones; both cover that time."""
    kept = list(old[: bisect_left(old, at, key=_begin)])
    later = list(new[max(0, bisect_right(new, at, key=_begin) - 1) :])
    if not kept:
        return later
    last, first = kept.pop(), later.pop(0)
    if msgspec.structs.replace(last, end=first.end) == msgspec.structs.replace(first, begin=last.begin):
        return [*kept, msgspec.structs.replace(last, end=first.end), *later]
    cut = msgspec.structs.replace(last, end=at), msgspec.structs.replace(first, begin=at)
    return [*kept, *(span for span in cut if span.end > span.begin), *later]


def _begin(span: Span) -> float:
    return span.begin


def _mark(mark: Mark) -> dict[str, Any]:
    return {"at": round(mark.at, 3), "what": mark.what, "of": mark.of}
