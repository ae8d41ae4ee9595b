"""Tests of what the engine vllm makes of a server's answers, and what it refuses before there is one."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from asyncflow.errors import AsyncFlowError, ManifestError, Refused
from asyncflow.identity import SampleKey, Version
from asyncflow.plugins import read_options
from asyncflow.rollout.engines.base import GenerationRequest, StopTexts
from asyncflow.rollout.engines.vllm import engine as vllm_engine
from asyncflow.rollout.engines.vllm.engine import VllmEngine, _Open, _request_body
from asyncflow.rollout.engines.vllm.program import VllmOptions
from asyncflow.rollout.engines.vllm.server import VllmServer

V1, V2, V3 = (Version(0, step) for step in (1, 2, 3))


def request_begun(version: Version, **settings) -> _Open:
    return _Open(GenerationRequest(key=SampleKey(1, 0), prompt_ids=(1, 2), max_tokens=8), version, **settings)


def completed(said, open_):
    open_.take(said)
    return open_.completion()


@asynccontextmanager
async def served(server: VllmServer, folder: Path, said: bytes) -> AsyncIterator[None]:
    """Answer with ``said`` whatever ``server`` is asked."""

    async def answers(_: web.Request) -> web.Response:
        return web.Response(body=said)

    app = web.Application()
    app.add_routes([web.post("/{path:.*}", answers)])
    behind = web.AppRunner(app)
    await behind.setup()
    await web.UnixSite(behind, str(folder / "s")).start()
    server._session = aiohttp.ClientSession("http://vllm", connector=aiohttp.UnixConnector(path=str(folder / "s")))
    try:
        yield
    finally:
        await server._session.close()
        await behind.cleanup()


def answer(ids, *, finish="stop", **more):
    return {
        "token_ids": ids,
        "finish_reason": finish,
        "logprobs": {"content": [{"logprob": -0.5 * id_} for id_ in ids]},
        **more,
    }


def test_tokens_have_the_version_that_was_loaded_when_they_were_made() -> None:
    begun = request_begun(V1)
    begun.marks.mark(2, V2)
    begun.marks.mark(2, V3)
    begun.take(answer([3, 4, 5, 6]))
    assert begun.completion().versions.tolist() == [V1.packed, V1.packed, V3.packed, V3.packed]
    begun.marks.mark(0, V2)
    assert begun.completion().versions.tolist() == [V2.packed] * 4


async def test_requests_are_marked_by_vllm_s_own_ids_and_one_that_has_ended_is_not(tmp_path) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    running, waiting, ended = (request_begun(V1) for _ in range(3))
    engine._open = {each.id: each for each in (running, waiting, ended)}
    for each in (running, ended):
        each.take(answer([3, 4, 5], finish=None))
    engine._mark(V2, {f"generate-tokens-{running.id}-0-1a2b3c4d": 2, f"cmpl-{'0' * 32}": 1})
    for each in (running, waiting, ended):
        each.take(answer([6]))
    assert running.completion().versions.tolist() == [V1.packed] * 2 + [V2.packed] * 2
    assert waiting.completion().versions.tolist() == [V2.packed]
    assert ended.completion().versions.tolist() == [V1.packed] * 4
    await engine.close()


async def test_tokens_whose_version_vllm_says_at_the_end_only_are_told_then(tmp_path) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    engine._server.paths = frozenset({"/update_weight_version"})
    begun = request_begun(V1, spans=True)
    engine._open = {begun.id: begun}
    begun.take(answer([3, 4], finish=None))
    engine._mark(V2, None)
    begun.take(answer([5, 6], finish=None))
    engine._mark(V3, None)
    assert begun.so_far().ids.tolist() == [3, 4], "who made 5 and 6 is not known yet"
    assert begun.so_far().versions.tolist() == [V1.packed] * 2
    spans = [{"version": str(version.packed), "start": start} for version, start in ((V1, 0), (V2, 3), (V3, 4))]
    begun.take(answer([7, 8], weight_versions=spans))
    assert begun.so_far().ids.tolist() == [3, 4, 5, 6, 7]
    assert begun.so_far().versions.tolist() == [V1.packed] * 3 + [V2.packed] + [V3.packed]
    assert begun.completion().versions.tolist() == [V1.packed] * 3 + [V2.packed] + [V3.packed] * 2
    await engine.close()


async def test_a_vllm_of_whose_tokens_the_version_is_unknown_is_refused_under_running_sequences(tmp_path) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    engine._mark(V1, None)
    begun = request_begun(V1)
    engine._open = {begun.id: begun}
    with pytest.raises(ManifestError, match=r"does not report which weights made a token\. Install vLLM 0\.32"):
        engine._mark(V2, None)
    await engine.close()


def test_what_vllm_says_of_versions_counts_only_where_it_was_told_them() -> None:
    begun = request_begun(V1, spans=True)
    spans = [{"version": str(V1.packed), "start": 0, "end": 1}, {"version": str(V2.packed), "start": 1, "end": 3}]
    said = answer([3, 4, 5], weight_versions=spans)
    assert completed(said, begun).versions.tolist() == [V1.packed, V2.packed, V2.packed]
    untold = answer([3, 4, 5], weight_versions=[{"version": "default", "start": 0, "end": 3}])
    assert set(completed(untold, request_begun(V1)).versions.tolist()) == {V1.packed}


def test_an_answer_that_comes_in_parts_is_there_as_far_as_it_came_but_for_the_token_that_ends_it() -> None:
    begun = completed(answer([1, 2], finish="abort"), request_begun(V1))
    rest = _Open(replace(request_begun(V1).request, continues=begun), V1)
    assert rest.so_far().ids.tolist() == [1, 2]
    rest.take(answer([3], finish=None))
    rest.marks.mark(1, V2)
    rest.take(answer([4, 5], finish=None))
    assert rest.so_far().ids.tolist() == [1, 2, 3, 4, 5]
    assert rest.so_far().versions.tolist() == [V1.packed] * 3 + [V2.packed] * 2
    rest.take(answer([6]))
    assert rest.so_far().ids.tolist() == [1, 2, 3, 4, 5]
    ended = rest.completion()
    assert (ended.ids.tolist(), ended.finish) == ([1, 2, 3, 4, 5, 6], "stop")


def test_a_response_ends_with_the_token_that_completes_a_stop_text() -> None:
    stops = StopTexts(["c"], decode=lambda ids: "".join(chr(96 + id_) for id_ in ids))
    cut = completed(answer([1, 2, 3, 4], finish="length"), request_begun(V1, stops=stops))
    assert (cut.ids.tolist(), cut.finish) == ([1, 2, 3], "stop")
    assert cut.logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert completed(answer([1, 2], finish="length"), request_begun(V1, stops=stops)).finish == "length"
    assert completed(answer([1, 2], finish="abort"), request_begun(V1, stops=stops)).finish == "aborted"


def test_the_rest_of_a_response_is_asked_for_behind_what_was_begun() -> None:
    stops = StopTexts(["bc"], decode=lambda ids: "".join(chr(96 + id_) for id_ in ids))
    begun = completed(answer([1, 2], finish="abort"), request_begun(V1))
    whole = request_begun(V1).request
    rest = _Open(replace(whole, continues=begun), V2, stops=stops)
    body = _request_body(rest)
    assert body["token_ids"] == [1, 2, 1, 2]
    assert body["sampling_params"]["max_tokens"] == 6
    assert body["sampling_params"]["seed"] != _request_body(_Open(whole, V1))["sampling_params"]["seed"]
    rest.take(answer([3], finish=None))
    assert rest.so_far().ids.tolist() == [1, 2], "who goes on makes the token that completes the text"
    ended = completed(answer([4], finish="length"), rest)
    assert (ended.ids.tolist(), ended.finish) == ([1, 2, 3], "stop"), "the text begins in what was begun"
    assert ended.logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert ended.versions.tolist() == [V1.packed, V1.packed, V2.packed]


async def test_a_temperature_that_vllm_would_replace_is_refused(tmp_path) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    for temperature, error in ((0.009, ManifestError), (0.01, Refused), (0.0, Refused)):
        asked = replace(request_begun(V1).request, temperature=temperature)
        with pytest.raises(error, match=r"would sample at 0\.01" if error is ManifestError else "no weights"):
            await engine.generate(asked)
    await engine.close()


@pytest.mark.parametrize("broken", [{"finish": "error"}, {"finish": "stop", "logprobs": {"content": []}}])
def test_an_answer_that_is_not_whole_is_an_error_and_not_a_short_response(broken) -> None:
    with pytest.raises(AsyncFlowError, match="is incomplete"):
        completed(answer([1, 2], **broken), request_begun(V1))


@pytest.mark.parametrize("name", ["model", "max-num-seqs", "config", "disable_log_stats", "data_parallel_size"])
def test_options_that_the_manifest_says_elsewhere_are_refused(name) -> None:
    with pytest.raises(ManifestError, match=f"args.{name}"):
        read_options({"args": {name: 1}}, VllmOptions, where="here")


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable-prefix-caching"])
def test_a_cache_that_older_weights_made_is_not_shared(tmp_path, name) -> None:
    VllmEngine(folder=tmp_path, slots=4, max_length=16, options={"args": {name: True}})
    VllmEngine(folder=tmp_path, slots=4, max_length=16, keeps_prefix=True, options={"args": {name: False}})
    with pytest.raises(ManifestError, match="older weights"):
        VllmEngine(folder=tmp_path, slots=4, max_length=16, keeps_prefix=True, options={"args": {name: True}})


@pytest.mark.parametrize(
    "said",
    [
        b"<html>Bad Gateway</html>",
        b"\xff",
        b"{}",
        b'{"choices": [{"finish_reason": "stop"}]}',
        b'{"choices": [{"token_ids": [3], "logprobs": {"content": [{"logprob": null}]}}]}',
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_says_something_else_is_one_error_that_quotes_it(tmp_path, said, streamed) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    engine.version = V1
    async with served(engine._server, tmp_path, b"data: " + said + b"\n\n" if streamed else said):
        engine._server.paths = frozenset({"/update_weight_version"} if streamed else ())
        quoted = re.escape(said.decode(errors="replace"))
        with pytest.raises(AsyncFlowError, match=f"answer to /inference/v1/generate cannot be read: .*{quoted}"):
            await engine.generate(request_begun(V1).request)
    await engine.close()


async def test_an_answer_without_choices_or_workers_is_such_an_error(tmp_path) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    engine.version = V1
    async with served(engine._server, tmp_path, b'{"choices": [], "results": []}'):
        with pytest.raises(AsyncFlowError, match=r"`array` of length >= 1 - at `\$\.choices`"):
            await engine.generate(request_begun(V1).request)
        with pytest.raises(AsyncFlowError, match=r"`array` of length >= 1 - at `\$\.results`"):
            await engine._rpc("asyncflow_swap")
    await engine.close()


async def test_a_probe_of_which_a_token_has_no_log_prob_is_not_whole(tmp_path) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    async with served(engine._server, tmp_path, b'{"prompt_logprobs": [null, {"4": {"logprob": -1}}, null]}'):
        assert (await engine.probe([3, 4])).tolist() == [-1.0]
        with pytest.raises(AsyncFlowError, match="incomplete: 1 log-probs of 2 tokens"):
            await engine.probe([3, 4, 5])
    await engine.close()


@pytest.mark.parametrize("probing", [False, True])
async def test_a_line_of_metrics_that_nobody_understands_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, probing: bool
) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16, options={"stall_s": 0.01})
    asked: list[float | None] = []

    async def call(*_: object, within_s: float | None, **__: object) -> None:
        asked.append(within_s)
        await asyncio.Event().wait()

    monkeypatch.setattr(engine._server, "call", call)
    probe = asyncio.create_task(engine.probe([3, 4])) if probing else None
    await asyncio.sleep(0)
    engine._open = {} if probing else {"a": request_begun(V1)}
    told = iter(['vllm:generation_tokens_total{model="a', "vllm:generation_tokens_total x"])
    ended: list[str] = []

    async def metrics() -> str:
        return next(told, "vllm:generation_tokens_total 7") + "\n"

    async def close(*, why: str) -> None:
        ended.append(why)

    monkeypatch.setattr(vllm_engine, "_WATCH_S", 0.001)
    monkeypatch.setattr(engine, "metrics", metrics)
    monkeypatch.setattr(engine._server, "close", close)
    async with asyncio.timeout(5):
        await engine._watch()
    assert ended == ["it made no token for 0.01 s while 1 requests ran"]
    if probe is not None:
        assert asked == [None]
        probe.cancel()
    assert [record.message.partition(",")[0] for record in caplog.records] == ["vLLM's metrics cannot be parsed"]


async def test_weights_that_are_copied_for_nobody_are_written_into_no_other_file(tmp_path, monkeypatch) -> None:
    engine = VllmEngine(folder=tmp_path, slots=4, max_length=16)
    begun, may_go_on, there = threading.Event(), threading.Event(), os.pwrite

    def slow(*arguments: Any) -> int:
        begun.set()
        may_go_on.wait(5)
        return there(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    staging = asyncio.create_task(engine.stage(V1, {"a": np.ones(4, np.float32)}))
    await asyncio.to_thread(begun.wait, 5)
    staging.cancel()
    await asyncio.wait([staging])
    other = (tmp_path / "other").open("wb", buffering=0)
    may_go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    other.close()
    assert (tmp_path / "other").read_bytes() == b""
    await engine.close()
