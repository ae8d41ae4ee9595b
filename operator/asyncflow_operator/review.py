"""Review of the decision log: its decisions in sentences for people, and each decision repeated and compared.

Invariant: a decision is repeated by the same pure functions, from the recorded observation at the recorded time. Parts
that depend on values that are not recorded (the master secret, and secrets replaced by fingerprints) are not compared.
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
    """Return the settings that are recorded with decisions: all except the master secret."""
    registry = settings.registry
    return {
        "images": registry.prefix,
        "tag": registry.tag,
        "namespace": settings.namespace,
        "watchers": list(settings.watchers),
    }


@dataclass(frozen=True, slots=True)
class _RecordedSecrets(OwnerSecrets):
    """Secrets with the recorded names. names: by part."""

    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, part: str) -> str:
        """Return the recorded name, or another name of the same shape if none is recorded."""
        return self.names.get(part) or super(_RecordedSecrets, self).name(part)


@dataclass(frozen=True, slots=True)
class _RecordedDesired(Desired):
    """Builder without a master secret. names: the names of Secrets, by the UID of their owner and by part."""

    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def secrets(self, owner: Owner) -> OwnerSecrets:
        """Return the secrets of an owner, with the recorded names and without real contents."""
        return _RecordedSecrets(owner, _NO_MASTER, self.names.get(owner.uid, {}))


def decide_again(line: Manifest) -> tuple[Manifest, Manifest]:
    """Return the recorded and the repeated decision, as ``outline`` does. Raises ValueError for a malformed line."""
    kind, *_ = line["object"]
    state: State = decode(STATES[kind], line["state"])
    recorded, now = line["settings"], line["at"]
    registry = Registry(prefix=recorded["images"], tag=recorded["tag"])
    settings = DesiredSettings(
        registry=registry, master=_NO_MASTER, namespace=recorded["namespace"], watchers=tuple(recorded["watchers"])
    )
    desired = _RecordedDesired(settings, dict(_names(state)))
    match state:
        case JobState():
            plan = decide_job(state, now=now, desired=desired)
        case TransferQueueState():
            plan = decide_queue(state, now=now, desired=desired)
        case SyncState():
            plan = decide_sync(state, now=now, desired=desired)
    excluded = {(ref.kind, ref.name) for ref in state.objects} if line["redacted"] else set()
    before, after = (_comparable(each, excluded) for each in (line["decided"], outline(plan)))
    return before, after


def _names(state: State) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the UID of each owner and the recorded names of its Secrets, by part."""
    job = state if isinstance(state, JobState) else state.job
    for each in (state, job):
        if each is not None:
            yield each.owner.uid, {part: record.name for part, record in each.status.secrets.items()}


def _comparable(decided: Manifest, excluded: set[tuple[str, str]]) -> Manifest:
    """Return the comparable part of a decision. excluded: objects whose digests depend on secrets that are unknown."""
    if not excluded:
        return decided
    stages = [
        [action for action in stage if action["do"] != "apply" or (action["kind"], action["name"]) not in excluded]
        for stage in decided["stages"]
    ]
    notes = [note for note in decided["notes"] if note[1] != "PutBack"]
    return decided | {"stages": [stage for stage in stages if stage], "notes": notes}


def differences(before: Any, after: Any, *, at: str = "") -> Iterator[str]:
    """Yield the path of each difference between two JSON values, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), at=f"{at}.{name}" if at else name)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, at=f"{at}[{index}]")
    elif before != after:
        yield f"{at}: was {before!r}, is {after!r}"


def sentences(lines: Iterable[Manifest], *, name: str, namespace: str | None, pod: str | None) -> Iterator[str]:
    """Yield the decisions about the objects called ``name``, or about one of their pods, in order of time."""
    for line in lines:
        kind, where, owner = line["object"]
        if owner != name or (namespace is not None and where != namespace):
            continue
        details = list(_details(line, pod))
        if details:
            when = datetime.fromtimestamp(line["at"], UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            yield f"{when}  {kind} {where}/{owner}"
            yield from (f"  {each}" for each in details)


def _details(line: Manifest, pod: str | None) -> Iterator[str]:
    pods = {each["name"]: each for each in line["state"].get("pods", ())}
    actions = [action for stage in line["decided"]["stages"] for action in stage]
    actions = [action for action in actions if pod is None or (action.get("kind"), action.get("name")) == ("Pod", pod)]
    for action in actions:
        yield _sentence(action, pods)
    for event_type, reason, message in line["decided"]["notes"]:
        if pod is None or re.search(rf"{re.escape(pod)}(?![\w-])", message):
            yield f"event {event_type} {reason}: {message}"
    named = [f"{action.get('kind')}/{action.get('name')}" for action in actions]
    yield from (f"not retried yet after an earlier failed write: {each}" for each in line["left"] if each in named)
    for verb, objects in (("refused", line["refused"]), ("failed at", line.get("server_failed", ()))):
        yield from (f"the API server {verb} {each}" for each in objects if each.partition(": ")[0] in named)
    yield from (f"failed: {each}" for each in line["failed"] if actions)


def _sentence(action: Manifest, pods: Mapping[str, Manifest]) -> str:
    target = f"{action.get('kind')}/{action.get('name')}"
    match action["do"]:
        case "order":
            return f"sent to the driver: POST {action['path']}"
        case "apply":
            attempt = f" (attempt {action['attempt']})" if "attempt" in action else ""
            return f"{'made' if action['kind'] == 'Pod' else 'applied'} {target}{attempt}"
        case "delete":
            how = " immediately, without a grace period" if action["grace_s"] == 0 else ""
            return f"deleted {target}{how}: {action['why']}{_pod_state(pods.get(action['name']))}"
        case "release":
            return f"released {target}: gates {action['gates']}, finalizers {action['finalizers']}"
        case _:
            return f"wrote into the status of {target}"


def _pod_state(pod: Manifest | None) -> str:
    """Return the observed state of a pod as a sentence, "" for an object that is not a pod."""
    if pod is None:
        return ""
    view: PodView = decode(PodView, pod)
    ended = "" if view.exit_code is None else f", exit code {view.exit_code} {view.exit_reason}".rstrip()
    disrupted = ", disrupted by the cluster" if view.disrupted else ""
    deleting = ", already being deleted" if view.deleting else ""
    node = f" on {view.node}" if view.node else ""
    return f". It was {view.phase}{node}, attempt {view.attempt}{ended}{disrupted}{deleting}"
