"""The timeline of a run, finished or not: ``asyncflow timeline DIR``.

Invariant: the command reads only the span files of the run; it contacts no process of the run and changes none of its
files.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from asyncflow.driver.journal import FIRST_DISPATCH
from asyncflow.durable import write_whole
from asyncflow.telemetry.spans import read_timeline
from asyncflow.timeline.causes import attribute, shares
from asyncflow.timeline.perfetto import trace
from asyncflow.timeline.tracks import Timeline
from asyncflow.view.console import make_console, print_json
from asyncflow.view.page.document import document
from asyncflow.view.page.routes import TIMELINE
from asyncflow.view.page.spans import chart
from asyncflow.view.shares import shares_table

TRACE, PAGE = "timeline.json", "timeline.html"


def timeline(run: Path, *, output: Path | None, training: bool, as_json: bool) -> None:
    """Write the trace and the chart of a run into ``output``, by default its own folder, and print its shares.

    training: whether to compute shares from the first prompt on; as_json: whether to print them as JSON and write no
    files. Raises ManifestError if nothing was recorded.
    """
    found = attribute(read_timeline(run))
    spent = shares(found, begin=found.first(FIRST_DISPATCH) if training else None)
    if as_json:
        print_json(spent)
        return
    folder = output or run
    folder.mkdir(parents=True, exist_ok=True)
    name = os.fsencode(run.absolute().name).decode(errors="replace")
    title = f"{name}: {found.end - found.begin:.1f} s"
    write_pictures(folder, found, title=title)
    console = make_console()
    console.print(shares_table(spent))
    console.print(f"{folder / PAGE}: the chart; {folder / TRACE}: opens in https://ui.perfetto.dev")


def write_pictures(folder: Path, timeline: Timeline, *, title: str) -> None:
    """Write the trace and the chart of a timeline."""
    write_whole(folder / TRACE, msgspec.json.encode(trace(timeline)))
    write_whole(folder / PAGE, document({"title": title, TIMELINE: chart(timeline)}).html.encode())
