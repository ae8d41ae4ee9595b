"""Watches of the cluster, which keep the store up to date and mark the objects to reconcile.

kopf watches the three custom kinds and passes their events to the store. Informers watch all objects that the operator
creates for them.

Invariants: when an object changes, its owner is marked, and so is each custom resource that refers to that owner if its
decision may differ. All custom resources are listed at the start and periodically, so that a change that no watch
reported is found. kopf writes nothing to the cluster: it has handlers of raw events only and therefore sets no
finalizers and no annotations; it posts no events, looks for no peers and stores no state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Never

import kopf

from asyncflow.api.names import FIELD_MANAGER, GROUP, MANAGED, VERSION
from asyncflow.api.status import JobStatus
from asyncflow_operator.cluster.client import Api, ApiError
from asyncflow_operator.cluster.informer import Informer
from asyncflow_operator.cluster.kinds import CONFIG, CUSTOM_KINDS, MEMBERS, QUEUE, RLJOB, SYNC, Kind
from asyncflow_operator.cluster.owners import CustomResource, custom_resource, has_started, recover_accepted
from asyncflow_operator.cluster.store import ObjectGroup, ObjectStore
from asyncflow_operator.cluster.views import controller_of, object_view, pod_view
from asyncflow_operator.definitions import defined
from asyncflow_operator.references import Key, References

_SERVER_S: Final = 300
_CLIENT_S: Final = 310
_PAGE: Final = 500
_WORKER_S: Final = 1.0
"""Seconds for which kopf keeps the task of an object without events."""

Handler = Callable[..., Awaitable[None]]
Json = Mapping[str, Any]

_LABELS: Final = ",".join(f"{key}={value}" for key, value in MANAGED.items())
_RETRY_S: Final = 5.0
_START_S: Final = 30.0
"""Seconds within which kopf starts its watches, once it is ready."""
_LOOK_S: Final = 0.1

_log = logging.getLogger(__name__)


async def run_kopf(
    api: Api, store: ObjectStore, *, namespaces: tuple[str, ...], stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Feed ``store`` until ``stop`` is set. namespaces: all if empty; ready: set once kopf has started.

    kopf looks up the custom kinds only when it starts, so it is started after the cluster has them (``definitions``).
    """
    while not await defined(api):
        if await _is_set(stop, within_s=_RETRY_S):
            return
    registry = kopf.OperatorRegistry()
    for kind in CUSTOM_KINDS:
        kopf.on.event(GROUP, VERSION, kind.plural, registry=registry)(_feed(store, kind))
    kopf.on.login(registry=registry)(_login(api))
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = _SERVER_S
    settings.watching.client_timeout = _CLIENT_S
    settings.watching.chunk_size = _PAGE
    settings.queueing.idle_timeout = _WORKER_S
    settings.persistence.diffbase_storage = _NoDiffBase()
    await kopf.operator(
        registry=registry,
        settings=settings,
        standalone=True,
        identity=FIELD_MANAGER,  # type: ignore[arg-type]  # by default kopf uses the user's name, which a pod lacks
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )


class WatchEnded(Exception):
    """A watch has ended permanently, or its past events no longer hold: a new process must start from scratch."""


async def until_a_watch_ends(namespaces: tuple[str, ...]) -> Never:
    """Raise WatchEnded once kopf no longer watches one of the custom kinds. namespaces: as in ``run_kopf``.

    An error from which kopf does not recover (a refusal, or any ERROR event except "resource version too old") ends the
    task of that watch only.
    """
    wanted = len(CUSTOM_KINDS) * max(1, len(namespaces))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            while len(_watches()) < wanted:
                await asyncio.sleep(_LOOK_S)
    watches = _watches()
    if len(watches) == wanted:
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    _log.error("a watch has ended, restarting", extra={"left": sorted(each.get_name() for each in _watches())})
    raise WatchEnded


def _watches() -> set[asyncio.Task[Any]]:
    """Return kopf's watching tasks, found by name because kopf does not expose them."""
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for ")}


async def _is_set(event: asyncio.Event, *, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within_s)
    return event.is_set()


class _NoDiffBase(kopf.DiffBaseStorage):
    """Empty storage of kopf's base for comparisons, for which kopf would copy every object twice."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return an empty base."""
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        """Return None, because no base is stored."""

    def store(self, **_: Any) -> None:
        """Store nothing."""


def _feed(store: ObjectStore, kind: Kind) -> Handler:
    async def seen(event: Mapping[str, Any], **_: object) -> None:
        raw = event["object"]
        if event["type"] == "DELETED":
            meta = raw["metadata"]
            store.remove(kind.name, meta["namespace"], meta["name"], meta["uid"])
        else:
            store.put(kind.name, raw)

    return seen


def _login(api: Api) -> Callable[..., Awaitable[kopf.ConnectionInfo]]:
    """Return kopf's login with the credentials of ``api``; called again when the server refuses a token."""

    async def login(**_: object) -> kopf.ConnectionInfo:
        configuration = api.configuration
        token = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        scheme, _space, secret = (token or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme.capitalize() or None,
            token=secret or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )

    return login


def project(kind: str, raw: Json, before: Any, *, now: Callable[[], float]) -> Any:
    """Return the view of an object of any kind; see ``ObjectStore``."""
    if kind == "Pod":
        return pod_view(raw, before, now=now())
    return custom_resource(kind, raw, before) if kind in _CUSTOM else object_view(raw, kind=kind)


class ClusterWatch:
    """All watches.

    mark: called with each key to reconcile; renew: called with each key that is new, was deleted, or has another spec.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespaces: tuple[str, ...],
        mark: Callable[[Key], None],
        renew: Callable[[Key], None],
        resync_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._mark = mark
        self._renew = renew
        self._resync_s = resync_s
        self.store = ObjectStore(partial(project, now=now), self._changed)
        self.references = References()
        self._listed = asyncio.Event()
        self._informers = [
            Informer(api, self.store, kind, namespace=namespace, labels=_LABELS)
            for kind in MEMBERS
            for namespace in namespaces or ("",)
        ]
        self._optional = {
            kind.name: [each for each in self._informers if each.kind is kind] for kind in MEMBERS if kind.optional
        }

    def missing(self) -> list[str]:
        """Return the names of the lists that are not complete yet, none once all kinds have been listed."""
        kinds = sorted({each.kind.plural for each in self._informers if not each.synced.is_set()})
        resources = [] if self._listed.is_set() else ["the first list of custom resources"]
        return [f"the list of {plural}" for plural in kinds] + resources

    async def synced(self) -> None:
        """Wait until all kinds have been listed once; ``missing`` names the pending lists."""
        for informer in self._informers:
            await informer.synced.wait()
        await self._listed.wait()

    def silent_s(self) -> float:
        """Return the seconds since the last message from the server, of the informer with the oldest one."""
        now = time.monotonic()
        return max(now - each.last_message for each in self._informers)

    def stuck_s(self) -> float:
        """Return the longest time for which an informer has neither received a message nor retried."""
        now = time.monotonic()
        return max(now - each.last_activity for each in self._informers)

    async def run(self) -> None:
        """Watch the objects that the operator creates, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run(), name=f"informer {informer.kind.plural}")

    async def resync(self) -> Never:
        """List the custom resources periodically until cancelled. Raises WatchEnded if their state is an older one."""
        while True:
            try:
                for kind in CUSTOM_KINDS:
                    for namespace in self._namespaces or ("",):
                        await self._relist(kind, namespace)
            except ApiError as error:
                _log.warning("could not list the custom resources", extra={"why": str(error)})
                await asyncio.sleep(_RETRY_S)
                continue
            self._listed.set()
            await asyncio.sleep(self._resync_s)

    async def _relist(self, kind: Kind, namespace: str) -> None:
        """Update the store from a list, and mark every object of the kind.

        If an object or the list itself is older than the store was before the request, etcd was restored from a backup.
        Watches would then continue from a version that the server has not reached and receive nothing, and the store
        would drop new changes as old ones.
        """
        known = {entry.uid: entry.version for _, _, entry in self.store.all(kind.name)}
        newest = max(known.values(), default=0)
        listed: set[str] = set()
        version = "0"
        async for page in self._api.pages(kind, namespace=namespace):
            version = page["metadata"]["resourceVersion"]
            items = page.get("items") or ()
            older = any(int(raw["metadata"]["resourceVersion"]) < known.get(raw["metadata"]["uid"], 0) for raw in items)
            if older or int(version) < newest:
                _log.error("the API server has gone back to an older state, restarting", extra={"kind": kind.name})
                raise WatchEnded
            for raw in items:
                listed.add(raw["metadata"]["uid"])
                self.store.put(kind.name, {"apiVersion": kind.api_version, "kind": kind.name} | raw)
                await self._recover_accepted(kind, raw)
            await asyncio.sleep(0)
        self.store.retain(kind.name, namespace, listed, int(version))
        for where, name, _ in self.store.all(kind.name):
            self._mark(Key(kind.name, where, name))

    async def _recover_accepted(self, kind: Kind, raw: Json) -> None:
        """Restore the last accepted spec of an object that has started and whose newest spec is refused."""
        meta = raw["metadata"]
        entry = self.store.get(kind.name, meta["namespace"], meta["name"])
        if entry is None or entry.view.model is not None or not has_started(entry.view.status):
            return
        config = await self._api.find(CONFIG, meta["namespace"], meta["name"], metadata_only=False)
        if config is None or controller_of(config)[2] != entry.uid:
            return
        known = self.store.get(kind.name, meta["namespace"], meta["name"])
        if known is not None and known.version == entry.version:
            self.store.revise(kind.name, meta["namespace"], meta["name"], recover_accepted(entry.view, raw, config))

    def _changed(self, group: ObjectGroup, kind: str, before: Any, after: Any) -> None:
        """Mark every key whose decision may differ after a change of an object of ``kind`` in ``group``."""
        if before is None:
            for informer in self._optional.get(kind, ()):
                informer.exists()
        affected = _AFFECTED.get(kind, (RLJOB.name, QUEUE.name))
        for entry in self.store.of(group):
            if entry.kind in affected or entry.kind == group.kind:
                self._mark(Key(entry.kind, group.namespace, entry.view.owner.name))
        if kind in _CUSTOM:
            owner = (after or before).owner
            key = Key(kind, group.namespace, owner.name)
            around = self.references.around(key)
            self.references.note(key, None if after is None else after.model)
            decisive = _decisive(before, after)
            for other in around | self.references.around(key):
                if decisive or (kind, other.kind) == (RLJOB.name, SYNC.name):
                    self._mark(other)
            renewed = before is None or after is None or before.owner.generation != owner.generation
            (self._renew if renewed else self._mark)(key)


def _decisive(before: CustomResource | None, after: CustomResource | None) -> bool:
    """Return whether a change of a custom resource may change decisions about jobs and WeightSyncs that refer to it.

    Those decisions depend on its spec in force, its owner and, for a job, its phase.
    """
    if before is None or after is None or before.model is not after.model:
        return True
    phases = [each.status.phase for each in (before, after) if isinstance(each.status, JobStatus)]
    return (before.owner, before.controller) != (after.owner, after.controller) or len(set(phases)) > 1


_CUSTOM: Final = frozenset(kind.name for kind in CUSTOM_KINDS)
_AFFECTED: Final = {RLJOB.name: (RLJOB.name, QUEUE.name, SYNC.name), SYNC.name: (RLJOB.name, SYNC.name)}
"""Kinds to reconcile in the group of a changed object, in addition to the kind of the group itself, by the kind of the
changed object; RLJob and TransferQueue by default."""
