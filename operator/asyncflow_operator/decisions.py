"""The decision log: observations, decisions and their results as JSON lines, in two files of bounded size.

    FOLDER/decisions.jsonl      the newest lines
    FOLDER/decisions.1.jsonl    the lines before; replaced when decisions.jsonl reaches half of the limit

Only plans with actions or events are written. If the observation equals that of the previous line about the same
object, the line names it by its digest instead of repeating it.

Invariants: the two files together never exceed the limit. They contain no secret: ``encoding`` replaces secrets, and
the contents of applied objects are left out. Each file can be read on its own, because a line never refers to an
observation in the other file. A failing disk loses lines but stops nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncflow import __version__
from asyncflow.api.names import LABEL_ATTEMPT
from asyncflow_operator.actions import Action, Apply, Delete, DriverOrder, Plan, Release, Report
from asyncflow_operator.encoding import Redactor, State, encode
from asyncflow_operator.observed import Denial, Manifest, Ref
from asyncflow_operator.references import Key

FORMAT: Final = 1
NEWEST, OLDER = "decisions.jsonl", "decisions.1.jsonl"
_DIGITS: Final = 16

_log = logging.getLogger(__name__)


class DecisionLog:
    """Writer of the log in ``folder``, of at most ``limit`` bytes. key: for fingerprints; settings: of the operator."""

    def __init__(self, folder: Path, *, limit: int, key: bytes, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._most = limit // 2
        self._key = key
        self._settings = dict(settings)
        self._known: dict[Key, str] = {}
        self._failing = False

    def record(
        self,
        key: Key,
        state: State,
        plan: Plan,
        *,
        now: float,
        left: Iterable[Ref] = (),
        denied: Collection[Denial] = (),
        errors: Iterable[str] = (),
    ) -> None:
        """Write a decision if its plan has actions or events.

        left: objects that were not retried yet after an earlier refusal; denied: objects that the server refused now,
        or at which it failed; errors: all other failures.
        """
        if not any(plan.stages) and not plan.notes:
            return
        redactor = Redactor(self._key)
        seen = msgspec.json.encode(encode(state, redactor))
        name = hashlib.sha256(seen).hexdigest()[:_DIGITS]
        line = {
            "format": FORMAT,
            "version": __version__,
            "at": now,
            "object": list(key),
            "settings": self._settings,
            "redacted": redactor.found,
            "observed": name,
            "decided": outline(plan),
            "left": sorted(f"{ref.kind}/{_bare(ref)}" for ref in left),
            "refused": [str(denial) for denial in denied if not denial.failed],
            "server_failed": [str(denial) for denial in denied if denial.failed],
            "failed": list(errors),
        }
        try:
            self._write(key, name, line, msgspec.Raw(seen))
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.warning("decisions cannot be written", extra={"target": str(self._folder), "why": str(error)})
            self._failing = True

    def _write(self, key: Key, name: str, line: Manifest, seen: msgspec.Raw) -> None:
        path = self._folder / NEWEST
        size = path.stat().st_size if path.exists() else 0
        written = _encoded(line if self._known.get(key) == name else line | {"state": seen})
        if size + len(written) > self._most:
            written = _encoded(line | {"state": seen})
            self._known.clear()
            if size:
                path.replace(self._folder / OLDER)
        if len(written) > self._most:
            _log.warning("a decision is too long for the log", extra={"object": str(key), "bytes": len(written)})
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(written)
        self._known[key] = name


def _encoded(line: Manifest) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def outline(plan: Plan) -> Manifest:
    """Return a plan as JSON: its actions with objects and reasons, without the contents of applied objects."""
    outlined = {
        "status": plan.status,
        "stages": [[_outline(action) for action in stage] for stage in plan.stages],
        "notes": [[note.type, note.reason, note.message] for note in plan.notes],
        "again_in_s": plan.again_in_s,
    }
    made: Manifest = msgspec.json.decode(msgspec.json.encode(outlined))
    return made


def _outline(action: Action) -> Manifest:
    if isinstance(action, DriverOrder):
        return {"do": "order", "path": action.path}
    about = {"do": type(action).__name__.lower(), "kind": action.ref.kind, "name": _bare(action.ref)}
    match action:
        case Apply(manifest=manifest):
            attempt = manifest["metadata"].get("labels", {}).get(LABEL_ATTEMPT)
            return about | ({} if attempt is None else {"attempt": attempt})
        case Delete():
            return about | {"uid": action.uid, "grace_s": action.grace_s, "why": action.why}
        case Release():
            kept = {"gates": action.gates, "finalizers": action.finalizers}
            lists = {name: None if each is None else list(each) for name, each in kept.items()}
            return about | {"uid": action.uid} | lists
        case Report():
            return about | {"version": action.version, "status": action.status}


def _bare(ref: Ref) -> str:
    """Return the name of an object; of a Secret without its mark, which must stay unknown until the Secret exists."""
    return ref.name.rpartition("-")[0] if ref.kind == "Secret" else ref.name


def read_decisions(files: Sequence[Path]) -> Iterator[Manifest]:
    """Yield the lines of files in order, each with its observation as ``state``; truncated lines are skipped.

    Raises OSError if a file cannot be read, and ValueError if a line has another format.
    """
    for path in files:
        states: dict[tuple[str, ...], tuple[str, Any]] = {}
        for written in path.read_bytes().split(b"\n")[:-1]:
            try:
                line = msgspec.json.decode(written)
            except msgspec.DecodeError:
                continue
            if line["format"] != FORMAT:
                raise ValueError(f"{path}: format {line['format']} is not {FORMAT}, use version {line['version']}")
            about = tuple(line["object"])
            if "state" in line:
                states[about] = line["observed"], line["state"]
            name, state = states.get(about, ("", None))
            if name == line["observed"]:
                yield line | {"state": state}


def files_of(folder: Path) -> list[Path]:
    """Return the existing files of a log, the older first."""
    return [path for path in (folder / OLDER, folder / NEWEST) if path.is_file()]
