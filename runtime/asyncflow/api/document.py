"""YAML documents as plain data, with the line of every value; changes by ``--set path=value``; plain data as YAML.

Only what JSON can say is accepted: no tags, no dates, no octal numbers; ``5e-4`` is a number, as it is for kubectl.

Invariants: the work is bounded by the limits below, whoever made the file: bytes, depth, aliases, and nodes after the
expansion of aliases are counted while it is read. An override is checked exactly as if its value had been written into
the file.
"""

from __future__ import annotations

import copy
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
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]{1,3})?")
_BREAKS = re.compile("[\x85\u2028\u2029\ufeff]")
"""Characters that YAML takes for line breaks, or for nothing, unless they are escaped."""
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
    """The data of a document, and the line of each place in it (1 is the first)."""

    data: Any
    lines: dict[Place, int] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """The line at which it begins."""
        return self.lines[()]

    def line(self, path: Place) -> int:
        """Return the line of ``path``, or of the nearest part of it that was written; 0 where there is none."""
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 0)


def parse(text: str, *, source: str) -> Document:
    """Read exactly one document. Raises ManifestError where there is none, a second one, or it breaks a limit."""
    first, *more = parse_all(text, source=source)
    if more:
        where = f"{source}, line {more[0].begin}"
        raise ManifestError("a second document", where=where, hint="Keep one manifest in a file")
    return first


def parse_all(text: str, *, source: str) -> list[Document]:
    """Read one or more documents. Raises ManifestError where there is none, one is empty, or they break a limit."""
    try:
        return _Reader(text, source).documents()
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f", line {mark.line + 1}" if mark else ""
        why = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or str(error).splitlines()[0]
        raise ManifestError(f"not YAML: {why}", where=f"{source}{line}", hint="Check indentation and quotes") from error


class _Reader:
    """Builds data from the parser's events, counting as it goes."""

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
        if not found or found[0].data is None:
            raise ManifestError("the file is empty", where=self._source, hint="Write a manifest into it")
        if empty := next((each for each in found if each.data is None), None):
            where = f"{self._source}, line {empty.begin}"
            raise ManifestError("an empty document", where=where, hint="Remove the --- around it")
        return found

    def _node(self, event: Any, path: Place) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        before = self._nodes
        self._count(event, 1 + len(getattr(event, "value", "")) // _CHARACTERS_OF_A_NODE)
        if len(path) > MAX_DEPTH:
            raise self._refuse(event, f"nested more than {MAX_DEPTH} deep", "A manifest is not that deep")
        if event.tag is not None:
            raise self._refuse(event, f"tag {event.tag!r}", "Write plain values, without tags")
        self._lines.setdefault(path, _line(event))
        value: Any
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path)
        else:
            value = _scalar(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, self._nodes - before)
        return value

    def _mapping(self, path: Place) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refuse(event, "a key that is not a word", "Write plain keys")
            if event.value in mapping:
                raise self._refuse(event, f"key {event.value!r} twice in one mapping", "Keep one of them")
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

    def _alias(self, event: Any) -> Any:
        anchored = self._anchors.get(event.anchor)
        if anchored is None:
            raise self._refuse(event, f"alias of {event.anchor!r}, which is not defined before", "Write the value")
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            raise self._refuse(event, f"more than {MAX_ALIASES} aliases", "Write the values out")
        self._count(event, anchored.nodes)
        return copy.deepcopy(anchored.value)

    def _count(self, event: Any, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise self._refuse(event, f"more than {MAX_NODES} values", "A manifest is not that large")

    def _refuse(self, event: Any, what: str, hint: str) -> ManifestError:
        return ManifestError(what, where=f"{self._source}, line {_line(event)}", hint=hint)


def _line(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1


def _scalar(event: Any) -> str | int | float | bool | None:
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this module, or an older YAML, would read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        quoted = '"' if _BREAKS.search(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quoted)


_Dumper.add_representer(str, _Dumper.represent_text)
for _pattern in (_INT, _FLOAT):
    _Dumper.add_implicit_resolver("tag:asyncflow.dev:number", re.compile(rf"^(?:{_pattern.pattern})$"), None)


def dump(data: dict[str, Any]) -> str:
    """Write plain data as YAML that ``parse`` reads back as it was."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


_ROOTS = ("spec", "metadata")


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Write each ``path=value`` into ``document``. Paths start at spec, or at the root with ``spec.``, ``metadata.``.

    Raises ManifestError where an override is not of this form, or its path leads through something that is no mapping.
    """
    for override in overrides:
        path, separator, text = override.partition("=")
        where = f"--set {override}"
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise ManifestError("not of the form path=value", where=where, hint="E.g. --set algorithm.steps=5")
        try:
            override.encode()
        except UnicodeEncodeError as error:
            raise ManifestError("not UTF-8 text", where=where, hint="Write it in UTF-8") from error
        if keys[0] not in _ROOTS:
            keys = ["spec", *keys]
        document.lines = {place: line for place, line in document.lines.items() if place[: len(keys)] != tuple(keys)}
        value, *more = parse(f"value: {text}", source=where).data.values()
        if more:
            raise ManifestError("not of the form path=value", where=where, hint="Give each value a --set of its own")
        _put(document.data, keys, value, where=where)


def latest(overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` without those whose path is set again later."""
    last = {override.partition("=")[0].strip(): index for index, override in enumerate(overrides)}
    return [override for index, override in enumerate(overrides) if index in last.values()]


def _put(data: Any, keys: Sequence[str], value: Any, *, where: str) -> None:
    here = data
    for depth, key in enumerate(keys[:-1]):
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise ManifestError(
                f"{'.'.join(keys[: depth + 1])} is no mapping", where=where, hint="Set it as a whole: path={key: value}"
            )
    here[keys[-1]] = value
