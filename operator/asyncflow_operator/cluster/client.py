"""Client of the API server: JSON requests over one pool of connections, with one error class for each reaction.

``kubernetes.aio`` provides configuration, credentials and transport; its model classes are not used.

Invariants: a call ends within its deadline and reads at most ``ANSWER_BYTES``, whatever the server does. No redirect is
followed and nothing is decompressed. A call that may be retried is retried, and every answer is counted once. Every
failed call raises one of the errors of this module, whose message names the request and the reason and contains no
secret.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec
from aiohttp.connector import Connection
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from asyncflow.api.names import FIELD_MANAGER
from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow_operator.cluster.kinds import Kind
from asyncflow_operator.worklist import backoff

_ENDING = "NamespaceTerminating"
_UID: Final = re.compile(r"UID in (the )?precondition|uid mismatch|metadata\.uid")
Json = dict[str, Any]
Answered = Callable[[str, str, str, float], None]
"""Called for each answer with the verb, the resource, the HTTP status or the name of the error, and the seconds."""

JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
APPLY: Final = "application/apply-patch+yaml"
METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

ANSWER_BYTES: Final = 16 << 20
"""Largest answer, and largest line of a watch; a larger page of a list is requested again in smaller pages."""
CALL_S: Final = 15.0
"""Seconds for one attempt."""
DEADLINE_S: Final = 30.0
"""Seconds for a call with all its attempts."""
_NO_VERSION: Final = "1"
"""A resource version that no object has, because it is etcd's first revision."""
_FIRST_BACKOFF_S: Final = 0.2
_LONGEST_BACKOFF_S: Final = 5.0
_OWNED: Final = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
_BUSY: Final = frozenset((429, 502, 503, 504))
_BROKEN: Final = (aiohttp.ClientError, TimeoutError, OSError)

_log = logging.getLogger(__name__)


class ApiError(AsyncFlowError):
    """A call to the API server failed."""

    code = "api"


class Unreachable(ApiError):
    """No answer came in time, or the server was too busy; the call was retried until its deadline."""

    code = "api_unreachable"


class TooLarge(ApiError):
    """An answer is larger than ``ANSWER_BYTES``."""

    code = "api_too_large"


class NotLeading(ApiError):
    """Nothing was sent, because another operator may lead now."""

    code = "api_not_leading"


class Expired(ApiError):
    """A watch or a page continues from a version that the server no longer has: the caller must list again."""

    code = "api_expired"


class Refusal(ApiError):
    """The server refused a call. status: HTTP status; reason, about, causes: fields of the answer, "" if absent."""

    code = "api_refusal"

    def __init__(
        self, what: str, *, where: str, status: int, reason: str = "", about: str = "", causes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(what, where=where)
        self.status = status
        self.reason = reason
        self.about = about
        self.causes = causes

    @property
    def failed(self) -> bool:
        """Return whether the server, a webhook or this process's credentials failed, independently of the object."""
        return self.status == 401 or self.status >= 500

    @property
    def absent(self) -> bool:
        """Return whether the object or the whole kind does not exist."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """Return whether another writer was faster, or owns a field that was not forced."""
        return self.status == 409

    @property
    def exists(self) -> bool:
        """Return whether an object of that name already exists."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def replaced(self) -> bool:
        """Return whether the object with the requested UID no longer exists, which only the message shows."""
        return self.status in (409, 422) and _UID.search(self.what) is not None

    @property
    def namespace_ends(self) -> bool:
        """Return whether nothing can be created in the namespace because it is being deleted."""
        return _ENDING in self.causes


def refusal(status: int, answer: Mapping[str, Any], *, where: str) -> ApiError:
    """Return the error for an answer of the server, which is a ``Status`` object or any other JSON object."""
    details = answer.get("details") or {}
    causes = tuple(str(cause.get("reason", "")) for cause in details.get("causes") or ())
    what = str(answer.get("message") or f"HTTP {status}")
    if status == 410:
        return Expired(what, where=where)
    reason, about = str(answer.get("reason", "")), str(details.get("kind", ""))
    return Refusal(what, where=where, status=status, reason=reason, about=about, causes=causes)


async def _refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise aiohttp.ClientError(f"a redirect (HTTP {response.status}), which is not followed")
    return response


def _fenced(api: Api) -> type[aiohttp.ClientRequest]:
    """Return a request class that checks ``may_write`` after it has a connection, immediately before it sends."""

    class Fenced(aiohttp.ClientRequest):
        async def send(self, conn: Connection) -> aiohttp.ClientResponse:
            if self.method != "GET" and not api.may_write():
                raise NotLeading("another operator may lead now", where=f"{self.method} {self.url.path}")
            return await super().send(conn)

    return Fenced


class Api:
    """Client of one server, as one user. may_write: called before each write; if it is False, NotLeading is raised."""

    def __init__(self, configuration: Configuration, *, answered: Answered = lambda *_: None) -> None:
        configuration.client_session_kwargs = {
            "trust_env": False,
            "auto_decompress": False,
            "middlewares": (_refuse_redirects,),
            "request_class": _fenced(self),
        }
        self.configuration = configuration
        self.may_write: Callable[[], bool] = lambda: True
        self._served: dict[str, Kind] = {}
        self._client: Any = ApiClient(configuration)
        self._answered = answered

    @classmethod
    async def connect(cls, *, kubeconfig: Path | None, connections: int, answered: Answered = lambda *_: None) -> Api:
        """Return a client from a kubeconfig, or from the pod's service account; nothing is sent yet.

        connections: most concurrent calls and watches. Raises ManifestError if there is no usable configuration.
        """
        configuration = Configuration()
        configuration.connection_pool_maxsize = connections
        load: Any = kubernetes_config
        try:
            if kubeconfig is None:
                load.load_incluster_config(client_configuration=configuration)
            else:
                await load.load_kube_config(
                    config_file=str(kubeconfig), client_configuration=configuration, persist_config=False
                )
        except (kubernetes_config.ConfigException, OSError) as error:
            where = str(kubeconfig or "service account")
            hint = "Set --kubeconfig, or run in a pod with a service account"
            what = f"no usable configuration for the API server: {error}"
            raise ManifestError(what, where=where, hint=hint) from error
        return cls(configuration, answered=answered)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def settle(self, kind: Kind) -> None:
        """Choose the version of a kind that the cluster serves, if the kind has an older one. Raises as ``get``."""
        if not kind.older:
            return
        group = kind.api_version.partition("/")[0]
        answer = await self._call("get", "GET", kind, f"/apis/{group}")
        served = {each["groupVersion"] for each in answer.get("versions") or ()}
        self._served[kind.name] = kind.at(kind.older) if kind.api_version not in served else kind

    async def serves(self, kind: Kind) -> bool:
        """Return whether the cluster has a kind. Raises as ``get``."""
        try:
            answer = await self._call("get", "GET", kind, f"/apis/{kind.api_version}")
        except Refusal as refused:
            if not refused.absent:
                raise
            return False
        return any(each["name"] == kind.plural for each in answer.get("resources") or ())

    async def schemas(self, kind: Kind) -> dict[str, Json]:
        """Return the schema of each kind in the group and version of ``kind``, by name. Raises as ``get``."""
        path = f"/openapi/v3/apis/{kind.api_version}"
        answer = await self._call("get", "GET", kind, path)
        schemas = (answer.get("components") or {}).get("schemas") or {}
        return {name.rpartition(".")[2]: schema for name, schema in schemas.items()}

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """Return an object. Raises Refusal (``absent`` if it does not exist) and Unreachable, as all calls do."""
        return await self._call("get", "GET", kind, self._path(kind, namespace, name))

    async def create(self, kind: Kind, namespace: str, body: Json, *, deadline_s: float = DEADLINE_S) -> Json:
        """Create an object. Raises Refusal (``conflict``) if one of that name exists."""
        path, body = self._path(kind, namespace), self._written(kind, body)
        return await self._call("create", "POST", kind, path, body=body, query=_OWNED, deadline_s=deadline_s)

    async def make(self, kind: Kind, namespace: str, manifest: Json) -> Json:
        """Create an object by server-side apply, so that a later apply can remove each of its fields.

        Raises Refusal (``exists``) if an object of that name exists: the request names a resource version that no
        object has, and the server refuses it for an object with another version. A conflict about another resource is
        not of this kind; it comes from concurrent use of a quota.
        """
        name = manifest["metadata"]["name"]
        body = manifest | {"metadata": manifest["metadata"] | {"resourceVersion": _NO_VERSION}}
        try:
            return await self.apply(kind, namespace, body, force=False)
        except Refusal as refused:
            if refused.reason != "Conflict" or refused.about not in ("", kind.plural):
                raise
            what = f'{kind.plural} "{name}" already exists'
            raise Refusal(what, where=refused.where, status=refused.status, reason="AlreadyExists") from refused

    async def find(self, kind: Kind, namespace: str, name: str, *, metadata_only: bool = True) -> Json | None:
        """Return an object whatever its labels are, None if it does not exist, by a list with its name."""
        fields = f"metadata.name={name}"
        async for page in self.pages(kind, namespace=namespace, fields=fields, metadata_only=metadata_only):
            for raw in page.get("items") or ():
                return dict(raw)
        return None

    async def replace(self, kind: Kind, namespace: str, name: str, body: Json, *, deadline_s: float) -> Json:
        """Write a whole object. Raises Refusal (``conflict``) if its ``resourceVersion`` has changed."""
        return await self._call(
            "update", "PUT", kind, self._path(kind, namespace, name), body=body, deadline_s=deadline_s
        )

    async def merge(self, kind: Kind, namespace: str, name: str, body: Json, *, subresource: str = "") -> Json:
        """Change some fields of an object by a merge patch."""
        path = self._path(kind, namespace, name, subresource)
        return await self._call("patch", "PATCH", kind, path, body=body, form=MERGE)

    async def apply(
        self,
        kind: Kind,
        namespace: str,
        manifest: Json,
        *,
        force: bool,
        metadata_only: bool = False,
    ) -> Json:
        """Apply an object by server-side apply, and return the resulting object.

        force: take fields from other managers instead of raising Refusal; metadata_only: return its metadata only.
        """
        path = self._path(kind, namespace, manifest["metadata"]["name"])
        query = _OWNED | ({"force": "true"} if force else {})
        body = self._written(kind, manifest)
        accept = METADATA if metadata_only else JSON
        return await self._call("patch", "PATCH", kind, path, body=body, query=query, form=APPLY, accept=accept)

    async def write_status(self, kind: Kind, namespace: str, name: str, status: Json, *, uid: str) -> Json:
        """Replace the status of a custom resource. Raises Refusal (``replaced``) if the object has another UID.

        The server ignores a UID that is applied or merged together with a status, so a JSON Patch tests it. A failed
        test is refused without causes; an invalid status is refused with causes.
        """
        path = self._path(kind, namespace, name, "status")
        body: list[Json] = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": status},
        ]
        try:
            return await self._call("patch", "PATCH", kind, path, body=body, query=_OWNED, form=JSON_PATCH)
        except Refusal as refused:
            if refused.status != 422 or refused.causes:
                raise
            what = f'uid mismatch: {kind.plural} "{name}" is another one'
            raise Refusal(what, where=refused.where, status=409, reason="Conflict") from refused

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, grace_s: int | None = None) -> Json:
        """Delete an object. Raises Refusal (``replaced``) if the object of that name has another UID."""
        body: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        body["propagationPolicy"] = "Background"
        return await self._call("delete", "DELETE", kind, self._path(kind, namespace, name), body=body)

    async def pages(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
        size: int = 500,
    ) -> AsyncIterator[Json]:
        """Yield a list in pages of at most ``size`` objects, smaller if a page is too large. Raises Expired."""
        query = {"limit": str(size)}
        query |= {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
        accept = METADATA_LIST if metadata_only else JSON
        while True:
            try:
                page = await self._call("list", "GET", kind, self._path(kind, namespace), query=query, accept=accept)
            except TooLarge:
                if query["limit"] == "1":
                    raise
                query["limit"] = str(max(1, int(query["limit"]) // 8))
                continue
            yield page
            continuation = page["metadata"].get("continue")
            if not continuation:
                return
            query["continue"] = continuation

    async def watch(
        self,
        kind: Kind,
        *,
        since: str,
        namespace: str = "",
        labels: str = "",
        metadata_only: bool = False,
        idle_s: float,
    ) -> AsyncIterator[list[Json]]:
        """Yield the changes after version ``since`` as they arrive, in batches, until the server ends the stream.

        Raises Expired if ``since`` is too old, and Unreachable if no message came for ``idle_s`` seconds or the server
        is too busy; in that case it waits for the requested time first, and the watch may be continued at ``since``.
        """
        query = {"watch": "true", "resourceVersion": since, "allowWatchBookmarks": "true"}
        query |= {"labelSelector": labels} if labels else {}
        path = self._path(kind, namespace)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_S)
        accept = METADATA if metadata_only else JSON
        started = time.monotonic()
        try:
            async with asyncio.timeout(CALL_S):
                response = await self._send("GET", path, query=query, accept=accept, timeout=timeout)
            self._answered("watch", kind.plural, str(response.status), time.monotonic() - started)
            if response.status != 200:
                failure = refusal(response.status, _decoded(await _whole(response)), where=f"watch {path}")
                if response.status not in _BUSY:
                    raise failure
                await asyncio.sleep(_seconds(response.headers.get("Retry-After", "")))
                raise Unreachable(failure.what, where=failure.where)
            async for batch in _lines(response, idle_s):
                yield [_changed(line, path) for line in batch]
        except _BROKEN as error:
            raise Unreachable(_message(error), where=f"watch {path}") from error

    def _path(self, kind: Kind, namespace: str = "", name: str = "", subresource: str = "") -> str:
        return self._served.get(kind.name, kind).path(namespace, name, subresource)

    def _written(self, kind: Kind, manifest: Json) -> Json:
        return self._served.get(kind.name, kind).written(manifest) if kind.older else manifest

    async def _call(
        self,
        verb: str,
        method: str,
        kind: Kind,
        path: str,
        *,
        body: Json | list[Json] | None = None,
        query: Mapping[str, str] | None = None,
        form: str = JSON,
        accept: str = JSON,
        deadline_s: float = DEADLINE_S,
    ) -> Json:
        where = f"{verb} {path}"
        deadline = time.monotonic() + deadline_s
        failures = 0
        while True:
            started = time.monotonic()
            timeout = aiohttp.ClientTimeout(total=max(0.1, min(CALL_S, deadline - started)))
            retry_after_s = 0.0
            try:
                response = await self._send(
                    method, path, body=body, query=query, form=form, accept=accept, timeout=timeout
                )
                text = await _whole(response)
            except TooLarge:
                self._answered(verb, kind.plural, "TooLarge", time.monotonic() - started)
                raise
            except _BROKEN as error:
                self._answered(verb, kind.plural, type(error).__name__, time.monotonic() - started)
                failure: Exception = Unreachable(_message(error), where=where)
            else:
                self._answered(verb, kind.plural, str(response.status), time.monotonic() - started)
                answer = _decoded(text)
                if response.status < 300:
                    return answer
                failure = refusal(response.status, answer, where=where)
                if response.status not in _BUSY and "Retry-After" not in response.headers:
                    raise failure
                retry_after_s = _seconds(response.headers.get("Retry-After", ""))
            failures += 1
            pause = max(retry_after_s, backoff(failures, first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S))
            if time.monotonic() + pause >= deadline:
                raise Unreachable(str(failure), where=where) from failure
            await asyncio.sleep(pause)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        timeout: aiohttp.ClientTimeout,
        body: Json | list[Json] | None = None,
        query: Mapping[str, str] | None = None,
        form: str = JSON,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": accept, "Accept-Encoding": "identity", "Content-Type": form, "User-Agent": FIELD_MANAGER}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        answer = await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=timeout
        )
        response: aiohttp.ClientResponse = answer.response
        return response


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async with response:
        async for chunk in response.content.iter_any():
            text += chunk
            if len(text) > ANSWER_BYTES:
                raise TooLarge(f"more than {ANSWER_BYTES} bytes", where=str(response.url))
    return bytes(text)


async def _lines(response: aiohttp.ClientResponse, idle_s: float) -> AsyncIterator[list[bytes]]:
    rest = b""
    async with response:
        while True:
            async with asyncio.timeout(idle_s):
                chunk = await response.content.readany()
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > ANSWER_BYTES:
                raise TooLarge(f"a line of more than {ANSWER_BYTES} bytes", where=str(response.url))
            if lines:
                yield lines


def _changed(line: bytes, path: str) -> Json:
    change = _decoded(line)
    if change.get("type") == "ERROR":
        status = change["object"]
        raise refusal(int(status.get("code", 500)), status, where=f"watch {path}")
    return change


def _decoded(text: bytes) -> Json:
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"message": text[:1024].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)}


def _seconds(header: str) -> float:
    return min(float(header), DEADLINE_S) if header.isdigit() else 0.0


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__
