"""The cluster's definitions of the custom kinds: whether they have all that this version writes.

The API server refuses a field or a value that its definition does not have, and an object whose status is refused is
not reconciled. An operator under older definitions would therefore neither start jobs nor replace lost pods. It waits
instead and is not ready, so that a rolling update keeps the operator of the earlier version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from asyncflow.api.base import Spec
from asyncflow.api.crd import schema_of
from asyncflow.api.queue import QueueSpec, QueueStatus
from asyncflow.api.status import JobStatus
from asyncflow.api.weights import SyncSpec, WeightsStatus
from asyncflow_operator.cluster.client import Api, ApiError
from asyncflow_operator.cluster.kinds import CUSTOM_KINDS, QUEUE, RLJOB, SYNC

Schema = Mapping[str, Any]

_WRITTEN: Final[Mapping[str, Mapping[str, type[Spec]]]] = {
    RLJOB.name: {"status": JobStatus},
    QUEUE.name: {"spec": QueueSpec, "status": QueueStatus},
    SYNC.name: {"spec": SyncSpec, "status": WeightsStatus},
}
"""Parts that the operator writes, by kind; the spec of an RLJob is its user's."""
_INNER: Final = ("items", "additionalProperties")

_log = logging.getLogger(__name__)


async def defined(api: Api) -> bool:
    """Return whether the cluster has the custom kinds, as this version or a newer one defines them."""
    try:
        absent = [kind.plural for kind in CUSTOM_KINDS if not await api.serves(kind)]
        older = [] if absent else list(_older(await api.schemas(RLJOB)))
    except ApiError as error:
        _log.warning("could not query the definitions", extra={"why": str(error)})
        return False
    if absent:
        _log.warning("waiting for the definitions in crds/ to be installed", extra={"why": ", ".join(absent)})
    if older:
        _log.error(
            "waiting for the definitions in crds/ of this version: those of the cluster are older",
            extra={"why": f"they lack {older[0]}" + (f" and {len(older) - 1} more" if older[1:] else "")},
        )
    return not (absent or older)


def _older(served: Mapping[str, Schema]) -> Iterator[str]:
    """Yield what the schemas ``served``, by kind, lack."""
    for kind, parts in _WRITTEN.items():
        properties = served.get(kind, {}).get("properties", {})
        for part, model in parts.items():
            yield from lacking(schema_of(model), properties.get(part, {}), at=f"{kind}.{part}")


def lacking(wanted: Schema, served: Schema, *, at: str) -> Iterator[str]:
    """Yield the fields and values of the schema ``wanted`` that ``served`` does not allow. at: path of both."""
    fields = served.get("properties", {})
    for name, inner in wanted.get("properties", {}).items():
        if name in fields:
            yield from lacking(inner, fields[name], at=f"{at}.{name}")
        else:
            yield f"{at}.{name}"
    for part in _INNER:
        if isinstance(wanted.get(part), Mapping):
            yield from lacking(wanted[part], served.get(part) or {}, at=at)
    allowed = served.get("enum", ())
    yield from (f"{value!r} for {at}" for value in wanted.get("enum", ()) if allowed and value not in allowed)
