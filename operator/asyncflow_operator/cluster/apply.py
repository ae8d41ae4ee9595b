"""Execution of a plan: the status, then one stage after another.

An existing object of another owner is never taken over. An object is created, or it is changed if the owner's UID
controls it and it still has the observed UID; an object of the same name with another owner is a refusal that names it.
A Secret is applied without having been observed (``desired.secrets`` explains why that is safe), and the server's
answer does not contain it either.

Invariants: a stage starts only after every action of the stage before has been tried and no call failed, so a counted
failure is recorded before the pod from which it was counted is deleted. A refusal stops only the actions that need the
refused object. After the server has failed at one pod, which may take long, no further pods are created. The server's
answers are in the store before the plan counts as carried out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from asyncflow.api.names import LABEL_ATTEMPT
from asyncflow.errors import AsyncFlowError
from asyncflow_operator.actions import Action, Apply, Delete, DriverOrder, Release, Report
from asyncflow_operator.cluster.client import Api, ApiError, Json, Refusal, Unreachable
from asyncflow_operator.cluster.kinds import BY_NAME, POD, Kind
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.cluster.views import controller_of
from asyncflow_operator.observed import Denial, Manifest, Owner, Ref

AT_ONCE: Final = 8
"""Number of concurrent actions of one plan."""

Acted = Callable[[str, str], None]

_log = logging.getLogger(__name__)


class DriverCalls(Protocol):
    """Interface for orders to jobs' drivers."""

    def order(self, owner: Owner, path: str) -> None:
        """Queue a POST of ``path``, without waiting for the driver's answer."""


@dataclass(kw_only=True)
class Failures:
    """Failures of the actions of a plan.

    errors: all failures except refusals; denied: refusals that are not expected to change by themselves; ends: whether
    the namespace is being deleted.
    """

    errors: list[AsyncFlowError] = field(default_factory=list)
    denied: list[Denial] = field(default_factory=list)
    ends: bool = False

    def __bool__(self) -> bool:
        return bool(self.errors or self.denied)

    @property
    def at_pods(self) -> bool:
        """Return whether the server did not answer or failed at a pod, so that the next pod would probably fail too."""
        return any(isinstance(error, Unreachable) for error in self.errors) or any(
            denial.failed and denial.ref.kind == POD.name for denial in self.denied
        )


class PlanExecutor:
    """Executor of plans. driver: sends orders to the jobs' drivers; acted: called with each action and its outcome."""

    def __init__(self, api: Api, store: ObjectStore, driver: DriverCalls, *, acted: Acted = lambda *_: None) -> None:
        self._api = api
        self._store = store
        self._driver = driver
        self._acted = acted

    async def write_status(self, owner: Owner, status: Manifest) -> Failures:
        """Write the status of ``owner``, if that object still has the same UID.

        Every refusal counts as an error. A refusal that says that the object does not exist may come from another
        server or concern the status alone; only the watch reports its deletion reliably.
        """
        failures = Failures()
        kind = BY_NAME[owner.kind]
        try:
            raw = await self._api.write_status(kind, owner.namespace, owner.name, status, uid=owner.uid)
        except Refusal as refused:
            failures.ends = refused.namespace_ends
            failures.errors.append(refused)
        except ApiError as error:
            failures.errors.append(error)
        else:
            self._store.put(owner.kind, raw)
        self._log_action(owner, "status", owner.name, *failures.errors)
        return failures

    async def carry_out(
        self, owner: Owner, stages: Sequence[Sequence[Action]], *, lacking: Collection[Ref] = ()
    ) -> Failures:
        """Carry out the stages in order, the actions of a stage concurrently; stop after a stage with a failed call.

        lacking: objects that were refused before and are not retried yet.
        """
        failures = Failures()
        slots = asyncio.Semaphore(AT_ONCE)
        for stage in stages:
            absent = {*lacking, *(denial.ref for denial in failures.denied)}
            ready = [action for action in stage if not (isinstance(action, Apply) and action.needs & absent)]
            await asyncio.gather(*(self._try_action(owner, action, failures, slots) for action in ready))
            if failures.errors:
                break
        return failures

    async def _try_action(self, owner: Owner, action: Action, failures: Failures, slots: asyncio.Semaphore) -> None:
        if isinstance(action, DriverOrder):
            self._driver.order(owner, action.path)
            return
        async with slots:
            if failures.at_pods and isinstance(action, Apply) and action.ref.kind == POD.name:
                return
            try:
                await self._perform(owner, action)
            except Refusal as refused:
                failures.ends = failures.ends or refused.namespace_ends
                if refused.namespace_ends or refused.replaced or (refused.conflict and not refused.exists):
                    failures.errors.append(refused)
                else:
                    denial = Denial(
                        action.ref,
                        refused.what,
                        missing=self._lacks(owner, action),
                        deletes=isinstance(action, Delete),
                        failed=refused.failed,
                    )
                    failures.denied.append(denial)
                error: AsyncFlowError = refused
            except AsyncFlowError as failed:
                failures.errors.append(failed)
                error = failed
            else:
                self._log_action(owner, type(action).__name__.lower(), _name(action.ref))
                return
        self._log_action(owner, type(action).__name__.lower(), _name(action.ref), error)

    async def _perform(self, owner: Owner, action: Apply | Delete | Release | Report) -> None:
        match action:
            case Apply():
                await self._apply(owner, action)
            case Delete():
                await self._delete(owner, action)
            case Release():
                await self._release(owner.namespace, action)
            case Report():
                await self._write_part_of_status(owner.namespace, action)

    def _lacks(self, owner: Owner, action: Action) -> bool:
        """Return whether the owner lacks the object that the action was to create."""
        if not isinstance(action, Apply):
            return False
        if BY_NAME[action.ref.kind].watched == "never":
            resource = self._store.get(owner.kind, owner.namespace, owner.name)
            written = resource.view.status.secrets.values() if resource is not None else ()
            return all(record.name != action.ref.name for record in written)
        known = self._store.get(action.ref.kind, owner.namespace, action.ref.name)
        return known is None or known.owner != owner.uid

    async def _apply(self, owner: Owner, action: Apply) -> None:
        """Create or change an object. Its labels say what it is: if the admission of the cluster has changed one,
        Refusal is raised, and a pod is deleted.
        """
        kind, name = BY_NAME[action.ref.kind], action.ref.name
        known = self._store.get(kind.name, owner.namespace, name)
        if kind.watched == "never":
            await self._api.apply(kind, owner.namespace, action.manifest, force=True, metadata_only=True)
            return
        if known is not None and known.owner == owner.uid and kind is not POD:
            raw: Json | None = await self._change(kind, owner.namespace, action.manifest, uid=known.uid)
        else:
            raw = await self._create(owner, kind, action.manifest)
        if raw is None:
            return
        meta = raw["metadata"]
        if changed := action.manifest["metadata"]["labels"].items() - (meta.get("labels") or {}).items():
            why = f"a policy or webhook changed its label {min(changed)[0]}"
            if kind is POD:
                await self._delete(owner, Delete(ref=action.ref, uid=meta["uid"], why=why))
                why += ", so it was deleted"
            raise Refusal(why, where=f"apply {kind.plural}", status=403)
        self._store.put(kind.name, raw)

    async def _create(self, owner: Owner, kind: Kind, manifest: Manifest) -> Json | None:
        """Create an object. Returns None if the owner already has it; the watch will report it."""
        try:
            return await (self._api.create if kind is POD else self._api.make)(kind, owner.namespace, manifest)
        except Refusal as refused:
            if not refused.exists:
                raise
            return await self._recover(owner, kind, manifest, refused)

    async def _recover(self, owner: Owner, kind: Kind, manifest: Manifest, refused: Refusal) -> Json | None:
        """Repair and return an object of the owner that no watch reports because its labels were removed.

        Returns None for a pod that has its labels. A pod without them is covered by no NetworkPolicy, so it is deleted,
        and Refusal is raised. Also raises Refusal for an object of another owner.
        """
        name = manifest["metadata"]["name"]
        found = await self._api.find(kind, owner.namespace, name)
        meta = found["metadata"] if found is not None else {}
        if found is None or controller_of(found)[2] != owner.uid:
            raise Refusal(
                f"{refused.what}, and it does not belong to this {owner.kind}",
                where=refused.where,
                status=refused.status,
                reason=refused.reason,
            )
        if kind is not POD:
            return await self._change(kind, owner.namespace, manifest, uid=meta["uid"])
        wanted = {key: value for key, value in manifest["metadata"]["labels"].items() if key != LABEL_ATTEMPT}
        if wanted.items() <= (meta.get("labels") or {}).items():
            return None
        await self._api.delete(kind, owner.namespace, name, uid=meta["uid"])
        raise Refusal(
            "its labels were changed, so it was deleted and is created again",
            where=refused.where,
            status=refused.status,
        )

    async def _change(self, kind: Kind, namespace: str, manifest: Manifest, *, uid: str) -> Json:
        """Apply an object. Items that other clients have added to its lists stay, unless they make it invalid: if one
        has renumbered a port of a Service, two ports would have the same name.
        """
        body = manifest | {"metadata": manifest["metadata"] | {"uid": uid}}
        try:
            return await self._api.apply(kind, namespace, body, force=True)
        except Refusal as refused:
            if refused.status != 422 or refused.replaced or "spec" not in manifest:
                raise
        whole = {"metadata": {"uid": uid}, "spec": manifest["spec"]}
        await self._api.merge(kind, namespace, manifest["metadata"]["name"], whole)
        return await self._api.apply(kind, namespace, body, force=True)

    async def _delete(self, owner: Owner, action: Delete) -> None:
        """Delete an object. It is no failure if it does not exist or its name belongs to a newer object."""
        kind, name, uid = BY_NAME[action.ref.kind], action.ref.name, action.uid
        try:
            raw = await self._api.delete(kind, owner.namespace, name, uid=uid, grace_s=action.grace_s)
        except Refusal as refused:
            if not (refused.absent or refused.replaced):
                raise
            self._store.remove(kind.name, owner.namespace, name, uid)
            return
        meta = raw["metadata"]
        if raw.get("kind") == kind.name and (meta.get("deletionGracePeriodSeconds") or meta.get("finalizers")):
            self._store.put(kind.name, raw)
        else:
            self._store.remove(kind.name, owner.namespace, name, uid)

    async def _release(self, namespace: str, action: Release) -> None:
        """Change a pod's gates and finalizers. It is no failure if the pod does not exist or is a newer one."""
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
            if not (refused.absent or refused.replaced):
                raise

    async def _write_part_of_status(self, namespace: str, action: Report) -> None:
        """Write parts of a status, unless the object has changed since; its watch then triggers a reconciliation."""
        kind = BY_NAME[action.ref.kind]
        body = {"metadata": {"resourceVersion": action.version}, "status": action.status}
        try:
            raw = await self._api.merge(kind, namespace, action.ref.name, body, subresource="status")
        except Refusal as refused:
            if not (refused.absent or refused.conflict):
                raise
        else:
            self._store.put(kind.name, raw)

    def _log_action(self, owner: Owner, action: str, target: str, *errors: AsyncFlowError) -> None:
        about: dict[str, Any] = {"object": f"{owner.kind}/{owner.namespace}/{owner.name}", "target": target}
        self._acted(action, "failed" if errors else "ok")
        if errors:
            _log.warning("%s failed", action, extra=about | {"why": str(errors[-1])})
        else:
            _log.info("%s", action, extra=about)


def _name(ref: Ref) -> str:
    return f"{ref.kind}/{ref.name}"
