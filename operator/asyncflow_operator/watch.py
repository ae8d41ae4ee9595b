"""Watches of the cluster, which keep the store in step with it and mark the objects to reconcile.

kopf watches the three custom kinds and passes their events to the store; informers watch everything that the operator
makes for them.

Invariants: whatever changes, the object that it was made for is marked, and those that refer to it where they may be
decided in another way; and a list of all custom resources, at the start and now and then, finds what no watch has
reported. kopf leaves no trace: there are handlers of raw events only,
so that it writes neither finalizer nor annotation; it posts no events, looks for no peers, and remembers nothing.
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
from asyncflow_operator.cluster.owners import CustomResource, begun, custom_resource, recover_accepted
from asyncflow_operator.cluster.store import ObjectGroup, ObjectStore
from asyncflow_operator.cluster.views import controller_of, object_view, pod_view
from asyncflow_operator.references import Key, References

_SERVER_S: Final = 300
_CLIENT_S: Final = 310
_PAGE: Final = 500
_WORKER_S: Final = 1.0
"""Seconds for which kopf keeps a task for an object without events."""

Handler = Callable[..., Awaitable[None]]
Json = Mapping[str, Any]

_LABELS: Final = ",".join(f"{key}={value}" for key, value in MANAGED.items())
_RETRY_S: Final = 5.0
_BEGIN_S: Final = 30.0
"""Seconds within which kopf begins to watch, once it is ready."""
_LOOK_S: Final = 0.1

_log = logging.getLogger(__name__)


async def run_kopf(
    api: Api, store: ObjectStore, *, namespaces: tuple[str, ...], stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Feed ``store`` until ``stop`` is set. namespaces: all if empty; ready: set once kopf has begun.

    kopf looks for the custom kinds once, when it begins: it does not before the cluster has them.
    """
    while not await _defined(api):
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
        identity=FIELD_MANAGER,  # type: ignore[arg-type]  # else kopf asks for the user's name, which a pod has not
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )


class WatchEnded(Exception):
    """A watch has ended for good, or what it has told holds no more: a new process is to begin anew."""


async def until_a_watch_ends(namespaces: tuple[str, ...]) -> Never:
    """Raise WatchEnded once kopf watches one of the custom kinds no more. namespaces: as of ``run_kopf``.

    An error that kopf does not know how to mend (a refusal, or any event ERROR but that of a version that is too old)
    ends the task of that watch, and nothing else.
    """
    wanted = len(CUSTOM_KINDS) * max(1, len(namespaces))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BEGIN_S):
            while len(_watches()) < wanted:
                await asyncio.sleep(_LOOK_S)
    watches = _watches()
    if len(watches) == wanted:
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    _log.error("a watch has ended, beginning anew", extra={"left": sorted(each.get_name() for each in _watches())})
    raise WatchEnded


def _watches() -> set[asyncio.Task[Any]]:
    """Return the tasks of kopf that watch; it gives them to nobody, but a name."""
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for ")}


async def _defined(api: Api) -> bool:
    """Return whether the cluster has the custom kinds."""
    try:
        lacking = [kind.plural for kind in CUSTOM_KINDS if not await api.serves(kind)]
    except ApiError as error:
        _log.warning("could not ask for the definitions", extra={"why": str(error)})
        return False
    if lacking:
        _log.warning("waiting for the definitions in crds/ to be installed", extra={"why": ", ".join(lacking)})
    return not lacking


async def _is_set(event: asyncio.Event, *, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within_s)
    return event.is_set()


class _NoDiffBase(kopf.DiffBaseStorage):
    """Empty base of kopf's comparisons. By default kopf copies every object twice for it, a third of its cost here."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return an empty essence."""
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        """Return nothing: nothing is remembered of an object."""

    def store(self, **_: Any) -> None:
        """Remember nothing."""


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
    """Return the view of an object of any kind; see ``Store``."""
    if kind == "Pod":
        return pod_view(raw, before, now=now())
    return custom_resource(kind, raw, before) if kind in _CUSTOM else object_view(raw, kind=kind)


class ClusterWatch:
    """All watches.

    mark: called with a key to reconcile; renew: with a key that is new, gone, or has another spec; now: unix seconds.
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
        """Return what is not known yet, nothing once everything has been listed."""
        kinds = sorted({each.kind.plural for each in self._informers if not each.synced.is_set()})
        resources = [] if self._listed.is_set() else ["the first list of custom resources"]
        return [f"the list of {plural}" for plural in kinds] + resources

    async def synced(self) -> None:
        """Wait until everything has been listed once; ``missing`` says what is waited for."""
        for informer in self._informers:
            await informer.synced.wait()
        await self._listed.wait()

    def silent_s(self) -> float:
        """Return for how long the quietest informer has heard nothing."""
        now = time.monotonic()
        return max(now - each.heard for each in self._informers)

    def stuck_s(self) -> float:
        """Return for how long an informer has neither heard anything nor tried again."""
        now = time.monotonic()
        return max(now - each.moved for each in self._informers)

    async def run(self) -> None:
        """Follow what the operator makes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run(), name=f"informer {informer.kind.plural}")

    async def resync(self) -> Never:
        """List the custom resources now and then until cancelled. Raises WatchEnded where they are of an older time."""
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
        """Compare the store with a list, and have everything reconciled once.

        Where an object, or the list itself, is older than what was known before it was asked for, etcd was restored
        from a backup: watches go on where they were, and hear nothing, and what has come since is taken for old.
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
                _log.error("the API server has gone back to an older state, beginning anew", extra={"kind": kind.name})
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
        """Find the spec that was accepted last of an object that has begun and whose newest spec is refused."""
        meta = raw["metadata"]
        entry = self.store.get(kind.name, meta["namespace"], meta["name"])
        if entry is None or entry.view.model is not None or not begun(entry.view.status):
            return
        config = await self._api.find(CONFIG, meta["namespace"], meta["name"], metadata_only=False)
        if config is None or controller_of(config)[2] != entry.uid:
            return
        known = self.store.get(kind.name, meta["namespace"], meta["name"])
        if known is not None and known.version == entry.version:
            self.store.revise(kind.name, meta["namespace"], meta["name"], recover_accepted(entry.view, raw, config))

    def _changed(self, group: ObjectGroup, kind: str, before: Any, after: Any) -> None:
        """Mark every key whose decision may differ after an object of ``kind`` in ``group`` has changed."""
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
    """Return whether jobs and versions that refer to a custom resource may be decided in another way once it is so.

    They go by its spec in force, its owners and, of a job, its phase; a WeightSync shows figures of its job besides.
    """
    if before is None or after is None or before.model is not after.model:
        return True
    phases = [each.status.phase for each in (before, after) if isinstance(each.status, JobStatus)]
    return (before.owner, before.controller) != (after.owner, after.controller) or len(set(phases)) > 1


_CUSTOM: Final = frozenset(kind.name for kind in CUSTOM_KINDS)
_AFFECTED: Final = {RLJOB.name: (RLJOB.name, QUEUE.name, SYNC.name), SYNC.name: (RLJOB.name, SYNC.name)}
"""By the kind that changed: the kinds of its group to reconcile, with that which the group is of; RLJob and
TransferQueue by default."""
