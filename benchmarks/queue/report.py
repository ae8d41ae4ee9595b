"""The table of a run: medians, as ratios to the raw sockets of the same run, beside the bars.

Invariant: a ratio compares results of one run only; a line of which nothing was measured is not shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bars import LINES, OURS, PEER, RAW, Line, bar_of, bars

Results = Sequence[Mapping[str, Any]]


def value(results: Results, line: Line, peer: str) -> float | None:
    """Return the median of a figure of a peer; None where it was not measured."""
    found = [
        _figure(result, line.figure)
        for result in results
        if result["bench"] == line.bench
        and result["peer"] == peer
        and all(result.get(name) == wanted for name, wanted in line.settings.items())
    ]
    return statistics.median(found) if found else None


def _figure(result: Mapping[str, Any], figure: str) -> float:
    for name in figure.split("."):
        result = result[name]
    return float(result)  # type: ignore[arg-type]


def faults(results: Results) -> list[str]:
    """Say what no run may show: wrong bytes, lost and doubled rows."""
    return [
        f"{result['bench']} of {result['peer']}: {name} = {result[name]}"
        for result in results
        for name, wrong in (("bytes_equal", False), ("lost", None), ("dup", None))
        if name in result and (result[name] is wrong if wrong is False else bool(result[name]))
    ]


@dataclass
class Table:
    """Lines of cells, and how many bars are met."""

    rows: list[list[str]] = field(default_factory=list)
    met: int = 0
    missed: list[str] = field(default_factory=list)

    def mark(self, words: str, ratio: float | None, bar: float | None, *, most: bool) -> str:
        """Return a ratio with its verdict."""
        if ratio is None:
            return "–"
        if bar is None:
            return f"{ratio:.2f}"
        good = ratio <= bar if most else ratio >= bar
        if good:
            self.met += 1
        else:
            self.missed.append(f"{words}: {ratio:.3g}, the bar is {bar:g}")
        return f"{ratio:.2f}" if good else f"**{ratio:.2f}**"

    def text(self) -> str:
        return "\n".join("| " + " | ".join(row) + " |" for row in self.rows)


def against_raw(results: Results, columns: Mapping[str, str]) -> Table:
    """Return the table of ratios to raw sockets. columns: peers by their heading; Mooncake's have no bars."""
    table = Table()
    table.rows.append(["same work, one host", "bar", *columns, PEER, "raw sockets"])
    table.rows.append(["---"] * len(table.rows[0]))
    for line in LINES:
        raw = value(results, line, RAW)
        cells = [line.words, bars(line)]
        for heading, peer in columns.items():
            own = value(results, line, peer)
            ratio = own / raw if own is not None and raw else None
            cells.append(table.mark(f"{line.words} ({heading})", ratio, bar_of(line, heading), most=line.most))
        other = value(results, line, PEER)
        cells.append(f"{other / raw:.2f}" if other is not None and raw else "–")
        cells.append(f"{raw:.3g} {line.unit}" if raw is not None else "–")
        if set(cells[2:]) != {"–"}:
            table.rows.append(cells)
    return table


def own_cases(results: Results) -> Table:
    """Return the table of what only we measure."""
    table = Table()
    table.rows.append(["our own cases", "bar", "keys off", "keys on"])
    table.rows.append(["---"] * 4)

    def add(words: str, bar: float | None, figure: Callable[[Results], float | None], *, most: bool) -> None:
        cells = []
        for keys in (False, True):
            mine = [result for result in results if _keyed(result) is keys or result["peer"] == RAW]
            cells.append(table.mark(f"{words} ({'keys' if keys else 'plain'})", figure(mine), bar, most=most))
        sign = "≤" if most else "≥"
        if cells != ["–", "–"]:
            table.rows.append([words, f"{sign} {bar:g}" if bar is not None else "", *cells])

    for bench, words in (("groups", "claim of two whole groups of 8"), ("balanced", "a rank's token-balanced slot")):
        for rows in (1000, 10_000, 100_000):
            add(
                f"{words} of {rows:,} rows, p50, to a raw claim of 16",
                2.5,
                lambda mine, bench=bench, rows=rows: _quotient(  # type: ignore[misc]
                    _median(mine, bench, "claim_ms.p50", rows=rows),
                    value(mine, Line(words="", bench="control", figure="claim_ms.p50", settings={"rows": rows}), RAW),
                ),
                most=True,
            )
    for bench, words in (("control", "claim of 16 rows"), ("groups", "whole groups"), ("balanced", "token-balanced")):
        add(
            f"{words}: p50 at 100,000 rows to that at 1,000",
            2.0,
            lambda mine, bench=bench: _quotient(  # type: ignore[misc]
                _ours(mine, bench, rows=100_000), _ours(mine, bench, rows=1000)
            ),
            most=True,
        )
    for what in ("put", "get"):
        add(
            f"links of 100 MB/s: {what}, 4 units to 1",
            3.5,
            lambda mine, what=what: _quotient(  # type: ignore[misc]
                _median(mine, "links", f"{what}_GBps", units=4), _median(mine, "links", f"{what}_GBps", units=1)
            ),
            most=False,
        )
    for figure, words, bar in (
        ("to_tcv", "MindSpeed RL's volume, bytes moved to TCV", 1.03),
        ("metadata_to_term", "its metadata, to the paper's term", 2.0),
        ("to_named_columns", "bytes moved to those of the named columns", 1.03),
    ):
        add(words, bar, lambda mine, figure=figure: _median(mine, "volume", figure), most=True)  # type: ignore[misc]
    for role in ("controller", "unit0"):
        add(
            f"resident memory of an idle {role.rstrip('0')}, MB",
            85.0,
            lambda mine, role=role: _median(mine, "memory", f"resident_MB.{role}"),  # type: ignore[misc]
            most=True,
        )
    add(
        "three controllers, one stopped: p99 of a claim of the others, to when it runs",
        1.2,
        lambda mine: _median(mine, "shards", "ratio"),
        most=True,
    )
    add("1 M rows: rows/s", None, lambda mine: _median(mine, "million", "rows_per_s"), most=False)
    add(
        "1 M rows: rate of the last tenth to the second",
        0.9,
        lambda mine: _median(mine, "million", "last_to_second"),
        most=False,
    )
    add(
        "1 M rows: memory of the controller at the end to half-way",
        1.1,
        lambda mine: _growth(mine, "controller"),
        most=True,
    )
    add("1 M rows: memory of the unit at the end to half-way", 1.1, lambda mine: _growth(mine, "unit0"), most=True)
    return table


def _keyed(result: Mapping[str, Any]) -> bool:
    return bool(result.get("keys", result["peer"].endswith("Keys")))


def _ours(results: Results, bench: str, *, rows: int) -> float | None:
    keyed = any(_keyed(result) for result in results)
    peer = "asyncflow" if bench != "control" else OURS["keys" if keyed else "plain"]
    return value(results, Line(words="", bench=bench, figure="claim_ms.p50", settings={"rows": rows}), peer)


def _median(results: Results, bench: str, figure: str, **settings: Any) -> float | None:
    return value(results, Line(words="", bench=bench, figure=figure, settings=settings), "asyncflow")


def _growth(results: Results, name: str) -> float | None:
    grown = [
        result["resident_MB"][-1][name] / result["resident_MB"][4][name]
        for result in results
        if result["bench"] == "million"
    ]
    return statistics.median(grown) if grown else None


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
