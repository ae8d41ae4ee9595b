"""Published figures with the results of the real runtime and of the simulator, and the accepted deviation.

Invariant: each figure states whether a parameter was fitted to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

How = Literal["predicted", "fitted", "computed", "missed"]
"""The origin of a figure. computed: arithmetic with published numbers; missed: not reproducible here, with a reason in
``why``.
"""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure.

    measured: by the real runtime, with simulated engines in place of accelerators, None if not measured; simulated: by
    ``asyncflow.sim``, None if not simulated; bar: the largest accepted relative error of both, None for no limit.
    """

    what: str
    paper: float
    unit: str = ""
    measured: float | None = None
    simulated: float | None = None
    how: How = "predicted"
    bar: float | None = None
    why: str = ""

    @property
    def met(self) -> bool:
        """Return whether each existing value is within the limit."""
        found = [value for value in (self.measured, self.simulated) if value is not None]
        return self.bar is None or all(abs(value / self.paper - 1) <= self.bar for value in found)


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the rows of a table in Markdown."""
    yield "| figure | paper | measured | simulator | | bar |"
    yield "|---|---|---|---|---|---|"
    for each in figures:
        how = f"{each.how}: {each.why}" if each.why else each.how
        bar = "" if each.bar is None else f"{each.bar:.0%}: {'yes' if each.met else '**no**'}"
        values = " | ".join(_beside(value, each) for value in (each.measured, each.simulated))
        yield f"| {each.what} | {each.paper:g}{each.unit} | {values} | {how} | {bar} |"


def _beside(value: float | None, figure: Figure) -> str:
    return "" if value is None else f"{value:.4g}{figure.unit} ({value / figure.paper - 1:+.1%})"
