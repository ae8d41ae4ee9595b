"""What is compared with raw sockets, line by line, and the bars.

Invariant: a bar is written down once, here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

RAW, PEER = "rawzmq", "tq"
OURS = {"plain": "adapter:AsyncFlow", "keys": "adapter:AsyncFlowKeys"}
SHARED = {"shared memory": "adapter:AsyncFlowShared", "shared memory, keys": "adapter:AsyncFlowSharedKeys"}
MOONCAKE = {"mooncake": "adapter:AsyncFlowMooncake", "mooncake, keys": "adapter:AsyncFlowMooncakeKeys"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a figure of one benchmark with some settings, as a ratio to raw sockets.

    bar: at least (larger is better) or at most (``most``) this ratio; keyed: the bar with keys, where it is another;
    shared: the bar through shared memory, with and without keys.
    """

    words: str
    bench: str
    figure: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bar: float | None = None
    keyed: float | None = None
    shared: float | None = None
    most: bool = False
    unit: str = ""


def _data(words: str, **settings: Any) -> Iterable[Line]:
    chunk = 128 if settings["rows"] == 2048 else 16
    for what, figure in (
        ("put", "put_GBps"),
        ("get all", "get_GBps"),
        (f"get in {chunk}s", f"get_chunk{chunk}_GBps"),
        ("put from samples", "prepare_put_GBps"),
        ("get to samples", "get_unpack_GBps"),
    ):
        yield Line(
            words=f"{what}, {words}",
            bench="dataplane",
            figure=figure,
            settings=settings,
            bar=0.8,
            keyed=0.5,
            shared=None if "samples" in what else 1.5,
            unit="GB/s",
        )


LINES: tuple[Line, ...] = (
    *_data("256 rows, 1 unit", rows=256, units=1, dense=0),
    *_data("256 rows, 2 units", rows=256, units=2, dense=0),
    *_data("2,048 rows, 1 unit", rows=2048, units=1, dense=0),
    *_data("2,048 rows, 2 units", rows=2048, units=2, dense=0),
    *_data("256 equal rows, 1 unit", rows=256, units=1, dense=2304),
    *(
        Line(
            words=f"claim of 16 rows of {rows:,}, p50",
            bench="control",
            figure="claim_ms.p50",
            settings={"rows": rows},
            bar=2.5,
            most=True,
            unit="ms",
        )
        for rows in (1000, 10_000, 100_000)
    ),
    *(
        Line(
            words="pipeline of three processes, rows/s" + words,
            bench="pipeline",
            figure="rows_per_s",
            settings=settings,
            bar=bar,
            unit="rows/s",
        )
        for words, bar, settings in (
            ("", 0.65, {"rows": 6000, "rate": 0.0}),
            (", tiny rows", None, {"mode": "tiny", "rate": 0.0}),
            (", 8 puts in flight", None, {"inflight": 8, "rate": 0.0}),
            (", 16 rows at a time", None, {"train_n": 16, "rate": 0.0}),
        )
    ),
    Line(
        words="end to end at 20 rows/s, p50",
        bench="pipeline",
        figure="e2e_ms.p50",
        settings={"rate": 20.0},
        bar=1.6,
        most=True,
        unit="ms",
    ),
    *(
        Line(
            words=f"{what} of one sample of 24.6 KB, {units} unit{'s' * (units > 1)}, p50",
            bench="putlat",
            figure=f"{figure}.p50",
            settings={"units": units},
            bar=bar,
            most=True,
            unit="ms",
        )
        for units in (1, 2)
        for what, figure, bar in (("put", "put6_ms", 2.0), ("get", "get1_ms", None))
    ),
)


def bar_of(line: Line, heading: str) -> float | None:
    """Return the bar of a column."""
    if heading in MOONCAKE or heading in SHARED:
        return line.shared if heading in SHARED else None
    return line.keyed if heading == "keys" and line.keyed is not None else line.bar


def bars(line: Line) -> str:
    """Return the bars of a line, in words."""
    if line.bar is None:
        return ""
    sign = "≤" if line.most else "≥"
    others = [f"{words} {sign} {bar:g}" for words, bar in (("keys", line.keyed), ("shared", line.shared)) if bar]
    return f"{sign} {line.bar:g}" + (f" ({', '.join(others)})" if others else "")
