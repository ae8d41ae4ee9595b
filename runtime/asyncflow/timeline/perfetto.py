"""A timeline as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

Each role is a process of the trace, and each process of the run is a thread, with one additional thread for each kind
of background span. Source: Trace Event Format (Google, 2016): complete events ``X`` in microseconds, instant events
``i``, metadata ``M``.

Invariant: events of one thread do not overlap, so none is drawn inside another; times count from the first span.
"""

from __future__ import annotations

from typing import Any

from asyncflow.timeline.tracks import KINDS, Span, Timeline

_PER_PROCESS = 32
"""Thread numbers per process of the run: one for its main track, and one for each kind of span."""


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as JSON: ``traceEvents`` and ``displayTimeUnit``. timeline: with causes."""
    zero = min((track.begin for track in timeline.tracks), default=timeline.begin)
    roles = list(dict.fromkeys(track.role for track in timeline.tracks))
    events: list[dict[str, Any]] = []
    named: set[tuple[int, int]] = set()
    for track in timeline.tracks:
        process, thread = 1 + roles.index(track.role), 1 + track.index * _PER_PROCESS
        for spans, background in ((track.main, False), (track.background, True)):
            for span in spans:
                number = thread + (1 + KINDS.index(span.kind) if background else 0)
                if (process, number) not in named:
                    named.add((process, number))
                    called = f"{track.name}: {span.kind}" if background else track.name
                    events += _named(process, number, role=track.role, called=called)
                events.append(_event(span, process=process, thread=number, zero=zero, attempt=track.attempt))
    events += [
        {"ph": "i", "s": "g", "name": f"{mark.what} {mark.of}".strip(), "ts": _us(mark.at - zero), "pid": 1, "tid": 1}
        for mark in timeline.marks
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(process: int, thread: int, *, role: str, called: str) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**place, "name": "process_name", "args": {"name": role}},
        {**place, "name": "thread_name", "args": {"name": called}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def _event(span: Span, *, process: int, thread: int, zero: float, attempt: int) -> dict[str, Any]:
    named = {"step": span.step, "version": span.version}
    arguments: dict[str, Any] = {name: value for name, value in named.items() if value >= 0}
    arguments |= {name: value for name, value in (("waits", span.waits), ("by", span.by)) if value}
    return {
        "ph": "X",
        "name": f"idle: {span.cause or span.waits}" if span.kind == "idle" else span.kind,
        "cat": "idle" if span.kind == "idle" else "work",
        "ts": _us(span.begin - zero),
        "dur": _us(span.seconds),
        "pid": process,
        "tid": thread,
        "args": {**arguments, "attempt": attempt},
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
