"""The document: one HTML file with its style and its program in it, and, where it is sent by mail, with the run too.

Invariants: the document asks for nothing from another host, and its policy lets it: style and program are known by
their digests, so what a run wrote is never run; data lie in it as JSON in which no tag can begin.
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
"""Files of the program, in the order in which each finds what it uses."""
_UNSAFE: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class PageDocument(NamedTuple):
    """A document and the Content-Security-Policy under which it works."""

    html: str
    policy: str


def document(run: Mapping[str, Any] | None = None) -> PageDocument:
    """Return the document. run: what it shows, by path of the request that it would make; None where it may ask.

    Where ``run`` has a ``title``, the document shows the timeline alone, under that.
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
    for character, written in _UNSAFE.items():
        data = data.replace(character, written)
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
