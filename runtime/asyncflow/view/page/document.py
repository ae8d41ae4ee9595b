"""The document: one HTML file that includes its style and its program, and in an exported file also the run's data.

Invariants: the document requests nothing from other hosts, and its content security policy forbids it. The policy
allows only the style and the program with the given digests, so text of a run is never executed. Data is embedded as
JSON without characters that could start a tag.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

import msgspec

_PROGRAM: Final = ("elements.js", "figures.js", "curves.js", "tracks.js", "panels.js", "samples.js", "page.js")
"""Files of the program; each uses only definitions of the files before it when it is loaded."""
_UNSAFE: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class PageDocument(NamedTuple):
    """A document and its Content-Security-Policy header."""

    html: str
    policy: str


def document(run: Mapping[str, Any] | None = None) -> PageDocument:
    """Return the document.

    run: embedded answers by path of the request; None for a document that sends requests. If ``run`` has a ``title``,
    the document shows only the timeline, under that title.
    """
    style, program = _parts()
    sources = {
        "default-src": "'none'",
        "script-src": _digest(program),
        "style-src": _digest(style),
        "img-src": "data:",
        **({} if run is not None else {"connect-src": "'self'"}),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    policy = "; ".join(f"{name} {value}" for name, value in sources.items())
    data = msgspec.json.encode(run).decode()
    for character, escaped in _UNSAFE.items():
        data = data.replace(character, escaped)
    parts = {"POLICY": policy, "STYLE": style, "PROGRAM": program, "DATA": data}
    before, *pieces = _file("page.html").split("@@")
    html = before + "".join(parts.get(piece, piece) for piece in pieces)
    return PageDocument(html, f"{policy}; frame-ancestors 'none'")


@cache
def _parts() -> tuple[str, str]:
    program = "".join(_file(name) for name in _PROGRAM)
    return f"\n{_file('page.css')}", f'\n"use strict";\n{{\n{program}}}\n'


def _file(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
