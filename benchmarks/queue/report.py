"""The tables of a run: medians of all rounds, as ratios to the raw sockets of the same run, with their limits.

Invariants: every limit is defined only here. A ratio compares results of the same run. A line without results is not
printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from implementations import PEER, RAW

Results: TypeAlias = Sequence[Mapping[str, Any]]
Figure: TypeAlias = Callable[[Results, str], float | None]
"""Returns a figure of an implementation from the results of a run."""

PLAIN, SECURED, MEMORY, SECURED_MEMORY = "plain", "secured", "shared memory", "shared memory, secured"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a table. bars: the limit of each implementation; most: whether the limits are upper instead of lower
    limits; unit: of the figure.
    """

    words: str
    figure: Figure
    bars: Mapping[str, float] = field(default_factory=dict)
    most: bool = False
    unit: str = ""


def measured(case: str, figure: str, **settings: Any) -> Figure:
    """Return a function that returns the median of a figure in the results of a case with these settings.

    figure: the path of its keys, separated by dots.
    """

    def find(results: Results, implementation: str) -> float | None:
        wanted = {"case": case, "implementation": implementation, **settings}
        found = [
            _inside(result, figure)
            for result in results
            if all(result.get(name) == value for name, value in wanted.items())
        ]
        return statistics.median(found) if found else None

    return find


def quotient(above: Figure, below: Figure) -> Figure:
    """Return a function that divides one figure by another of the same implementation."""

    def find(results: Results, implementation: str) -> float | None:
        one, other = above(results, implementation), below(results, implementation)
        return one / other if one is not None and other else None

    return find


def to_raw(figure: Figure) -> Figure:
    """Return a function that divides a figure by the raw sockets' figure."""

    def find(results: Results, implementation: str) -> float | None:
        one, raw = figure(results, implementation), figure(results, RAW)
        return one / raw if one is not None and raw else None

    return find


def _inside(result: Mapping[str, Any], figure: str) -> float:
    value: Any = result
    for name in figure.split("."):
        value = value[name]
    return float(value)


def _both(bar: float) -> dict[str, float]:
    return {PLAIN: bar, SECURED: bar}


def _data(words: str, *, rows: int, units: int, length: int | None) -> Iterator[Line]:
    chunk = 128 if rows == 2048 else 16
    for what in ("put", "get all", f"get in {chunk}s", "put from samples", "get to samples"):
        shared = {} if "samples" in what else {MEMORY: 1.5, SECURED_MEMORY: 1.5}
        yield Line(
            words=f"{what}, {words}, {units} unit{'s' * (units > 1)}",
            figure=measured("data", f"GBps.{what}", rows=rows, units=units, length=length),
            bars={PLAIN: 0.8, SECURED: 0.45, **shared},
            unit="GB/s",
        )


SIZES = (1000, 10_000, 100_000)
CLAIMS = {rows: measured("claim", "claim_ms.p50", kind="plain", rows=rows) for rows in SIZES}
RATIOS: tuple[Line, ...] = (
    *(line for units in (1, 2) for line in _data("256 rows", rows=256, units=units, length=None)),
    *(line for units in (1, 2) for line in _data("2,048 rows", rows=2048, units=units, length=None)),
    *_data("256 equal rows", rows=256, units=1, length=2304),
    *(
        Line(words=f"claim of 16 rows of {rows:,}, p50", figure=claim, bars=_both(3.0), most=True, unit="ms")
        for rows, claim in CLAIMS.items()
    ),
    Line(
        words="pipeline of three processes",
        figure=measured("pipeline", "rows_per_s", rate=0.0),
        bars={PLAIN: 0.5, SECURED: 0.35},
        unit="rows/s",
    ),
    Line(
        words="pipeline of three processes, processor seconds a million rows",
        figure=measured("pipeline", "cpu_s_per_million_rows", rate=0.0),
        most=True,
        unit="s",
    ),
    *(
        Line(
            words=f"{words} at 20 rows/s, p50",
            figure=measured("pipeline", f"{figure}.p50", rate=20.0),
            bars=bars,
            most=True,
            unit="ms",
        )
        for words, figure, bars in (
            ("from put to claim", "put_to_claim_ms", {}),
            ("end to end", "end_to_end_ms", _both(2.0)),
        )
    ),
    *(
        Line(
            words=f"{what} of one sample of 24.6 KB, {units} unit{'s' * (units > 1)}, p50",
            figure=measured("one sample", f"{what}_ms.p50", units=units),
            bars=_both(2.0),
            most=True,
            unit="ms",
        )
        for units in (1, 2)
        for what in ("put", "get")
    ),
)
"""The lines with ratios to the raw sockets."""


def _raw_claim(rows: int) -> Figure:
    return lambda results, _implementation: CLAIMS[rows](results, RAW)


def _growth(name: str) -> Figure:
    """Return a function that divides the memory of a process at the end of the million rows by that half-way."""

    def find(results: Results, implementation: str) -> float | None:
        grown = [
            result["resident_MB"][-1][name] / result["resident_MB"][4][name]
            for result in results
            if (result["case"], result["implementation"]) == ("million", implementation)
        ]
        return statistics.median(grown) if grown else None

    return find


def _own() -> Iterator[Line]:
    kinds = {"groups": "two whole groups of 8", "balanced": "a rank's token-balanced slot"}
    for kind, words in kinds.items():
        for rows in SIZES:
            figure = quotient(measured("claim", "claim_ms.p50", kind=kind, rows=rows), _raw_claim(rows))
            yield Line(words=f"claim of {words} of {rows:,} rows, p50, to a raw claim of 16", figure=figure)
    for kind, words in {"plain": "16 rows", **kinds}.items():
        many, few = (measured("claim", "claim_ms.p50", kind=kind, rows=rows) for rows in (SIZES[-1], SIZES[0]))
        words = f"claim of {words}: p50 at 100,000 rows to that at 1,000"
        yield Line(words=words, figure=quotient(many, few), bars=_both(2.0) if kind == "plain" else {}, most=True)
    for what in ("put", "get"):
        four, one = (measured("links", f"{what}_GBps", units=units) for units in (4, 1))
        words = f"links of 100 MB/s: {what}, 4 units to 1"
        yield Line(words=words, figure=quotient(four, one), bars=_both(3.5))
    for figure, words, bars in (
        ("to_tcv", "MindSpeed RL's volume: bytes moved to TCV", _both(1.03)),
        ("metadata_to_term", "its metadata, to the paper's term", {}),
    ):
        yield Line(words=words, figure=measured("volume", figure), bars=bars, most=True)
    for role in ("controller", "unit0"):
        words = f"resident memory of an idle {role.rstrip('0')}, MB"
        yield Line(words=words, figure=measured("idle memory", f"resident_MB.{role}"), bars=_both(85.0), most=True)
    yield Line(
        words="three controllers, one stopped: p99 of a claim of the others, to when it runs",
        figure=measured("stopped controller", "ratio"),
    )
    yield Line(words="a million rows: rows/s", figure=measured("million", "rows_per_s"))
    yield Line(
        words="a million rows: rate of the last tenth to the second",
        figure=measured("million", "last_to_second"),
    )
    for name in ("controller", "unit0"):
        words = f"a million rows: memory of the {name.rstrip('0')} at the end to half-way"
        yield Line(words=words, figure=_growth(name))


OWN: tuple[Line, ...] = tuple(_own())
"""The lines that only AsyncFlow measures, or compares with itself."""


def faults(results: Results) -> list[str]:
    """Return the errors in the results: wrong bytes, lost and doubled rows."""
    return [
        f"{result['case']} of {result['implementation']}: {name} = {result[name]}"
        for result in results
        for name, good in (("bytes_equal", True), ("lost", 0), ("doubled", 0))
        if result.get(name, good) != good
    ]


@dataclass
class Table:
    """A table. met: the number of met limits; missed: a description of each missed limit."""

    rows: list[list[str]] = field(default_factory=list)
    met: int = 0
    missed: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the table in Markdown."""
        return "\n".join("| " + " | ".join(row) + " |" for row in self.rows)

    def mark(self, line: Line, implementation: str, value: float | None) -> str:
        """Return ``value`` as text, bold if the line's limit is missed."""
        bar = line.bars.get(implementation)
        if value is None or bar is None:
            return "–" if value is None else f"{value:.2f}"
        if value <= bar if line.most else value >= bar:
            self.met += 1
            return f"{value:.2f}"
        self.missed.append(f"{line.words} ({implementation}): {value:.3g}, the bar is {bar:g}")
        return f"**{value:.2f}**"


def ratios(results: Results) -> Table:
    """Return the table of ratios to the raw sockets, each with its figure; one column per implementation."""
    known = _known(results)
    table = Table()
    table.rows.append(["ratio to raw sockets (figure)", "bar", *known, RAW])
    table.rows.append(["---"] * len(table.rows[0]))
    for line in RATIOS:
        figures = [line.figure(results, name) for name in known]
        marks = [table.mark(line, name, to_raw(line.figure)(results, name)) for name in known]
        cells = [
            mark if figure is None else f"{mark} ({_number(figure)})"
            for mark, figure in zip(marks, figures, strict=True)
        ]
        raw = line.figure(results, RAW)
        if raw is not None or set(cells) != {"–"}:
            table.rows.append([line.words, _bars(line), *cells, "–" if raw is None else f"{_number(raw)} {line.unit}"])
    return table


def own(results: Results) -> Table:
    """Return the table of the cases that only AsyncFlow measures."""
    known = [name for name in _known(results) if name in (PLAIN, SECURED)]
    table = Table()
    table.rows.append(["AsyncFlow's own cases", "bar", *known])
    table.rows.append(["---"] * len(table.rows[0]))
    for line in OWN:
        cells = [table.mark(line, name, line.figure(results, name)) for name in known]
        if set(cells) - {"–"}:
            table.rows.append([line.words, _bars(line), *cells])
    return table


def _number(figure: float) -> str:
    """Return a figure with three digits."""
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"


def _known(results: Results) -> list[str]:
    order = [PLAIN, SECURED, MEMORY, SECURED_MEMORY, "mooncake", PEER]
    found = {result["implementation"] for result in results}
    return [name for name in order if name in found]


def _bars(line: Line) -> str:
    """Return the limits of a line as text; a limit that all columns share appears once."""
    sign = "≤" if line.most else "≥"
    if not line.bars:
        return ""
    if len(set(line.bars.values())) == 1:
        return f"{sign} {next(iter(line.bars.values())):g}"
    others = ", ".join(f"{name} {sign} {bar:g}" for name, bar in line.bars.items() if name in (SECURED, MEMORY))
    return f"{sign} {line.bars[PLAIN]:g} ({others})"
