"""Faults that a real server does not produce at will: answers that are slow, busy, broken or too old."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from asyncflow_operator.cluster import client, informer
from asyncflow_operator.cluster.client import Api, Expired, NotLeading, Refusal, TooLarge, Unreachable
from asyncflow_operator.cluster.informer import Informer
from asyncflow_operator.cluster.kinds import BY_NAME
from asyncflow_operator.cluster.store import ObjectStore

CONFIG_MAP = BY_NAME["ConfigMap"]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Serve(Protocol):
    """Begin a server that answers so; return a client of it with so many connections."""

    async def __call__(self, answer: Answer, *, connections: int = 10) -> Api: ...


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    closing: list[Callable[[], Awaitable[None]]] = []

    async def begin(answer: Answer, *, connections: int = 10) -> Api:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        configuration.connection_pool_maxsize = connections
        api = Api(configuration)
        closing.extend((api.close, runner.cleanup))
        return api

    yield begin
    for close in closing:
        await close()


def config_map(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version)}}


async def test_a_busy_server_is_asked_again_after_the_time_it_wants(serve: Serve) -> None:
    answers = [(429, {"Retry-After": "0"}), (503, {}), (200, {})]
    seen: list[int] = []

    async def answer(_: web.Request) -> web.Response:
        status, headers = answers[len(seen)]
        seen.append(status)
        return web.json_response({"kind": "ConfigMap"}, status=status, headers=headers)

    api = await serve(answer)
    assert (await api.get(CONFIG_MAP, "ns", "c"))["kind"] == "ConfigMap"
    assert seen == [429, 503, 200]


async def test_a_refusal_is_not_tried_again(serve: Serve) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.method)
        causes = {"causes": [{"reason": "NamespaceTerminating"}]}
        return web.json_response({"message": "it ends", "reason": "Forbidden", "details": causes}, status=403)

    api = await serve(answer)
    with pytest.raises(Refusal, match="it ends") as refused:
        await api.create(CONFIG_MAP, "ns", {})
    assert refused.value.namespace_ends
    assert seen == ["POST"]


async def test_a_call_ends_within_its_deadline(serve: Serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({}, status=503)

    api = await serve(answer)
    with pytest.raises(Unreachable):
        await api.create(CONFIG_MAP, "ns", {}, deadline_s=0.3)


async def test_an_answer_that_does_not_come_is_a_time_out_in_words(serve: Serve, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "CALL_S", 0.1)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response({})

    api = await serve(answer)
    with pytest.raises(Unreachable, match="create /api/v1/namespaces/ns/configmaps"):
        await api.create(CONFIG_MAP, "ns", {}, deadline_s=0.15)


async def test_an_answer_that_is_no_json_is_an_error_and_not_a_bug(serve: Serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>a proxy</html>", status=400)

    api = await serve(answer)
    with pytest.raises(Refusal, match="a proxy"):
        await api.get(CONFIG_MAP, "ns", "c")


async def answered(request: web.Request, *changes: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for change in changes:
        text = json.dumps(change).encode() + b"\n"
        await response.write(text[:10])
        await response.write(text[10:])
    return response


async def test_a_watch_that_is_silent_is_given_up(serve: Serve) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = await answered(request, {"type": "BOOKMARK", "object": config_map("", 5)})
        await asyncio.sleep(5)
        return response

    api = await serve(answer)
    stream = api.watch(CONFIG_MAP, since="1", idle_s=0.1)
    assert [change["type"] for change in await anext(stream)] == ["BOOKMARK"]
    with pytest.raises(Unreachable, match="watch"):
        await anext(stream)


@pytest.mark.parametrize("where", ["answer", "stream"])
async def test_a_version_that_is_too_old_raises_expired(serve: Serve, where: str) -> None:
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}

    async def answer(request: web.Request) -> web.StreamResponse:
        if where == "answer":
            return web.json_response(status, status=410)
        return await answered(request, {"type": "ERROR", "object": status})

    api = await serve(answer)
    with pytest.raises(Expired):
        await anext(api.watch(CONFIG_MAP, since="1", idle_s=1.0))


async def test_the_informer_lists_again_after_410_and_drops_missing_objects(serve: Serve, monkeypatch: Any) -> None:
    monkeypatch.setattr(informer, "_FIRST_BACKOFF_S", 0.0)
    lists = [[config_map("a", 1), config_map("b", 2)], [config_map("b", 2), config_map("c", 12)]]
    gone = {"kind": "Status", "code": 410, "message": "too old"}
    listed = asyncio.Event()
    since: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            items = lists.pop(0)
            if not lists:
                listed.set()
            return web.json_response({"metadata": {"resourceVersion": str(20 - 10 * len(lists))}, "items": items})
        since.append(request.query["resourceVersion"])
        if len(since) == 1:
            return await answered(request, {"type": "ADDED", "object": config_map("d", 11)})
        if len(since) == 2:
            return await answered(request, {"type": "ERROR", "object": gone})
        await asyncio.sleep(5)
        return await answered(request)

    api = await serve(answer)
    store = ObjectStore(lambda _kind, raw, _before: raw, lambda *_: None)
    following = asyncio.create_task(Informer(api, store, CONFIG_MAP).run())
    await asyncio.wait_for(listed.wait(), 10)
    while len(since) < 3:
        await asyncio.sleep(0.01)
    following.cancel()
    assert since == ["10", "11", "20"]
    assert sorted(name for _, name, _ in store.all("ConfigMap")) == ["b", "c"]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_watch_that_a_busy_server_does_not_begin_goes_on_where_it_was_without_a_list(
    serve: Serve, status: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(informer, "_FIRST_BACKOFF_S", 0.0)
    asked: list[str] = []
    follows = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.query.get("resourceVersion", "list"))
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": []})
        if len(asked) < 4:
            return web.json_response({"kind": "Status", "code": status}, status=status, headers={"Retry-After": "0"})
        follows.set()
        await asyncio.sleep(5)
        return await answered(request)

    store = ObjectStore(lambda _kind, raw, _before: raw, lambda *_: None)
    following = asyncio.create_task(Informer(await serve(answer), store, CONFIG_MAP).run())
    await asyncio.wait_for(follows.wait(), 10)
    following.cancel()
    assert asked == ["list", "10", "10", "10"]


async def test_a_process_that_leads_no_more_sends_no_write_nor_repeats_one(serve: Serve) -> None:
    """As one that was stopped amid its work and wakes to find that its Lease is over."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.method)
        api.may_write = lambda: False
        return web.json_response({}, status=503 if request.method == "PATCH" else 200)

    api = await serve(answer)
    with pytest.raises(NotLeading):
        await api.apply(CONFIG_MAP, "ns", config_map("c", 1), force=True)
    with pytest.raises(NotLeading):
        await api.delete(CONFIG_MAP, "ns", "c", uid="c")
    assert seen == ["PATCH"]
    await api.get(CONFIG_MAP, "ns", "c")
    assert seen == ["PATCH", "GET"]


async def test_a_write_that_waited_for_its_connection_is_not_sent_once_the_lead_is_over(serve: Serve) -> None:
    seen: list[str] = []
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.method)
        arrived.set()
        await go_on.wait()
        return web.json_response({})

    api = await serve(answer, connections=1)
    first = asyncio.create_task(api.get(CONFIG_MAP, "ns", "c"))
    await arrived.wait()
    waiting = asyncio.create_task(api.delete(CONFIG_MAP, "ns", "c", uid="c"))
    await asyncio.sleep(0.1)
    api.may_write = lambda: False
    go_on.set()
    await first
    with pytest.raises(NotLeading, match="DELETE /api/v1/namespaces/ns/configmaps/c"):
        await asyncio.wait_for(waiting, 10)
    await api.get(CONFIG_MAP, "ns", "c")
    assert seen == ["GET", "GET"]


async def test_a_redirect_is_not_followed_and_nothing_is_decompressed(serve: Serve) -> None:
    seen: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers["Accept-Encoding"]))
        if "/moved/" in request.path:
            raise web.HTTPTemporaryRedirect("/elsewhere")
        return web.Response(body=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}, status=400)

    api = await serve(answer)
    with pytest.raises(Unreachable, match=r"a redirect \(HTTP 307\), which is not followed"):
        await api.create(CONFIG_MAP, "moved", {}, deadline_s=0.3)
    with pytest.raises(Refusal):
        await api.get(CONFIG_MAP, "ns", "zipped")
    assert "/elsewhere" not in dict(seen)
    assert {encoding for _, encoding in seen} == {"identity"}


async def test_an_answer_that_is_too_large_is_an_error_and_a_page_is_asked_for_in_smaller_ones(
    serve: Serve, monkeypatch: Any
) -> None:
    monkeypatch.setattr(client, "ANSWER_BYTES", 10_000)
    limits: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        if "limit" not in request.query:
            return web.json_response({"kind": "ConfigMap", "data": {"a": "x" * 20_000}})
        limits.append(int(request.query["limit"]))
        start = int(request.query.get("continue", 0))
        names = range(start, min(start + limits[-1], 100))
        items = [config_map(f"{name}" + "x" * 500, 1) for name in names]
        more = {"continue": str(names.stop)} if names.stop < 100 else {}
        return web.json_response({"metadata": {"resourceVersion": "1"} | more, "items": items})

    api = await serve(answer)
    with pytest.raises(TooLarge):
        await api.get(CONFIG_MAP, "ns", "c")
    seen = [item["metadata"]["name"] async for page in api.pages(CONFIG_MAP, size=64) for item in page["items"]]
    assert limits[:3] == [64, 8, 8]
    assert len(seen) == len(set(seen)) == 100


async def test_a_conflict_about_a_quota_does_not_say_that_the_object_exists(serve: Serve) -> None:
    about = {"name": "team", "kind": "resourcequotas"}
    what = 'Operation cannot be fulfilled on resourcequotas "team": the object has been modified'

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"reason": "Conflict", "message": what, "details": about}, status=409)

    api = await serve(answer)
    with pytest.raises(Refusal, match="resourcequotas") as refused:
        await api.make(CONFIG_MAP, "ns", config_map("c", 1))
    assert not refused.value.exists
    about |= {"name": "c", "kind": "configmaps"}
    with pytest.raises(Refusal, match="already exists") as refused:
        await api.make(CONFIG_MAP, "ns", config_map("c", 1))
    assert refused.value.exists
