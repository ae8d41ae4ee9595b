"""An API server in memory, made of kmock, for faults between two calls: every write of a whole life, in seconds.

It is asked over HTTP by the operator's own client. Only what the operator relies on is there: names given once,
resource versions, UIDs as preconditions, statuses apart, graceful deletion of pods, garbage collection by owner. What
the real server would refuse is refused. Invariant: after the deadly write nothing is written, until it is ``revived``.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import attrs
import kmock
import msgspec
from aiohttp import web

from asyncflow_operator.cluster.kinds import BY_NAME, EVENT, POD

Json = dict[str, Any]
Key = tuple[str, str, str]
KINDS = {kind.plural: kind.name for kind in (*BY_NAME.values(), EVENT)}


def copied(raw: Json) -> Json:
    """Return a copy down to the last value, as whoever reads an answer has."""
    return dict(msgspec.json.decode(msgspec.json.encode(raw)))


def _given(body: Any) -> Json:
    """Return what a patch sets; the one JSON Patch is that of a status, with a test of the UID before it."""
    if not isinstance(body, list):
        return copied(body)
    test, add = body
    return copied({"metadata": {"uid": test["value"]}, "status": add["value"]})


@attrs.define(kw_only=True)
class MemoryServer(kmock.KubernetesScaffold):
    """objects: by plural, namespace and name; made: how often each was made; changes: for who watches.

    deadly: the write with which the operator dies, None for none; now: unix seconds.
    """

    objects: dict[Key, Json] = attrs.field(factory=dict)
    made: Counter[tuple[str, ...]] = attrs.field(factory=Counter)
    changes: list[tuple[str, Json | None, Json]] = attrs.field(factory=list)
    deadly: int | None = None
    dead: asyncio.Event = attrs.field(factory=asyncio.Event)
    writes: int = 0
    now: Callable[[], float] = lambda: 0.0
    versions: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    async def _handle(self, request: kmock.Request) -> web.StreamResponse:
        serve = {
            kmock.action.LIST: self._list,
            kmock.action.CREATE: self._create,
            kmock.action.UPDATE: self._update,
            kmock.action.DELETE: self._delete,
        }
        if request.action not in serve:
            return await super()._handle(request)
        return web.json_response(serve[request.action](request))

    def revive(self) -> None:
        """Let the next operator write."""
        self.deadly = None
        self.dead.clear()

    def of(self, plural: str) -> dict[str, Json]:
        """Return the objects of a kind by name."""
        return {name: raw for (kind, _, name), raw in self.objects.items() if kind == plural}

    def put(self, plural: str, raw: Json) -> Json:
        """Store a new version of an object."""
        meta = raw["metadata"]
        key = (plural, meta.get("namespace", ""), meta["name"])
        before = self.objects.get(key)
        meta.setdefault("uid", f"uid-{next(self.versions)}")
        meta.setdefault("creationTimestamp", self.stamp())
        spec_changed = before is None or before.get("spec") != raw.get("spec")
        meta["generation"] = (before["metadata"]["generation"] if before else 0) + spec_changed
        meta["resourceVersion"] = str(next(self.versions))
        self.objects[key] = raw
        self.changes.append((KINDS[plural], copied(raw), raw))
        if before is None:
            attempt = (meta.get("labels") or {}).get("asyncflow.dev/attempt", "")
            self.made[plural, meta["name"], attempt] += 1
        return raw

    def remove(self, plural: str, raw: Json) -> None:
        """Remove an object and whatever it owns."""
        meta = raw["metadata"]
        del self.objects[plural, meta.get("namespace", ""), meta["name"]]
        self.changes.append((KINDS[plural], None, raw))
        for (kind, _, _), each in list(self.objects.items()):
            if any(owner["uid"] == meta["uid"] for owner in each["metadata"].get("ownerReferences", ())):
                self.remove(kind, each)

    def stamp(self) -> str:
        return datetime.fromtimestamp(self.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _list(self, request: kmock.Request) -> Json:
        name = request.params.get("fieldSelector", "").removeprefix("metadata.name=")
        plural = request.resource.plural
        items = [raw for (kind, _, each), raw in self.objects.items() if kind == plural and name in ("", each)]
        return {"metadata": {"resourceVersion": str(next(self.versions))}, "items": items}

    def _create(self, request: kmock.Request) -> Json:
        plural, raw = request.resource.plural, copied(request.data)
        if (plural, request.namespace, raw["metadata"]["name"]) in self.objects:
            raise kmock.KubernetesError(status=409, reason="AlreadyExists")
        return self._written(lambda: self.put(plural, raw))

    def _update(self, request: kmock.Request) -> Json:
        key = request.resource.plural, request.namespace or "", request.name or ""
        given, before = _given(request.data), self.objects.get(key)
        applies = "apply-patch" in request.headers["Content-Type"]
        version = given.get("metadata", {}).pop("resourceVersion", "")
        if before is not None and version not in ("", before["metadata"]["resourceVersion"]):
            raise kmock.KubernetesError(status=409, reason="Conflict")
        if before is None and (request.subresource or not applies):
            raise kmock.KubernetesError(status=404, reason="NotFound")
        if (
            before is not None
            and given.get("metadata", {}).get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]
        ):
            raise kmock.KubernetesError(status=422, reason="Invalid", message="metadata.uid: field is immutable")
        if before is not None and key[0] == POD.plural:
            raise kmock.KubernetesError(status=422, reason="Invalid", message="a pod cannot be changed")
        if before is None:
            return self._written(lambda: self.put(key[0], given))
        after = copied(before)
        if request.subresource == "status":
            after["status"] = given["status"]
        else:
            after["metadata"] |= given.pop("metadata", {})
            after |= given
        return self._written(lambda: after if after == before else self.put(key[0], after))

    def _delete(self, request: kmock.Request) -> Json:
        plural, raw = request.resource.plural, self.of(request.resource.plural).get(request.name or "")
        if raw is None:
            raise kmock.KubernetesError(status=404, reason="NotFound")
        if request.data["preconditions"]["uid"] != raw["metadata"]["uid"]:
            raise kmock.KubernetesError(status=409, reason="Conflict", message="the UID in the precondition is another")
        return self._written(lambda: self._deleted(plural, raw))

    def _deleted(self, plural: str, raw: Json) -> Json:
        if plural != POD.plural or raw["status"].get("phase") != "Running":
            self.remove(plural, raw)
            return {"kind": "Status", "metadata": {}, "status": "Success"}
        going = copied(raw)
        going["metadata"] |= {"deletionTimestamp": self.stamp(), "deletionGracePeriodSeconds": 10}
        return self.put(plural, going)

    def _written(self, write: Callable[[], Json]) -> Json:
        if self.deadly is not None and self.writes >= self.deadly:
            raise kmock.KubernetesError(status=503, reason="ServiceUnavailable")
        answer = write()
        self.writes += 1
        if self.writes == self.deadly:
            self.dead.set()
        return answer
