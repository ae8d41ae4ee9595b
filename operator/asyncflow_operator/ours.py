"""kopf watches our own three kinds and hands their events to the store.

Invariant: kopf leaves no trace. There are handlers of raw events only, so that it writes neither finalizer nor
annotation; it posts no events, looks for no peers, and remembers nothing of an object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import kopf

from asyncflow.api.base import GROUP, VERSION
from asyncflow.api.names import FIELD_MANAGER
from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.kinds import OURS, Kind
from asyncflow_operator.cluster.store import Store

_SERVER_S: Final = 300
_CLIENT_S: Final = 310
_PAGE: Final = 500
_WORKER_S: Final = 1.0
"""Seconds for which kopf keeps a task for an object without events."""

Handler = Callable[..., Awaitable[None]]


async def follow(
    api: Api, store: Store, *, namespaces: tuple[str, ...], stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Feed ``store`` until ``stop`` is set. namespaces: all if empty; ready: set once kopf has begun."""
    registry = kopf.OperatorRegistry()
    for kind in OURS:
        kopf.on.event(GROUP, VERSION, kind.plural, registry=registry)(_feed(store, kind))
    kopf.on.login(registry=registry)(_login(api))
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = _SERVER_S
    settings.watching.client_timeout = _CLIENT_S
    settings.watching.chunk_size = _PAGE
    settings.queueing.idle_timeout = _WORKER_S
    settings.persistence.diffbase_storage = _Nothing()
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


class _Nothing(kopf.DiffBaseStorage):
    """Empty base of kopf's comparisons. By default kopf copies every object twice for it, a third of its cost here."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return the part of an object that matters: none."""
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        """Return nothing: nothing is remembered of an object."""

    def store(self, **_: Any) -> None:
        """Remember nothing."""


def _feed(store: Store, kind: Kind) -> Handler:
    async def seen(event: Mapping[str, Any], **_: object) -> None:
        raw = event["object"]
        if event["type"] == "DELETED":
            meta = raw["metadata"]
            store.remove(kind.name, meta["namespace"], meta["name"], meta["uid"])
        else:
            store.put(kind.name, raw)

    return seen


def _login(api: Api) -> Callable[..., Awaitable[kopf.ConnectionInfo]]:
    """Return kopf the way to the API server that everything else goes; asked again when the server refuses a token."""

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
