"""The Gantt chart of a timeline: one page that needs nothing else, and the data that ``timeline.js`` draws.

Invariant: the page loads nothing, and what is in it is escaped, whatever a process is called.
"""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any, Final

import msgspec

from asyncflow.timeline.causes import place_of, shares
from asyncflow.timeline.tracks import KINDS, Span, Timeline

UNIT_S: Final = 1e-4
"""Length of the unit in which spans are given."""

_KIND: Final = {kind: index for index, kind in enumerate(KINDS)}


def script() -> str:
    """Return the JavaScript that draws: ``drawTimeline``, ``legendOf``, ``tableOfShares``."""
    return (files("asyncflow.timeline") / "timeline.js").read_text(encoding="utf-8")


def drawing(timeline: Timeline) -> dict[str, Any]:
    """Return what ``timeline.js`` draws, as JSON. timeline: with causes (``causes.attribute``).

    zero: Unix seconds (of a simulation: virtual ones) from which all times count; begin, end: of the window, seconds;
    unit: seconds of the unit of spans; kinds: names; whys: of idle spans [cause, by, waits]; rows: one for each
    process: name, role, index, main and beside, the spans one after another, each as six integers: begin and end in
    units, kind, step and version (-1 for none), why; marks: at in seconds, what, of; shares: for each process its
    name, seconds, kinds (seconds by kind) and idle (by cause, seconds by whom).
    """
    zero = min((track.begin for track in timeline.tracks), default=timeline.begin)
    whys: dict[tuple[str, str, str], int] = {("", "", ""): 0}
    rows: dict[str, dict[str, Any]] = {}

    def flat(span: Span) -> tuple[int, ...]:
        begin, end = round((span.begin - zero) / UNIT_S), round((span.end - zero) / UNIT_S)
        why = whys.setdefault((span.cause, span.by, span.waits), len(whys)) if span.kind == "idle" else 0
        return begin, end, _KIND[span.kind], span.step, span.version, why

    for track in sorted(timeline.tracks, key=lambda track: (place_of(track.role), track.index, track.begin)):
        empty = {"name": track.name, "role": track.role, "index": track.index, "main": [], "beside": []}
        row = rows.setdefault(track.name, empty)
        for lane, spans in (("main", track.main), ("beside", track.beside)):
            for span in spans:
                values = flat(span)
                if values[1] > values[0]:
                    row[lane].extend(values)
    return {
        "zero": zero,
        "begin": timeline.begin - zero,
        "end": timeline.end - zero,
        "unit": UNIT_S,
        "kinds": list(KINDS),
        "whys": list(whys),
        "rows": list(rows.values()),
        "marks": [{"at": mark.at - zero, "what": mark.what, "of": mark.of} for mark in timeline.marks],
        "shares": [
            {"name": name, "seconds": share.seconds, "kinds": share.kinds, "idle": share.by}
            for name, share in shares(timeline).items()
        ],
    }


def page(timeline: Timeline, *, title: str) -> str:
    """Return a self-contained HTML page with the chart, its legend, and the shares of each process."""
    data = msgspec.json.encode(drawing(timeline)).decode().replace("</", "<\\/")
    return _PAGE.format(title=html.escape(title), script=script(), data=data)


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 1rem; color: #222; background: #fff }}
h1 {{ font-size: 1.1rem }}
canvas {{ width: 100%; display: block }}
#legend, p {{ margin: .6rem 0; line-height: 1.7 }}
#shares {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
th:first-child, td:first-child {{ text-align: left }}
</style></head><body>
<h1>{title}</h1>
<canvas id="timeline"></canvas>
<p>Colour by <label><input type="radio" name="by" value="version" checked> version</label>
<label><input type="radio" name="by" value="step"> step</label>. Wheel: zoom; drag: pan; double click: everything.</p>
<div id="legend"></div>
<h1>Where the seconds went</h1>
<div id="shares"></div>
<script>
{script}
const data = {data};
const view = drawTimeline(document.getElementById("timeline"), data);
legendOf(document.getElementById("legend"), data);
tableOfShares(document.getElementById("shares"), data);
for (const choice of document.getElementsByName("by")) choice.onchange = () => view.colour(choice.value);
</script></body></html>
"""
