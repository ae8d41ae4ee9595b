"""Pure rendering of the doctor's findings as lines."""

from __future__ import annotations

import textwrap

from asyncflow.doctor.finding import Finding
from asyncflow.view.render import plain

_WIDTH = 110


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding as lines: the problem, the reason, and the recommended change."""
    head = f"{finding.severity}: {plain(finding.what)} [{finding.name}]"
    parts = (("why", finding.why), ("change", finding.change))
    return [head, *(line for title, text in parts for line in _wrapped(title, plain(text)))]


def _wrapped(title: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {title + ':':<8}", subsequent_indent=" " * 10)
