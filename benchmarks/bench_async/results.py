"""Results of points, one JSON line each, and the table and the limits computed from them. Pure except for the files.

Invariant: a point with a result is not run or simulated again, so an interrupted matrix can be continued.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench_async.points import Point, closed_form, predicted

SYNC_BAR = 0.03
PERIODIC = {0.5: 1.50, 0.8: 1.79, 1.0: 1.91, 1.25: 1.74, 2.0: 1.47}
"""The expected speedup of periodic over sync, by ratio, at sigma 0.5, each within ``NEAR``."""
NEAR = 0.05
AT_BALANCE = 1.85
MOST = 2.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run of a point.

    walls: seconds of each counted iteration; waited: mean seconds per iteration for which the trainer waited for
    samples; lag: mean staleness of a sample's oldest token; lost: samples that were not trained exactly once; load: of
    the machine at the end.
    """

    point: Point
    walls: Sequence[float]
    waited: float
    lag: float
    lost: int
    load: float

    @property
    def seconds(self) -> float:
        """The mean seconds of an iteration."""
        return fmean(self.walls)


class Results:
    """The results in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.all = [Result(**{**line, "point": Point(**line["point"])}) for line in _lines(file)]

    def missing(self, points: Iterable[Point]) -> list[Point]:
        """Return the points without a result."""
        known = {result.point for result in self.all}
        return [point for point in points if point not in known]

    def add(self, result: Result) -> None:
        """Append a result."""
        with self._lock:
            self.all.append(result)
            _append(self._file, asdict(result))


def predictions(points: Iterable[Point], file: Path) -> dict[Point, float]:
    """Return the simulator's prediction of each point; predictions that the file lacks are computed and appended."""
    known = {Point(**line["point"]): line["seconds"] for line in _lines(file)}
    for point in points:
        if point not in known:
            known[point] = predicted(point)
            _append(file, {"point": asdict(point), "seconds": known[point]})
    return known


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The mean over the seeds of a point.

    seconds, middle: mean and median time of an iteration; gain: speedup over sync, over the seeds with both results;
    closed, predicted: seconds by the closed form and by the simulator.
    """

    mode: str
    sigma: float
    ratio: float
    seeds: int
    seconds: float
    middle: float
    gain: float | None
    closed: float | None
    predicted: float | None
    waited: float
    lag: float
    lost: int
    load: float


def lines_of(results: Sequence[Result], simulated: Mapping[Point, float]) -> list[Line]:
    """Return a line for each sigma, ratio and mode, sorted by sigma and ratio."""
    groups: dict[tuple[float, float, str], list[Result]] = {}
    for result in sorted(results, key=lambda each: (each.point.sigma, each.point.ratio)):
        groups.setdefault((result.point.sigma, result.point.ratio, result.point.mode), []).append(result)
    return [
        _line(each, groups.get((sigma, ratio, "sync"), []), simulated) for (sigma, ratio, _), each in groups.items()
    ]


def _line(results: Sequence[Result], sync: Sequence[Result], simulated: Mapping[Point, float]) -> Line:
    point = results[0].point
    waiting = {each.point.seed: each for each in sync}
    both = [(waiting[each.point.seed], each) for each in results if each.point.seed in waiting]
    return Line(
        mode=point.mode,
        sigma=point.sigma,
        ratio=point.ratio,
        seeds=len(results),
        seconds=fmean(each.seconds for each in results),
        middle=fmean(median(each.walls) for each in results),
        gain=fmean(one.seconds for one, _ in both) / fmean(other.seconds for _, other in both) if both else None,
        closed=_mean(closed_form(each.point) for each in results),
        predicted=_mean(simulated.get(each.point) for each in results),
        waited=fmean(each.waited / each.seconds for each in results),
        lag=fmean(each.lag for each in results),
        lost=sum(each.lost for each in results),
        load=fmean(each.load for each in results),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the rows of a table in Markdown."""
    head = (
        "sigma", "T_train / T_gen", "mode", "seeds", "iteration", "median", "sync / it", "closed form", "simulator",
        "trainer waits", "lag", "load",
    )  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for line in lines:
        cells = (
            f"{line.sigma:g}",
            f"{line.ratio:g}",
            line.mode,
            f"{line.seeds}",
            f"{line.seconds:.2f} s",
            f"{line.middle:.2f} s",
            f"{line.gain:.2f}" if line.gain else "",
            deviation(line.closed, line.seconds),
            deviation(line.predicted, line.seconds),
            f"{line.waited:.0%}",
            f"{line.lag:.2f}",
            f"{line.load:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


def deviation(expected: float | None, seconds: float) -> str:
    """Return the expected seconds, and the relative deviation of the measured seconds."""
    return "" if expected is None else f"{expected:.2f} s ({seconds / expected - 1:+.1%})"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A limit and the measured value."""

    what: str
    measured: str
    met: bool


def bars(lines: Sequence[Line]) -> list[Bar]:
    """Return the limits that apply to these lines."""
    found = [bar for line in lines for make in (_sync, _periodic, _simulated, _once) for bar in make(line)]
    periodic = {(line.sigma, line.ratio): line for line in lines if line.mode == "periodic"}
    for line in lines:
        other = periodic.get((line.sigma, line.ratio))
        if line.mode == "delayed" and other is not None:
            what = f"delayed is no slower than periodic, sigma {line.sigma:g}, ratio {line.ratio:g}"
            measured = f"{line.seconds:.2f} and {other.seconds:.2f} s"
            found.append(Bar(what=what, measured=measured, met=line.seconds <= other.seconds))
    return found


def _sync(line: Line) -> Iterator[Bar]:
    if line.mode in ("sync", "colocated") and line.closed is not None:
        error = line.seconds / line.closed - 1
        what = f"{line.mode} is its closed form within {SYNC_BAR:.0%}, sigma {line.sigma:g}, ratio {line.ratio:g}"
        yield Bar(what=what, measured=f"{error:+.1%}", met=abs(error) <= SYNC_BAR)


def _periodic(line: Line) -> Iterator[Bar]:
    if line.mode != "periodic" or line.gain is None:
        return
    where = f"sigma {line.sigma:g}, ratio {line.ratio:g}"
    yield Bar(what=f"periodic gains at most {MOST:g}, {where}", measured=f"{line.gain:.2f}", met=line.gain <= MOST)
    if line.sigma == 0.5 and line.ratio in PERIODIC:
        bar = PERIODIC[line.ratio]
        met = abs(line.gain / bar - 1) <= NEAR
        yield Bar(what=f"periodic gains {bar:.2f} within {NEAR:.0%}, {where}", measured=f"{line.gain:.2f}", met=met)
        if line.ratio == 1:
            met = line.gain >= AT_BALANCE
            yield Bar(what=f"periodic gains {AT_BALANCE} at balance", measured=f"{line.gain:.2f}", met=met)


def _simulated(line: Line) -> Iterator[Bar]:
    if line.predicted is not None:
        error = line.predicted / line.seconds - 1
        what = f"the simulator is within {NEAR:.0%}: {line.mode}, sigma {line.sigma:g}, ratio {line.ratio:g}"
        yield Bar(what=what, measured=f"{error:+.1%}", met=abs(error) <= NEAR)


def _once(line: Line) -> Iterator[Bar]:
    if line.lost:
        what = f"every sample is trained once: {line.mode}, sigma {line.sigma:g}, ratio {line.ratio:g}"
        yield Bar(what=what, measured=f"{line.lost} were not", met=False)


def report(found: Sequence[Bar], *, say: Callable[[str], None]) -> bool:
    """Report each limit with ``say``; return whether all are met."""
    for bar in found:
        say(f"{'ok  ' if bar.met else 'MISS'} {bar.what}: {bar.measured}")
    return all(bar.met for bar in found)
