"""Carries out a plan: the status, then stage after stage.

Invariant: a stage begins only when all of the one before is done, so what was counted is on record before what it was
counted from is gone; and what the server answers is in the store before the plan counts as carried out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from asyncflow.api.base import API_VERSION
from asyncflow.errors import AsyncFlowError
from asyncflow_operator.actions import Action, Apply, Ask, Delete, Release, Report
from asyncflow_operator.cluster.client import Api, Json
from asyncflow_operator.cluster.kinds import BY_NAME, OURS, QUEUE, Kind
from asyncflow_operator.cluster.refusals import ApiError, Refusal
from asyncflow_operator.cluster.store import Store
from asyncflow_operator.observed import Manifest, Owner

AT_ONCE: Final = 8
"""Actions of one object under way at a time."""

Acted = Callable[[str, str], None]

_log = logging.getLogger(__name__)


class Driver(Protocol):
    """A job's driver, as far as a plan needs it."""

    async def ask(self, owner: Owner, path: str) -> None:
        """POST ``path`` with the job's token. Raises AsyncFlowError where the driver did not take it."""


@dataclass(kw_only=True)
class Failures:
    """What went wrong. denied: why an object was refused, in the server's words; ends: the namespace is ending;
    gone: the owner does not exist any more.
    """

    errors: list[AsyncFlowError] = field(default_factory=list)
    denied: str = ""
    ends: bool = False
    gone: bool = False

    def __bool__(self) -> bool:
        return bool(self.errors)


class Hands:
    """Does what plans say. driver: how to reach the jobs' drivers; acted: told each action and how it ended."""

    def __init__(self, api: Api, store: Store, driver: Driver, *, acted: Acted = lambda *_: None) -> None:
        self._api = api
        self._store = store
        self._driver = driver
        self._acted = acted

    async def write_status(self, owner: Owner, status: Manifest) -> Failures:
        """Write the status of ``owner``, if it still is the object with that UID."""
        failures = Failures()
        kind = BY_NAME[owner.kind]
        meta = {"name": owner.name, "namespace": owner.namespace, "uid": owner.uid}
        body = {"apiVersion": API_VERSION, "kind": owner.kind, "metadata": meta, "status": status}
        try:
            raw = await self._api.apply(kind, owner.namespace, body, subresource="status", force=True)
        except Refusal as refused:
            failures.gone = refused.absent or refused.conflict
            failures.ends = refused.namespace_ends
            if failures.gone:
                self._store.remove(owner.kind, owner.namespace, owner.name, owner.uid)
            failures.errors.append(refused)
        except ApiError as error:
            failures.errors.append(error)
        else:
            self._store.put(owner.kind, raw)
        self._report(owner, "status", owner.name, failures.errors)
        return failures

    async def carry_out(self, owner: Owner, stages: Sequence[Sequence[Action]]) -> Failures:
        """Do the stages in order, the actions of each at the same time; none after one in which something failed."""
        failures = Failures()
        slots = asyncio.Semaphore(AT_ONCE)
        for stage in stages:
            await asyncio.gather(*(self._one(owner, action, failures, slots) for action in stage))
            if failures:
                break
        return failures

    async def _one(self, owner: Owner, action: Action, failures: Failures, slots: asyncio.Semaphore) -> None:
        errors: list[AsyncFlowError] = []
        async with slots:
            try:
                await self._do(owner, action)
            except Refusal as refused:
                errors.append(refused)
                failures.ends = failures.ends or refused.namespace_ends
                if isinstance(action, Apply) and not refused.namespace_ends:
                    failures.denied = f"{_name(action)}: {refused.what}"
            except AsyncFlowError as error:
                errors.append(error)
        failures.errors.extend(errors)
        self._report(owner, type(action).__name__.lower(), _name(action), errors)

    async def _do(self, owner: Owner, action: Action) -> None:
        match action:
            case Apply(manifest=manifest):
                await self._apply(owner, manifest)
            case Delete(ref=ref, uid=uid, grace_s=grace_s):
                await self._delete(owner.namespace, ref.kind, ref.name, uid, grace_s)
            case Release():
                await self._release(owner.namespace, action)
            case Report():
                await self._tell(owner.namespace, action)
            case Ask(path=path):
                await self._driver.ask(owner, path)

    async def _apply(self, owner: Owner, manifest: Manifest) -> None:
        """Make an object, or change the one that ``owner`` has. One of that name that is another's is left alone: it is
        created and not applied, and of a Secret, which nobody reads, no field is taken from others. Of our own kinds
        all are known, and what a person may scale is applied from the beginning: who creates a field by POST is a
        manager beside the one who applies it, even under the same name, and the two conflict. What a person then has
        scaled stays so; everything else follows.
        """
        kind, name = BY_NAME[manifest["kind"]], manifest["metadata"]["name"]
        known = self._store.get(kind.name, owner.namespace, name)
        new = known is None and (kind in OURS or kind.watched == "never")
        if new or (known is not None and known.owner == owner.uid):
            raw = await self._change(kind, owner.namespace, manifest)
        else:
            raw = await self._api.create(kind, owner.namespace, manifest)
        if kind.watched != "never":
            self._store.put(kind.name, raw)

    async def _change(self, kind: Kind, namespace: str, manifest: Manifest) -> Json:
        force = kind not in OURS and kind.watched != "never"
        try:
            return await self._api.apply(kind, namespace, manifest, force=force)
        except Refusal as refused:
            if kind != QUEUE or refused.reason != "Conflict":
                raise
        unscaled = {key: value for key, value in manifest["spec"].items() if key != "storageUnits"}
        return await self._api.apply(kind, namespace, manifest | {"spec": unscaled}, force=False)

    async def _delete(self, namespace: str, kind_name: str, name: str, uid: str, grace_s: int | None) -> None:
        """Delete an object; that it is gone already, or that its name belongs to another one by now, is as good."""
        kind = BY_NAME[kind_name]
        try:
            raw = await self._api.delete(kind, namespace, name, uid=uid, grace_s=grace_s)
        except Refusal as refused:
            if not (refused.absent or refused.conflict):
                raise
            self._store.remove(kind_name, namespace, name, uid)
            return
        meta = raw["metadata"]
        if raw.get("kind") == kind_name and (meta.get("deletionGracePeriodSeconds") or meta.get("finalizers")):
            self._store.put(kind_name, raw)
        else:
            self._store.remove(kind_name, namespace, name, uid)

    async def _release(self, namespace: str, action: Release) -> None:
        """Change a pod's gates and finalizers; that it is gone already, or another one by now, is as good."""
        metadata: Manifest = {"uid": action.uid}
        body: Manifest = {"metadata": metadata}
        if action.finalizers is not None:
            metadata["finalizers"] = list(action.finalizers)
        if action.gates is not None:
            body["spec"] = {"schedulingGates": [{"name": gate} for gate in action.gates]}
        kind = BY_NAME[action.ref.kind]
        try:
            self._store.put(kind.name, await self._api.merge(kind, namespace, action.ref.name, body))
        except Refusal as refused:
            if not (refused.absent or refused.conflict):
                raise

    async def _tell(self, namespace: str, action: Report) -> None:
        """Write parts of a status. Raises Refusal (``conflict``) where the object has changed in the meantime."""
        kind = BY_NAME[action.ref.kind]
        body = {"metadata": {"resourceVersion": action.version}, "status": action.status}
        self._store.put(kind.name, await self._api.merge(kind, namespace, action.ref.name, body, subresource="status"))

    def _report(self, owner: Owner, action: str, target: str, errors: Sequence[AsyncFlowError]) -> None:
        about: dict[str, Any] = {"object": f"{owner.kind}/{owner.namespace}/{owner.name}", "target": target}
        self._acted(action, "failed" if errors else "ok")
        if errors:
            _log.warning("%s failed", action, extra=about | {"why": str(errors[-1])})
        else:
            _log.info("%s", action, extra=about)


def _name(action: Action) -> str:
    match action:
        case Apply(manifest=manifest):
            return f"{manifest['kind']}/{manifest['metadata']['name']}"
        case Delete(ref=ref) | Release(ref=ref) | Report(ref=ref):
            return f"{ref.kind}/{ref.name}"
        case Ask(path=path):
            return path
