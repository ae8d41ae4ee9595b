"""Findings: a problem, the evidence for it, and the recommended change. A check is a pure function that may return one.

Invariant: every sentence contains its figures, so that a reader can follow the arithmetic without the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from asyncflow.doctor.evidence import Evidence

Severity = Literal["fault", "warning", "advice"]
"""fault: the result is wrong, or the run makes no progress; warning: part of the work is lost, or the result will be
wrong; advice: the run could be faster."""
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "advice")


class Words(NamedTuple):
    """Sentences of a finding: the problem; the evidence, with the arithmetic; the change, with its amount."""

    what: str
    why: str
    change: str


class Check(NamedTuple):
    """One check. examine: returns the sentences of its finding, None if it finds nothing."""

    name: str
    severity: Severity
    examine: Callable[[Evidence], Words | None]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Finding of a check."""

    name: str
    severity: Severity
    what: str
    why: str
    change: str


def percent(share: float) -> str:
    """Return a share of one in percent, with a decimal if it is small."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """Return seconds with three significant digits, in ms below a second."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
