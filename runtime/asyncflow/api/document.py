"""Reader and writer of YAML documents as plain data, with the line of every value, and ``--set path=value`` overrides.

Only values that JSON can express are accepted, without tags. ``5e-4`` is a number, as in kubectl. A value
that kubectl (YAML 1.1) reads differently, such as ``no``, ``0x10`` or ``<<``, is refused unless it is quoted, so that a
manifest means the same on one machine and on a cluster.

Invariants: the limits below bound the work for any file, even a malicious one: bytes, depth, aliases, and nodes after
the expansion of aliases are counted during parsing. An override is checked exactly as if its value were written in the
file.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from asyncflow.errors import ManifestError

Place = tuple[str | int, ...]
"""Keys and indices from the root of a manifest to a value."""

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_ALIASES = 100
_CHARACTERS_OF_A_NODE = 100

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,300})")
_KEY = re.compile(r"0|-?[1-9][0-9]*")
"""Matches numbers that are keys in kubectl as they are written."""
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]{1,3})?")
_KUBECTL = re.compile(
    r"[yYnN]|[yY]es|YES|[nN]o|NO|[oO]n|ON|[oO]ff|OFF|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    r"|[-+]?0(?:[bB][01_]+|[oO][0-7_]+|[xX][0-9a-fA-F_]+)"
    r"|[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)(?:[eE][-+]?[0-9_]+)?"
)
"""Matches plain scalars that kubectl does not read as texts; those that are read as numbers here are matched first."""
_BREAKS = re.compile("[\x85\u2028\u2029\ufeff]")
"""Characters that YAML reads as line breaks, or ignores, unless they are escaped."""
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Anchored(NamedTuple):
    value: Any
    nodes: int


@dataclass
class Document:
    """The data of a document, and the line of each place in it; the first line is 1."""

    data: Any
    lines: dict[Place, int] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """The first line of the document."""
        return self.lines[()]

    def line(self, path: Place) -> int:
        """Return the line of ``path``, or of its nearest parent in the file; 0 if there is none."""
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 0)


def parse(text: str, *, source: str) -> Document:
    """Read exactly one document. Raises ManifestError for any other number, and if a limit is exceeded."""
    first, *more = parse_all(text, source=source)
    if more:
        where = f"{source}, line {more[0].begin}"
        hint = "Keep one manifest in a file"
        raise ManifestError("a second document starts here", where=where, hint=hint)
    return first


def parse_all(text: str, *, source: str) -> list[Document]:
    """Read one or more documents. Raises ManifestError if there is none, one is empty, or a limit is exceeded."""
    try:
        return _Reader(text, source).documents()
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f", line {mark.line + 1}" if mark else ""
        why = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or str(error).splitlines()[0]
        hint = "Check the indentation and the quotes"
        raise ManifestError(f"this is not YAML: {why}", where=f"{source}{line}", hint=hint) from error


class _Reader:
    """Builds data from the parser's events and counts nodes and aliases meanwhile."""

    def __init__(self, text: str, source: str) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=_PARSER)
        self._source = source
        self._anchors: dict[str, _Anchored] = {}
        self._lines: dict[Place, int] = {}
        self._nodes = 0
        self._aliases = 0

    def documents(self) -> list[Document]:
        found: list[Document] = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors, self._lines = {}, {}
                found.append(Document(self._node(next(self._events), ()), self._lines))
        if all(each.data is None for each in found):
            raise ManifestError("the file is empty", where=self._source, hint="Write a manifest into the file")
        if empty := next((each for each in found if each.data is None), None):
            where = f"{self._source}, line {empty.begin}"
            hint = "Remove the superfluous --- line, or write a manifest below it"
            raise ManifestError("an empty document", where=where, hint=hint)
        return found

    def _node(self, event: Any, path: Place) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        before = self._nodes
        self._count(event, 1 + len(getattr(event, "value", "")) // _CHARACTERS_OF_A_NODE)
        if len(path) > MAX_DEPTH:
            hint = "Check the file: no valid manifest is so deep"
            raise self._refuse(event, f"values are nested more than {MAX_DEPTH} levels deep", hint)
        if event.tag is not None:
            raise self._refuse(event, f"the YAML tag {event.tag!r} is not allowed", "Write plain values, without tags")
        self._lines.setdefault(path, _line(event))
        value: Any
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path)
        else:
            value = self._scalar(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, self._nodes - before)
        return value

    def _mapping(self, path: Place) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refuse(event, "a key is not a plain string", "Write a plain string as the key")
            key = self._scalar(event)
            if (event.implicit[0] and key == "<<") or (type(key) is not str and not _KEY.fullmatch(event.value)):
                what = f"kubectl does not read the key {event.value} as a text"
                raise self._refuse(event, what, "Quote it; instead of <<, write the values")
            if event.value in mapping:
                raise self._refuse(event, f"the key {event.value!r} occurs twice in one mapping", "Remove one of them")
            place = (*path, event.value)
            self._lines[place] = _line(event)
            mapping[event.value] = self._node(next(self._events), place)
        return mapping

    def _sequence(self, path: Place) -> list[Any]:
        items: list[Any] = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, (*path, len(items))))
        return items

    def _scalar(self, event: Any) -> str | int | float | bool | None:
        text: str = event.value
        if not event.implicit[0]:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        if _KUBECTL.fullmatch(text):
            hint = "Quote it if it is a text; otherwise write true, false or a decimal number"
            raise self._refuse(event, f"kubectl does not read {text} as a text", hint)
        return text

    def _alias(self, event: Any) -> Any:
        anchored = self._anchors.get(event.anchor)
        if anchored is None:
            what = f"the alias *{event.anchor} has no anchor &{event.anchor} before it"
            raise self._refuse(event, what, "Define the anchor first, or write the value")
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            hint = "Write the values in place of the aliases"
            raise self._refuse(event, f"there are more than {MAX_ALIASES} aliases", hint)
        self._count(event, anchored.nodes)
        return copy.deepcopy(anchored.value)

    def _count(self, event: Any, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            hint = "Check the file: no valid manifest is so large"
            raise self._refuse(event, f"there are more than {MAX_NODES} values", hint)

    def _refuse(self, event: Any, what: str, hint: str) -> ManifestError:
        return ManifestError(what, where=f"{self._source}, line {_line(event)}", hint=hint)


def _line(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this module, or a YAML 1.1 parser, would read as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        quoted = '"' if _BREAKS.search(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quoted)


_Dumper.add_representer(str, _Dumper.represent_text)
for _pattern in (_INT, _FLOAT, _KUBECTL):
    _Dumper.add_implicit_resolver("tag:asyncflow.dev:number", re.compile(rf"^(?:{_pattern.pattern})$"), None)


def dump(data: dict[str, Any]) -> str:
    """Return plain data as YAML, which ``parse`` reads back as the same data."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


_ROOTS = ("spec", "metadata")


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Write each ``path=value`` into ``document``. Paths start at spec, or at the root with ``spec.``, ``metadata.``.

    Raises ManifestError if an override does not have this form, or if a parent in its path is not a mapping.
    """
    for override in overrides:
        path, separator, text = override.partition("=")
        where = f"--set {override}"
        keys = path.strip().split(".")
        if not separator or not all(keys):
            hint = "Write e.g. --set algorithm.steps=5"
            raise ManifestError("the override does not have the form path=value", where=where, hint=hint)
        if listed := next((key for key in keys if key.endswith("]")), None):
            name = listed.partition("[")[0]
            hint = f"Set the whole list: {name}=[...]"
            raise ManifestError(f"{listed} is an entry of a list, which has no path", where=where, hint=hint)
        try:
            override.encode()
        except UnicodeEncodeError as error:
            raise ManifestError("the override is not UTF-8 text", where=where, hint="Write it in UTF-8") from error
        if keys[0] not in _ROOTS:
            keys = ["spec", *keys]
        document.lines = {place: line for place, line in document.lines.items() if place[: len(keys)] != tuple(keys)}
        value, *more = parse(f"value: {text}", source=where).data.values()
        if more:
            hint = "Pass one --set for each value"
            raise ManifestError("the override does not have the form path=value", where=where, hint=hint)
        _put(document.data, keys, value, where=where)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ManifestError if a text was passed in place of the list of overrides."""
    if isinstance(overrides, str):
        raise ManifestError(f"overrides is the text {overrides!r}", where="overrides", hint=f"Pass [{overrides!r}]")


def latest(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each path."""
    last = {override.partition("=")[0].strip(): index for index, override in enumerate(overrides)}
    return [override for index, override in enumerate(overrides) if index in last.values()]


def _put(data: Any, keys: Sequence[str], value: Any, *, where: str) -> None:
    here = data
    for depth, key in enumerate(keys[:-1]):
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            what = f"{'.'.join(keys[: depth + 1])} is not a mapping"
            raise ManifestError(what, where=where, hint="Set it as a whole: path={key: value}")
    here[keys[-1]] = value
