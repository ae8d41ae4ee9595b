"""Rendering of findings for people. Pure: values in, lines out."""

from __future__ import annotations

import textwrap

from asyncflow.doctor.finding import Finding
from asyncflow.view.render import plain

_WIDTH = 110


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding as lines: what it is, then why, then what to change."""
    head = f"{finding.severity}: {plain(finding.what)} [{finding.name}]"
    parts = (("why", finding.why), ("change", finding.change))
    return [head, *(line for title, words in parts for line in _wrapped(title, plain(words)))]


def _wrapped(title: str, words: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, initial_indent=f"  {title + ':':<8}", subsequent_indent=" " * 10)
