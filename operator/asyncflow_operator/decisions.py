"""The decision log: what was seen, what was decided and what came of it, as lines of JSON in a ring of bounded size.

    FOLDER/decisions.jsonl      the newest
    FOLDER/decisions.1.jsonl    those before: when both are over the limit, this file is dropped

Only what did something is written: a plan with actions or events. An observation that is the same as that of the line
before about the same object is written once, and named by its digest afterwards.

Invariants: the two files together never exceed the limit; no secret is in them (``encoding``, and the contents of what
is applied are left out); a line whose observation lies in another file is none, so each file can be read alone; a disk
that fails costs lines, and stops nothing.
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
    """Writer of the log in ``folder``, of at most ``limit`` bytes. key: of fingerprints; settings: of the operator that
    shape its decisions.
    """

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
        """Write a decision that did something.

        left: objects that were left alone, because they could not be written before; denied, errors: what was refused
        now or met a failure of the server, and what else failed.
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
    """Return a plan as JSON: what is done to which object and why, without what is applied."""
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
    """Return the name of an object, that of a Secret without its mark, which nobody is to know before it exists."""
    return ref.name.rpartition("-")[0] if ref.kind == "Secret" else ref.name


def read_decisions(files: Sequence[Path]) -> Iterator[Manifest]:
    """Yield the lines of files, each with its observation as ``state``, in order; a line that was cut off is left out.

    Raises OSError where a file cannot be read, ValueError where a line is of another format.
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
    """Return the files of a log that are there, the older first."""
    return [path for path in (folder / OLDER, folder / NEWEST) if path.is_file()]
