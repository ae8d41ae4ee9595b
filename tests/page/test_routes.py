"""HTTP of the page: who gets what, and what is said to a request that is not as it should be."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncflow.api.status import DriverStatus
from asyncflow.driver.sample_files import SampleText, write_samples
from asyncflow.rpc.http import HttpServer
from asyncflow.view.page.document import document
from asyncflow.view.page.routes import CHANGES, SAMPLES, TIMELINE, page_routes
from asyncflow.view.page.spans import Timelines

KEY = "k3y"
KEPT = SampleText(
    purpose="train", step=3, serial=0, sample=0, drawn=True, prompt="ask", response="secret", answer="", reward=1.0,
    prompt_tokens=1, response_tokens=1, version_min=0, version_max=0, finish="stop", details={"said": "secret"},
)  # fmt: skip


@asynccontextmanager
async def serving(folder: Path, *, texts: bool, key: str = "") -> AsyncIterator[Callable[..., Any]]:
    async def status() -> DriverStatus:
        return DriverStatus(step=3, steps=9, waiting_for="1 rollout")

    write_samples(folder, [KEPT], purpose="train", step=3, form="jsonl")
    timelines = Timelines(folder)
    routes = page_routes(folder, job=lambda: {"name": "one"}, status=status, timelines=timelines, texts=texts, key=key)
    server = HttpServer(routes)
    url = await server.start()
    async with aiohttp.ClientSession() as session:

        async def get(path: str, **headers: str) -> tuple[aiohttp.ClientResponse, str]:
            async with session.get(f"{url}{path}", headers=headers) as answer:
                return answer, await answer.text()

        yield get
    await server.close()


async def test_without_the_key_only_the_document_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, texts=True, key=KEY) as get:
        answer, _ = await get("/")
        assert answer.status == 200
        for path in (CHANGES, f"{SAMPLES}/train/3", TIMELINE):
            for headers in ({}, {"Authorization": KEY + "x"}, {"Authorization": "Bearer "}, {"Cookie": KEY}):
                answer, said = await get(path, **headers)
                assert (answer.status, "secret" in said) == (401, False)
            answer, said = await get(path, Authorization=f"Bearer {KEY}")
            assert answer.status == 200
        _, said = await get(f"{SAMPLES}/train/3", Authorization=f"Bearer {KEY}")
        assert "secret" in said


async def test_a_driver_shows_how_it_goes_to_all_and_texts_to_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path, texts=False) as get:
        answer, said = await get(CHANGES)
        assert '"waitingFor":"1 rollout"' in said
        assert '"samples":{"train":[3],"eval":[]}' in said
        assert answer.headers["Cache-Control"] == "no-store"
        _, said = await get(f"{SAMPLES}/train/3")
        assert '"reward":1.0' in said
        assert "secret" not in said


async def test_what_is_no_request_of_the_page_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, texts=True) as get:
        for path, status in (
            (f"{SAMPLES}/other/3", 404),
            (f"{SAMPLES}/train/..%2f..%2fjob", 404),
            (f"{SAMPLES}/train/{'9' * 30}", 404),
            (f"{TIMELINE}?begin=soon", 400),
            (f"{TIMELINE}?begin=nan&end=inf&width=-1", 200),
            (f"{CHANGES}?since=../../x", 200),
            (f"{SAMPLES}/eval/7", 200),
        ):
            answer, said = await get(path)
            assert (path, answer.status) == (path, status), said


async def test_the_document_runs_its_own_program_only(tmp_path: Path) -> None:
    async with serving(tmp_path, texts=True) as get:
        answer, html = await get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert len(re.findall(r"<script>", html)) == 1
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html)
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", html)


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--", "@@PROGRAM@@", "\u2028", "&lt;"])
def test_what_a_run_wrote_ends_no_tag_of_the_document(text: str) -> None:
    plain, made = document({}).html, document({"x": text}).html
    assert made.count("<script") == plain.count("<script")
    assert made.count("<!--") == plain.count("<!--")
    assert len(made) - len(plain) < 200
    assert "connect-src" not in document({"x": text}).policy
