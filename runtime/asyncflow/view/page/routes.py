"""HTTP routes of the page, for a driver and for ``asyncflow ui``: the document, and the JSON that it requests.

Invariants: the document contains no data of the run, so it is served without a key. Texts of samples are served only if
``texts`` is set. Files are read outside the event loop, one request at a time, so readers of the page cost a driver at
most one thread.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from asyncflow.api.status import DriverStatus
from asyncflow.driver.sample_files import Purpose
from asyncflow.view.page.changes import changes
from asyncflow.view.page.document import document
from asyncflow.view.page.spans import Timelines
from asyncflow.view.page.texts import samples

CHANGES: Final = "/v1/page/changes"
SAMPLES: Final = "/v1/page/samples"
TIMELINE: Final = "/v1/page/timeline"
_PURPOSES: Final[Mapping[str, Purpose]] = {"train": "train", "eval": "eval"}
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(
    folder: Path,
    *,
    job: Callable[[], dict[str, Any]],
    status: Callable[[], Awaitable[DriverStatus | None]],
    timelines: Timelines,
    texts: bool,
    key: str = "",
) -> list[web.RouteDef]:
    """Return the routes of the page of the run in ``folder``.

    job: returns the job's ``facts``; status: returns the driver's status, None if the driver does not answer;
    timelines: timelines of the same folder; texts: whether texts of samples are served; key: bearer token that requests
    for data of the run must have, "" for none.
    """
    one_at_a_time = asyncio.Semaphore(1)

    def check(request: web.Request) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(token.encode(errors="surrogateescape"), key.encode()):
            raise web.HTTPUnauthorized(text="open the address that asyncflow ui printed: it ends with the key")

    async def read(reading: Callable[..., Any], *args: Any, **options: Any) -> Any:
        async with one_at_a_time:
            return await asyncio.to_thread(reading, *args, **options)

    async def get_document(_request: web.Request) -> web.Response:
        made = document()
        headers = {**_HEADERS, "Content-Security-Policy": made.policy}
        return web.Response(text=made.html, content_type="text/html", headers=headers)

    async def get_changes(request: web.Request) -> web.Response:
        check(request)
        found = await read(changes, folder, request.query.get("since", ""))
        now = await status()
        shown = now.model_dump(mode="json", by_alias=True) if now is not None else None
        return _answer({**found, "job": job(), "status": shown, "now": time.time(), "texts": texts})

    async def get_samples(request: web.Request) -> web.Response:
        check(request)
        purpose = _PURPOSES[request.match_info["purpose"]]
        step = int(request.match_info["step"])
        return _answer(await read(samples, folder, purpose=purpose, step=step, texts=texts))

    async def get_timeline(request: web.Request) -> web.Response:
        check(request)
        return _answer(await read(timelines.shown, **_window(request)))

    return [
        web.get("/", get_document),
        web.get(CHANGES, get_changes),
        web.get(f"{SAMPLES}/{{purpose:train|eval}}/{{step:[0-9]{{1,9}}}}", get_samples),
        web.get(TIMELINE, get_timeline),
    ]


def _answer(value: Any) -> web.Response:
    answer = web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=_HEADERS)
    answer.enable_compression()
    return answer


def _window(request: web.Request) -> dict[str, float]:
    """Return the requested window of time. Raises HTTPBadRequest."""
    try:
        values = {name: float(request.query[name]) for name in ("begin", "end", "width") if name in request.query}
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"begin, end and width are seconds: {error}") from error
    return {name: value for name, value in values.items() if math.isfinite(value)}
