import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Gauge

from asyncflow.errors import AsyncFlowError, ManifestError, Refused
from asyncflow.net.http import Answer, Request, RoleHttp
from asyncflow.telemetry.metrics import RolloutMetrics

TOKEN = "s3cret"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


def made(token_file: Path | None = None, reasons: list[str] | None = None) -> RoleHttp:
    registry = CollectorRegistry()
    Gauge("asyncflow_driver_step", "steps", registry=registry).set(7)
    waiting = reasons if reasons is not None else []
    return RoleHttp(
        registry=registry, ready=lambda: (not waiting, waiting[0] if waiting else "ready"), token_file=token_file
    )


async def test_metrics_health_and_readiness(session: aiohttp.ClientSession) -> None:
    reasons = ["waiting for the controller"]
    http = made(reasons=reasons)
    url = await http.start()
    async with session.get(f"{url}/metrics") as answer:
        assert "asyncflow_driver_step 7.0" in await answer.text()
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
    async with session.get(f"{url}/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok\n")
    async with session.get(f"{url}/readyz") as answer:
        assert (answer.status, await answer.text()) == (503, "waiting for the controller\n")
    reasons.clear()
    async with session.get(f"{url}/readyz") as answer:
        assert answer.status == 200
    await http.close()


async def test_metrics_of_another_process_are_shown_as_they_are_when_asked(session: aiohttp.ClientSession) -> None:
    metrics, values = RolloutMetrics(), [3]

    async def source() -> str:
        if not values:
            raise AsyncFlowError("it is gone")
        return f'# TYPE vllm:running gauge\nvllm:running{{engine="0"}} {values.pop()}\n'

    metrics.relay(source)
    http = RoleHttp(registry=metrics.registry, refreshed=metrics.refreshed)
    url = await http.start()
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
        assert 'vllm:running{engine="0"} 3.0' in text
        assert "asyncflow_rollout_probe_gap" in text
    async with session.get(f"{url}/metrics") as answer:
        assert answer.status == 200
        assert "vllm:running" not in await answer.text()
    await http.close()


async def test_a_post_needs_the_token_of_the_file(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    heard: list[str] = []

    async def drain(request: Request) -> Answer:
        heard.append(request.params["id"])
        return Answer.json({})

    http = made(token_file=file)
    http.add_post("/v1/rollouts/{id}/drain", drain)
    url = await http.start() + "/v1/rollouts/3/drain"

    async def post(authorization: str | None) -> int:
        headers = {} if authorization is None else {"Authorization": authorization}
        async with session.post(url, headers=headers) as answer:
            return answer.status

    for wrong in (None, "", "Bearer", "Bearer ", "Bearer s3cre", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \u00e9"):
        assert await post(wrong) == 401
    assert heard == []
    assert await post(f"Bearer {TOKEN}") == 200
    file.write_text("other")
    assert await post(f"Bearer {TOKEN}") == 401
    file.write_text("\n")
    assert await post("Bearer ") == 401
    file.unlink()
    assert await post("Bearer other") == 401
    assert heard == ["3"]
    await http.close()


async def test_without_a_token_file_nobody_may_post(session: aiohttp.ClientSession) -> None:
    async def never(request: Request) -> Answer:
        raise AssertionError

    http = made()
    http.add_post("/v1/suspend", never)
    async with session.post(f"{await http.start()}/v1/suspend", headers={"Authorization": "Bearer "}) as answer:
        assert answer.status == 401
    await http.close()


async def test_errors_are_answered_in_their_own_words(session: aiohttp.ClientSession) -> None:
    errors: list[AsyncFlowError] = [
        Refused("no", where="row 1", hint="ask again"),
        ManifestError("bad"),
        AsyncFlowError("e"),
    ]

    async def fail(request: Request) -> Answer:
        raise errors[int(request.query["n"])]

    http = made()
    http.add_get("/fail", fail)
    url = await http.start()
    for n, status in enumerate((409, 400, 500)):
        async with session.get(f"{url}/fail", params={"n": n}) as answer:
            assert (answer.status, await answer.json()) == (status, errors[n].to_wire())
    async with session.get(f"{url}/fail") as answer:
        assert answer.status == 500
        assert "Traceback" not in await answer.text()
    await http.close()


async def test_a_port_in_use_is_refused_and_close_does_not_wait_for_slow_clients(
    session: aiohttp.ClientSession,
) -> None:
    async def slow(request: Request) -> Answer:
        await asyncio.sleep(60)
        return Answer()

    http, second = made(), made()
    http.add_get("/slow", slow)
    url = await http.start()
    with pytest.raises(Refused, match="cannot listen"):
        await second.start(port=int(url.rpartition(":")[2]))
    pending = asyncio.create_task(session.get(f"{url}/slow"))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await http.close()
        with pytest.raises(aiohttp.ClientError):
            await pending
