"""A finding: what is wrong, why that is known, and what to change. A check is a pure function that may find one.

Invariant: every sentence has its figures in it, so a reader can follow the arithmetic without the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from asyncflow.doctor.evidence import Evidence

Severity = Literal["fault", "warning", "advice"]
"""fault: the result is wrong, or nothing goes on; warning: part of the work is lost, or it will be wrong; advice: it
could be done in less time."""
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "advice")


class Words(NamedTuple):
    """Sentences of a finding: what is wrong; why, with the arithmetic; what to change, and by how much."""

    what: str
    why: str
    change: str


class Check(NamedTuple):
    """One thing that is looked for. examine: returns the sentences where it is found, None where it is not."""

    name: str
    severity: Severity
    examine: Callable[[Evidence], Words | None]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check that found something."""

    name: str
    severity: Severity
    what: str
    why: str
    change: str


def percent(share: float) -> str:
    """Return a share of one in percent, with a decimal where it is small."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """Return seconds in about three digits, in ms below a second."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
