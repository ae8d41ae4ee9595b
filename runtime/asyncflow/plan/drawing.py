"""The graph of a job's tasks as a drawing: lines of text, or a self-contained SVG.

The SVG is a layered drawing (Sugiyama et al., 1981). The box of a task is in the layer after the last task that it
reads from. A line that passes through a layer has a track of its own there, so no line crosses a box. Boxes and tracks
of a layer are ordered by the positions of their inputs. The box of a companion is below its task.

Invariants: a drawing is a pure function of graph and plan. Each box is a task or a companion. Each line stands for the
columns that one task reads from another, or that a task and its companion exchange.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from asyncflow.api.graph import Companion, JobGraph, Task
from asyncflow.api.names import TRAIN
from asyncflow.plan.roles import JobPlan

_SOURCE: Final = "driver"
"""The role that creates the rows."""
_BOX: Final = (168, 62)
_GAP: Final = 186
_TRACK: Final = 46
_SPACE: Final = 22
_EXCHANGE: Final = 78
"""Space around a companion; the upper half holds the labels of the exchanged columns."""
_MARGIN: Final = 24
_HEAD: Final = 46
_LABEL: Final = 27
"""Most characters in a line of a label."""
_FONT: Final = "font-family='ui-sans-serif, system-ui, sans-serif'"


_ARROW_HEAD: Final = (
    "<defs><marker id='tip' viewBox='0 0 8 8' refX='7.5' refY='4' markerWidth='8' markerHeight='8' "
    "orient='auto-start-reverse'><path d='M0,0 L8,4 L0,8 z' fill='#475569'/></marker></defs>"
)


def text(plan: JobPlan, partition: str) -> list[str]:
    """Return the lines of a tree: each task below the last task that it reads from, with the others as a note."""
    graph = plan.graph
    depth = {task.name: number for number, layer in enumerate(graph.layers(partition)) for task in layer}
    below: dict[str, list[Task]] = {}
    for task in graph.of(partition):
        before = sorted(graph.before(task), key=lambda one: depth.get(one.name, 0))
        below.setdefault(before[-1].name if before else "", []).append(task)
    lines = [f"{partition}: {', '.join(graph.sources[partition])}"]
    lines += _branch(plan, below, "", "")
    return lines


def _branch(plan: JobPlan, below: dict[str, list[Task]], parent: str, indent: str) -> Iterator[str]:
    children = below.get(parent, [])
    for number, task in enumerate(children):
        last = number == len(children) - 1
        others = [one.name for one in plan.graph.before(task) if one.name != parent]
        also = f"  (also reads {', '.join(others)})" if others else ""
        writes = f" ─> {', '.join(task.writes)}" if task.writes else ""
        yield f"{indent}{'└' if last else '├'}─ {task.name} [{_processes(plan, task)}]{writes}{also}"
        inner = indent + ("   " if last else "│  ")
        for one in plan.graph.companions_of(task):
            yield f"{inner}⇄  {one.name} [{_processes(plan, one)}] ─> {', '.join(one.writes)}  ({one.when})"
        yield from _branch(plan, below, task.name, inner)


def _processes(plan: JobPlan, task: Task | Companion) -> str:
    """Return the processes that run a task or a companion, as text."""
    if isinstance(task, Companion) and task.inside:
        return f"inside {task.role}"
    role = next((role for role in plan.roles if role.name == task.role), None)
    if role is None:
        return task.role
    count = role.world if role.gang else role.replicas
    return f"{task.role} x {count}" + (f" ({role.core} to {role.most})" if role.elastic else "")


@dataclass(eq=False)
class _Item:
    """A box, or the track of a line in a layer.

    height: including the space around it; below: for a companion, the box of its task; y: position of the middle; pull:
    mean position of its inputs, by which the layer is ordered.
    """

    layer: int
    task: Task | Companion | None
    height: int
    below: _Item | None = None
    y: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True)
class _Line:
    """The columns that one task reads from another. stops: the items that the line passes, both ends included."""

    stops: list[_Item]
    label: str


def svg(plan: JobPlan, partition: str) -> str:
    """Return the drawing of a partition as an SVG document."""
    layers, lines = _laid_out(plan.graph, partition)
    width = len(layers) * _BOX[0] + (len(layers) - 1) * _GAP + 2 * _MARGIN
    height = max(sum(item.height for item in layer) for layer in layers) + _HEAD + 2 * _MARGIN
    size = f"width='{width}' height='{height:.0f}'"
    of = "training" if partition == TRAIN else "held-out"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height:.0f}' {size} {_FONT}>",
        _ARROW_HEAD,
        f"<rect {size} fill='#ffffff'/>",
        _text(_MARGIN, _MARGIN + 8, f"{plan.job}: the flow of a {of} sample", size=15, color="#0f172a"),
    ]
    label_lines: dict[_Item, int] = {}
    for line in lines:
        parts += _drawn(line, label_lines)
    for layer in layers:
        parts += [part for item in layer if item.height >= _BOX[1] for part in _box(plan, partition, item)]
        parts += [part for item in layer for part in _exchanged(item)]
    return "\n".join([*parts, "</svg>", ""])


def _laid_out(graph: JobGraph, partition: str) -> tuple[list[list[_Item]], list[_Line]]:
    """Return the layers with positioned items, the source in the first layer, and the lines."""
    tasks = graph.layers(partition)
    layers = [[_Item(0, None, _BOX[1] + _SPACE)]]
    layers += [[_Item(n, task, _BOX[1] + _SPACE) for task in layer] for n, layer in enumerate(tasks, start=1)]
    at = {item.task.name if item.task is not None else "": item for layer in layers for item in layer}
    lines: list[_Line] = []
    for name, item in list(at.items()):
        if not isinstance(item.task, Task):
            continue
        layers[item.layer] += [
            _Item(item.layer, one, _BOX[1] + _EXCHANGE, item) for one in graph.companions_of(item.task)
        ]
        columns: dict[str, list[str]] = {}
        for column in item.task.reads:
            writer = graph.writer(partition, column)
            columns.setdefault(writer.name if writer is not None else "", []).append(column)
        for source, read in columns.items():
            begin = at[source]
            tracks = [_Item(layer, None, _TRACK) for layer in range(begin.layer + 1, at[name].layer)]
            for track in tracks:
                layers[track.layer].append(track)
            lines.append(_Line([begin, *tracks, item], ", ".join(read)))
    _place(layers, lines)
    return layers, lines


def _place(layers: Sequence[list[_Item]], lines: Sequence[_Line]) -> None:
    """Order each layer by the positions of the inputs of its items, and set the y of all items."""
    tallest = max(sum(item.height for item in layer) for layer in layers)
    for number, layer in enumerate(layers):
        for item in layer:
            before = [line.stops[line.stops.index(item) - 1].y for line in lines if item in line.stops[1:]]
            item.pull = sum(before) / len(before) if before else 0.0
        if number:
            layer.sort(key=lambda item: (item.pull, item.height < _BOX[1]))
            apart = [item for item in layer if item.below is None]
            layer[:] = [each for item in apart for each in (item, *(one for one in layer if one.below is item))]
        y = _MARGIN + _HEAD + (tallest - sum(item.height for item in layer)) / 2
        for item in layer:
            item.y = y + item.height / 2
            y += item.height


def _left(item: _Item) -> float:
    return _MARGIN + item.layer * (_BOX[0] + _GAP)


def _drawn(line: _Line, label_lines: dict[_Item, int]) -> Iterator[str]:
    """Yield the SVG of one line, horizontal where it enters a layer, and of its label, left of the line's second stop.

    label_lines: number of lines of text left of each item; this call adds the lines of its label.
    """
    begin = line.stops[0]
    x, y = _left(begin) + _BOX[0], begin.y
    path = f"M{x:.0f},{y:.0f}"
    for stop in line.stops[1:]:
        left = _left(stop)
        bend = (x + left) / 2 - _GAP / 4
        path += f" C{bend:.0f},{y:.0f} {bend:.0f},{stop.y:.0f} {x + _GAP / 3:.0f},{stop.y:.0f} L{left:.0f},{stop.y:.0f}"
        x, y = left, stop.y
        if stop is not line.stops[-1]:
            x += _BOX[0]
            path += f" L{x:.0f},{y:.0f}"
    yield f"<path d='{path}' fill='none' stroke='#94a3b8' stroke-width='1.4' marker-end='url(#tip)'/>"
    first = line.stops[1]
    place = _left(first) - _GAP + _GAP / 3 + 6
    texts = textwrap.wrap(line.label, _LABEL if first is line.stops[-1] else 2 * _LABEL)
    above = label_lines.get(first, 0)
    label_lines[first] = above + len(texts)
    for number, part in enumerate(reversed(texts), start=above):
        height = first.y - 6 - 13 * number
        yield _text(place, height, part, size=11, color="#334155")


def _exchanged(item: _Item) -> Iterator[str]:
    """Yield the SVG of the line between a task and its companion, and of the labels with the columns they exchange."""
    if item.below is None or not isinstance(item.task, Companion):
        return
    x, top, bottom = _left(item) + 20, item.below.y + _BOX[1] / 2, item.y - _BOX[1] / 2
    ends = "marker-start='url(#tip)' marker-end='url(#tip)'"
    yield f"<path d='M{x:.0f},{top:.0f} L{x:.0f},{bottom:.0f}' stroke='#94a3b8' stroke-width='1.4' {ends}/>"
    texts = [*textwrap.wrap(f"↓ {', '.join(item.task.reads)}", _LABEL), f"↑ {', '.join(item.task.writes)}"]
    for number, part in enumerate(reversed(texts)):
        yield _text(x + 8, bottom - 8 - 13 * number, part, size=11, color="#334155")


def _box(plan: JobPlan, partition: str, item: _Item) -> Iterator[str]:
    task = item.task
    name, runs = (task.name, _processes(plan, task)) if task is not None else ("prompts", _SOURCE)
    claims = ", ".join(plan.graph.sources[partition]) if task is None else _claims(task)
    x, y = _left(item), item.y - _BOX[1] / 2
    own = not task.inside if isinstance(task, Companion) else task is not None and bool(task.place)
    fill = "#eef2ff" if own else "#f8fafc"
    yield (
        f"<rect x='{x:.0f}' y='{y:.0f}' width='{_BOX[0]}' height='{_BOX[1]}' rx='8' fill='{fill}' stroke='#475569'/>"
    )
    texts = ((name, 14, "#0f172a"), (runs, 11, "#334155"), (claims, 11, "#64748b"))
    for number, (words, size, color) in enumerate(texts):
        yield _text(x + 12, y + 20 + 17 * number, words, size=size, color=color)


def _text(x: float, y: float, words: str, *, size: int, color: str) -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' fill='{color}'>{escape(words)}</text>"


def _claims(task: Task | Companion) -> str:
    if isinstance(task, Companion):
        return task.when
    unit = "slots of all ranks" if task.gang else "whole groups" if task.groups else "rows"
    return f"{unit}, {task.order}"
