"""The decision log read by people: what became of a pod, in sentences; and every decision made once more.

Invariant: a decision is made again by the same pure functions, of the observation as it was recorded, at the time that
was recorded; what the record lacks (the master secret, fingerprints in place of secrets) is left out of the comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from asyncflow_operator.decide.job import decide_job
from asyncflow_operator.decide.queue import decide_queue
from asyncflow_operator.decide.weights import decide_sync
from asyncflow_operator.decisions import outline
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.desired.secrets import OwnerSecrets
from asyncflow_operator.encoding import STATES, State, decode
from asyncflow_operator.observed import JobState, Manifest, Owner, PodView, SyncState, TransferQueueState

_NO_MASTER: Final = b"no master secret is recorded"


def settings_of(settings: DesiredSettings) -> Manifest:
    """Return the settings that are recorded with decisions: all but the master secret."""
    registry = settings.registry
    return {
        "images": registry.prefix,
        "tag": registry.tag,
        "namespace": settings.namespace,
        "watchers": list(settings.watchers),
    }


@dataclass(frozen=True, slots=True)
class _RecordedSecrets(OwnerSecrets):
    """Secrets whose names are those on record. names: by part."""

    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, part: str) -> str:
        """Return the name that is on record, else one of the same shape."""
        return self.names.get(part) or super(_RecordedSecrets, self).name(part)


@dataclass(frozen=True, slots=True)
class _RecordedDesired(Desired):
    """Builder without a master secret. names: of Secrets by the UID of their owner and part."""

    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def secrets(self, owner: Owner) -> OwnerSecrets:
        """Return the secrets of an owner, of which only the names are known."""
        return _RecordedSecrets(owner, _NO_MASTER, self.names.get(owner.uid, {}))


def decide_again(line: Manifest) -> tuple[Manifest, Manifest]:
    """Return what was decided, and what is decided now, as ``outline`` says it. Raises ValueError for no such line."""
    kind, *_ = line["object"]
    state: State = decode(STATES[kind], line["state"])
    told, now = line["settings"], line["at"]
    registry = Registry(prefix=told["images"], tag=told["tag"])
    settings = DesiredSettings(
        registry=registry, master=_NO_MASTER, namespace=told["namespace"], watchers=tuple(told["watchers"])
    )
    desired = _RecordedDesired(settings, dict(_names(state)))
    match state:
        case JobState():
            plan = decide_job(state, now=now, desired=desired)
        case TransferQueueState():
            plan = decide_queue(state, now=now, desired=desired)
        case SyncState():
            plan = decide_sync(state, now=now, desired=desired)
    there = {(ref.kind, ref.name) for ref in state.objects} if line["redacted"] else set()
    before, after = (_compared(each, there) for each in (line["decided"], outline(plan)))
    return before, after


def _names(state: State) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the UID of each owner and the names of its Secrets that are on record."""
    job = state if isinstance(state, JobState) else state.job
    for each in (state, job):
        if each is not None:
            yield each.owner.uid, {part: record.name for part, record in each.status.secrets.items()}


def _compared(decided: Manifest, there: set[tuple[str, str]]) -> Manifest:
    """Return what of a decision can be compared. there: objects whose digests are not known, as secrets are in them."""
    if not there:
        return decided
    stages = [
        [action for action in stage if action["do"] != "apply" or (action["kind"], action["name"]) not in there]
        for stage in decided["stages"]
    ]
    notes = [note for note in decided["notes"] if note[1] != "PutBack"]
    return decided | {"stages": [stage for stage in stages if stage], "notes": notes}


def differences(before: Any, after: Any, *, at: str = "") -> Iterator[str]:
    """Yield where two values of JSON differ, with what was and what is."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), at=f"{at}.{name}" if at else name)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, at=f"{at}[{index}]")
    elif before != after:
        yield f"{at}: was {before!r}, is {after!r}"


def sentences(lines: Iterable[Manifest], *, name: str, namespace: str | None, pod: str | None) -> Iterator[str]:
    """Yield what was decided about the objects called ``name``, or about one pod of theirs, in the order of time."""
    for line in lines:
        kind, where, owner = line["object"]
        if owner != name or (namespace is not None and where != namespace):
            continue
        said = list(_about(line, pod))
        if said:
            when = datetime.fromtimestamp(line["at"], UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            yield f"{when}  {kind} {where}/{owner}"
            yield from (f"  {each}" for each in said)


def _about(line: Manifest, pod: str | None) -> Iterator[str]:
    seen = {each["name"]: each for each in line["state"].get("pods", ())}
    about = [action for stage in line["decided"]["stages"] for action in stage]
    about = [action for action in about if pod is None or (action.get("kind"), action.get("name")) == ("Pod", pod)]
    for action in about:
        yield _did(action, seen)
    for sort, reason, message in line["decided"]["notes"]:
        if pod is None or re.search(rf"{re.escape(pod)}(?![\w-])", message):
            yield f"event {sort} {reason}: {message}"
    named = [f"{action.get('kind')}/{action.get('name')}" for action in about]
    yield from (f"left alone for a time, as it could not be written: {each}" for each in line["left"] if each in named)
    for did, what in (("refused", line["refused"]), ("failed at", line.get("server_failed", ()))):
        yield from (f"the API server {did} {each}" for each in what if each.partition(": ")[0] in named)
    yield from (f"failed: {each}" for each in line["failed"] if about)


def _did(action: Manifest, seen: Mapping[str, Manifest]) -> str:
    what = f"{action.get('kind')}/{action.get('name')}"
    match action["do"]:
        case "order":
            return f"asked the driver: POST {action['path']}"
        case "apply":
            attempt = f" (attempt {action['attempt']})" if "attempt" in action else ""
            return f"{'made' if action['kind'] == 'Pod' else 'applied'} {what}{attempt}"
        case "delete":
            how = " at once, without a grace period" if action["grace_s"] == 0 else ""
            return f"deleted {what}{how}: {action['why']}{_state(seen.get(action['name']))}"
        case "release":
            return f"released {what}: gates {action['gates']}, finalizers {action['finalizers']}"
        case _:
            return f"wrote into the status of {what}"


def _state(pod: Manifest | None) -> str:
    """Return how a pod was seen when it was decided about, "" for what is no pod."""
    if pod is None:
        return ""
    view: PodView = decode(PodView, pod)
    ended = "" if view.exit_code is None else f", exit code {view.exit_code} {view.exit_reason}".rstrip()
    taken = ", taken away by the cluster" if view.disrupted else ""
    gone = ", being deleted already" if view.deleting else ""
    node = f" on {view.node}" if view.node else ""
    return f". It was {view.phase}{node}, attempt {view.attempt}{ended}{taken}{gone}"
