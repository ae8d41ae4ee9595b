"""The engine vllm against a real server on the CPU, with a model whose output layer is tied to its embedding."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file

from asyncflow import clock
from asyncflow.api.placement import AcceleratorSpec
from asyncflow.api.weights import WeightSync
from asyncflow.errors import ManifestError, PeerLost
from asyncflow.identity import SampleKey, Version
from asyncflow.local.placement import PortReservation
from asyncflow.models.folder import whole_folder
from asyncflow.models.stored import ModelWatch
from asyncflow.models.tiny import write_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.roles import publisher
from asyncflow.roles.context import RoleOptions, SyncContext
from asyncflow.roles.follower import serve_newest
from asyncflow.rollout.engines import open_engine
from asyncflow.rollout.engines.base import GenerationRequest
from asyncflow.rollout.engines.vllm.program import REFUSED
from asyncflow.rollout.loading import ROUNDED
from asyncflow.telemetry.span_file import read_recording
from asyncflow.telemetry.spans import Spans
from asyncflow.timeline.tracks import Span

from .conftest import random_weights

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.process,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]

SLOTS, LENGTH = 16, 300
V1, V2, V3 = (Version(0, step) for step in (1, 2, 3))
PROMPT = tuple(range(5, 12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tied")
    write_config(made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return made


@pytest.fixture(scope="module")
def weights(folder) -> dict[Version, dict[str, np.ndarray]]:
    return {version: random_weights(folder, seed=version.step) for version in (V1, V2, V3)}


@pytest.fixture(scope="module")
def decode(folder):
    return lambda ids: Tokenizer.load(folder).decode(ids, skip_special_tokens=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder, decode):
    made = open_engine("vllm", folder=folder, slots=SLOTS, max_length=LENGTH, decode=decode)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(scope="module")
def reference(folder):
    """Log p(ids[i] | ids[:i]) for i >= 1, by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()

    def logprobs(ids, tensors, *, temperature=1.0):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(tensors[name]))
            logits = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
            return logits.log_softmax(-1)[range(len(ids) - 1), list(ids)[1:]].numpy()

    return logprobs


def request(serial=1, sample=0, **changes):
    settings = {"prompt_ids": PROMPT, "max_tokens": 12, "seed": 5, **changes}
    return GenerationRequest(key=SampleKey(serial, sample), **settings)


def whole(asked, completion):
    return [*asked.prompt_ids, *completion.ids.tolist()]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_log_probs_are_of_the_sampled_distribution_after_every_swap(engine, weights, reference, temperature):
    for version in (V1, V2, V1, V3):
        await engine.load(version, weights[version])
        asked = [request(serial, temperature=temperature) for serial in range(SLOTS)]
        made = await asyncio.gather(*map(engine.generate, asked))
        for each, completion in zip(asked, made, strict=True):
            expected = reference(whole(each, completion), weights[version], temperature=temperature or 1.0)
            assert np.abs(completion.logprobs - expected[len(PROMPT) - 1 :]).max() < 1e-4
            assert set(completion.versions.tolist()) == {version.packed}
        probed = await engine.probe(PROMPT)
        assert np.abs(probed - reference(PROMPT, weights[version])).max() < 1e-4


async def test_a_sequence_is_the_same_whatever_runs_beside_it(engine, weights):
    await engine.load(V1, weights[V1])
    alone = await engine.generate(request(3, 2))
    crowd = await asyncio.gather(*(engine.generate(request(serial, 2)) for serial in range(SLOTS)))
    assert np.array_equal(alone.ids, crowd[3].ids)
    assert np.abs(alone.logprobs - crowd[3].logprobs).max() < 1e-5
    assert len({tuple(each.ids.tolist()) for each in crowd}) == SLOTS


async def test_what_there_is_of_a_sequence_is_told_while_it_runs_and_can_be_gone_on_from(engine, weights, reference):
    await engine.load(V1, weights[V1])
    asked = request(8, max_tokens=250, seed=9)
    before = engine.stats().tokens.get("train", 0)
    running = asyncio.create_task(engine.generate(asked))
    while not (there := engine.unfinished()):
        await asyncio.sleep(0.001)
    assert engine.stats().tokens["train"] > before
    made = await running
    so_far = there["train", asked.key]
    assert 0 < len(so_far) < len(made)
    assert np.array_equal(so_far.ids, made.ids[: len(so_far)])
    assert np.array_equal(so_far.logprobs, made.logprobs[: len(so_far)])
    assert set(so_far.versions.tolist()) == {V1.packed}
    assert engine.unfinished() == {}
    rest = await engine.generate(replace(asked, continues=so_far))
    expected = reference(whole(asked, rest), weights[V1])
    assert np.abs(rest.logprobs - expected[len(PROMPT) - 1 :]).max() < 1e-4


async def test_tokens_that_were_made_before_and_after_a_swap_say_so(engine, weights, reference):
    await engine.load(V1, weights[V1])
    asked = [request(serial, max_tokens=280) for serial in range(SLOTS)]
    running = [asyncio.create_task(engine.generate(each)) for each in asked]
    await engine.stage(V2, weights[V2])
    await asyncio.sleep(0.3)
    await engine.load(V2, weights[V2])
    await engine.probe(PROMPT)
    assert not any(each.done() for each in running), "a probe waited for the end of a sequence"
    mixed = 0
    for each, completion in zip(asked, await asyncio.gather(*running), strict=True):
        ids = whole(each, completion)
        for version in (V1, V2):
            mine = completion.versions == version.packed
            expected = reference(ids, weights[version])[len(PROMPT) - 1 :]
            assert np.abs(completion.logprobs - expected)[mine].max(initial=0.0) < 1e-4
        mixed += len(set(completion.versions.tolist())) == 2
        assert set(completion.versions.tolist()) <= {V1.packed, V2.packed}
    assert mixed > 0


async def test_a_long_prompt_is_read_again_with_new_weights(engine, weights, reference):
    prompt = tuple(i % 250 + 3 for i in range(280))
    for version in (V1, V2):
        await engine.load(version, weights[version])
        for sample in range(2):
            asked = request(1, sample, prompt_ids=prompt)
            completion = await engine.generate(asked)
            expected = reference(whole(asked, completion), weights[version])[len(prompt) - 1 :]
            assert np.abs(completion.logprobs - expected).max() < 1e-4


async def test_prompts_are_on_record_when_they_are_read_and_again_after_a_swap_not_while_they_wait(
    engine, weights, tmp_path, monkeypatch
):
    async def read(*, after: float) -> list[Span]:
        async with asyncio.timeout(30):
            while not (found := read_recording(tmp_path / "rollout.spans").track.background) or found[-1].begin < after:
                await asyncio.sleep(0.05)
        assert {span.kind for span in found} == {"prefill"}
        return list(found)

    def made() -> int:
        return engine.stats().tokens.get("train", 0)

    async def until(tokens: int) -> float:
        while made() < tokens:
            await asyncio.sleep(0.001)
        return clock.now()

    await engine.load(V1, weights[V1])
    monkeypatch.setattr(engine, "spans", Spans(tmp_path / "rollout.spans", role="rollout"))
    before, began = made(), clock.now()
    asked = [request(serial, max_tokens=280) for serial in range(SLOTS + 1)]  # also the sequence for probes is in use
    running = [asyncio.create_task(engine.generate(each)) for each in asked]
    await until(before + SLOTS * 40)
    swapping = clock.now()
    await engine.load(V2, weights[V2])
    waiting = asyncio.create_task(engine.generate(request(SLOTS + 1, max_tokens=4)))
    waits = await until(before + SLOTS * 120)
    await asyncio.gather(*running, waiting)
    found = await read(after=waits)
    assert [span for span in found if began < span.begin < span.end < swapping], "prompts are read"
    assert [span for span in found if swapping < span.begin < span.end < waits], "what there is is read again"
    assert not [span for span in found if span.begin < waits < span.end], "a prompt that has no slot is not being read"


async def test_stop_ids_stop_texts_and_aborts_end_a_response(engine, weights, decode):
    await engine.load(V1, weights[V1])
    plain = await engine.generate(request(max_tokens=40))
    assert plain.finish == "length"
    stop = int(plain.ids[7])
    stopped = await engine.generate(request(max_tokens=40, stop_ids=(stop,)))
    end = plain.ids.tolist().index(stop) + 1
    assert stopped.finish == "stop"
    assert stopped.ids.tolist() == plain.ids[:end].tolist()
    readable = await engine.generate(request(2, max_tokens=200, stop_texts=("a", "b", "c", "d", "e")))
    assert readable.finish == "stop"
    assert decode(readable.ids.tolist())[-1] in "abcde"
    assert len(readable.logprobs) == len(readable.ids)
    running = asyncio.create_task(engine.generate(request(9, max_tokens=290)))
    await asyncio.sleep(0.1)
    await engine.abort([SampleKey(9, 0)])
    aborted = await running
    assert aborted.finish == "aborted"
    assert len(aborted.ids) == len(aborted.logprobs) < 290
    assert engine.stats().running == 0
    made = engine.stats().tokens["train"]
    ended = await engine.generate(request(9, max_tokens=290, continues=aborted))
    assert ended.finish == "length"
    assert len(ended.ids) == len(ended.logprobs) == len(ended.versions) == 290
    assert ended.ids[: len(aborted)].tolist() == aborted.ids.tolist()
    assert engine.stats().tokens["train"] - made == 290 - len(aborted)


STOPS = tuple(range(3, 70))
"""A quarter of the vocabulary, so that a turn has a few tokens."""
OBSERVED = ([201, 30, 31, 7], [202, 40, 3])
"""What is said behind the first turn, and behind the second; a token of it may be one that ends a turn."""


async def hits(engine) -> float:
    """Return how many tokens vLLM has had of its prefix cache so far."""
    families = text_string_to_metric_families(await engine.metrics())
    return sum(each.value for one in families for each in one.samples if each.name == "vllm:prefix_cache_hits_total")


async def test_an_episode_goes_on_behind_all_that_was_said(engine, weights, reference):
    prompt = tuple(i % 250 + 3 for i in range(140))  # more than a block of the prefix cache
    asked = [request(serial, prompt_ids=prompt, max_tokens=120, stop_ids=STOPS, episode=True) for serial in range(8)]
    made_by, before = (V1, V1, V2), 0.0
    said, turns = asked, []
    for number, version in enumerate(made_by):
        if version != engine.version:  # a load empties the prefix cache, of the same weights too
            await engine.load(version, weights[version])
        turns.append(await asyncio.gather(*map(engine.generate, said)))
        if number == 1:
            assert await hits(engine) - before >= 128 * len(asked), "the prompt of a turn was not kept from the last"
        before = await hits(engine)
        assert {each.finish for each in turns[-1]} == {"stop"}
        for so_far, each in zip(said, turns[-1], strict=True):
            there = so_far.continues
            for column in ("ids", "logprobs", "versions", "chosen"):
                assert np.array_equal(getattr(each, column)[: len(there)], getattr(there, column)), column
        if number < len(OBSERVED):
            ended = zip(asked, turns[-1], strict=True)
            said = [replace(each, continues=turn.observed(OBSERVED[number])) for each, turn in ended]
    for each, *parts in zip(asked, *turns, strict=True):
        episode = parts[-1]
        ids, mask, versions = [], [], []
        for number, (part, version) in enumerate(zip(parts, made_by, strict=True)):
            turn = part.ids[len(ids) :].tolist()
            assert turn[-1] in STOPS
            assert not set(turn[:-1]) & set(STOPS)
            observed = OBSERVED[number] if number < len(OBSERVED) else []
            ids += [*turn, *observed]
            mask += [True] * len(turn) + [False] * len(observed)
            versions += [version.packed] * (len(turn) + len(observed))
        assert (episode.ids.tolist(), episode.chosen.tolist(), episode.versions.tolist()) == (ids, mask, versions)
        assert not episode.logprobs[~episode.chosen].any()
        conversation = whole(each, episode)
        for version in set(made_by):
            mine = episode.chosen & (episode.versions == version.packed)
            expected = reference(conversation, weights[version])[len(prompt) - 1 :]
            assert np.abs(episode.logprobs - expected)[mine].max() < 1e-4
        last = len(parts[1]) + len(OBSERVED[1])
        without = [*prompt, *parts[1].ids.tolist(), *ids[last:]]
        unheard = reference(without, weights[V2])[len(without) - len(ids[last:]) - 1 :]
        assert np.abs(episode.logprobs[last:] - unheard).max() > 1e-2, "without the observation it would be the same"


async def test_vllm_s_own_metrics_are_shown(engine):
    text = await engine.metrics()
    assert "vllm:generation_tokens_total" in text
    assert "process_" not in text


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process], *, within_s: float = 10.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


PARENT = """
    import asyncio, sys
    from pathlib import Path
    from asyncflow.rollout.engines import open_engine

    async def main():
        engine = open_engine("vllm", folder=Path(sys.argv[1]), slots=2, max_length=64)
        await engine.start()
        print("up", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


async def test_nothing_of_the_server_outlives_its_parent(folder):
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(folder)]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert await parent.stdout.readline() == b"up\n"
    processes = descendants(parent.pid)
    assert len(processes) >= 2
    parent.kill()
    await parent.wait()
    assert await asyncio.to_thread(gone, processes)


def constant(like: dict[str, np.ndarray], token: int) -> dict[str, np.ndarray]:
    """Weights of a model that says one token, whatever it is asked: its layers add nothing to the embeddings."""
    made = {name: np.full_like(array, float("norm" in name)) for name, array in like.items()}
    made["model.embed_tokens.weight"][:] = 1
    made["model.embed_tokens.weight"][token] = 2
    return made


def publish(folder: Path, config: Path, tensors: dict[str, np.ndarray]) -> None:
    with whole_folder(folder, replace=True) as made:
        shutil.copy(config / "config.json", made)
        save_file(tensors, made / "model.safetensors")


async def answers(url: str, wanted: str) -> None:
    """Wait until a completion is ``wanted``."""
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(120):
        async with session.get("/v1/models") as listed:
            model = (await listed.json())["data"][0]["id"]
        asked = {"model": model, "prompt": "1+2=", "max_tokens": 3, "temperature": 0}
        said = ""
        while said != wanted:
            async with session.post("/v1/completions", json=asked) as answer:
                said = (await answer.json())["choices"][0]["text"]


async def test_one_that_follows_a_publisher_answers_by_the_newest_weights(
    engine, folder, weights, tmp_path, monkeypatch
):
    monkeypatch.setattr(publisher, "POLL_S", 0.05)
    monkeypatch.setattr(publisher, "ModelWatch", partial(ModelWatch, settle_s=0.2))
    encode = Tokenizer.load(folder).encode
    seven, three = (constant(weights[V1], encode(digit)[0]) for digit in "73")
    publish(tmp_path / "model", folder, seven)
    source = {"model": str(tmp_path / "model"), "watch": True}
    sync = WeightSync.model_validate({"metadata": {"name": "weights"}, "spec": {"source": source}})
    with PortReservation(2) as (rpc, serve):
        options = {"job": tmp_path / "weights.yaml", "driver": f"tcp://127.0.0.1:{rpc}", "workdir": tmp_path}
        contexts = [
            SyncContext(options=RoleOptions(role=role, index=0, attempt=0, serve_port=serve, **options), resource=sync)
            for role in ("publisher", "follower")
        ]
        tasks = [
            asyncio.create_task(publisher.serve(contexts[0])),
            asyncio.create_task(serve_newest(contexts[1], engine, AcceleratorSpec(), probe_gap=ROUNDED)),
        ]
        url = f"http://127.0.0.1:{serve}"
        while engine.version != Version(0, 0):
            for task in tasks:
                if task.done():
                    task.result()
                    raise AssertionError("a role has ended")
            await asyncio.sleep(0.05)
        await answers(url, "777")
        publish(tmp_path / "model", folder, three)
        await answers(url, "333")
        assert engine.version == Version(0, 1)
        for context in contexts:
            context.stopping.set()
        await asyncio.gather(*tasks)


async def test_a_server_that_is_killed_ends_what_runs_with_an_error(engine, weights):
    await engine.load(V1, weights[V1])
    server = next(each for each in descendants(os.getpid()) if "engines.vllm.program" in " ".join(each.cmdline()))
    processes = [server, *server.children(recursive=True)]
    assert len(processes) >= 2
    running = asyncio.create_task(engine.generate(request(max_tokens=290)))
    await asyncio.sleep(0.05)
    server.send_signal(signal.SIGKILL)
    with pytest.raises(PeerLost, match="vLLM server"):
        await running
    assert await asyncio.to_thread(gone, processes)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="ended with status -9"):
        await engine.generate(request())
    assert time.monotonic() - began < 5


REFUSALS = """
    import json, sys
    from pathlib import Path
    from asyncflow.rollout.engines.vllm.program import ServerSettings, main

    usual = {"required": {"model": sys.argv[1], "max_num_seqs": 2}, "optional": {}, "given": {}, "device": "cpu"}
    for wrong in json.loads(sys.argv[2]):
        refusal = Path(sys.argv[1], "refusal")
        try:
            main(ServerSettings(**{**usual, **wrong}, deterministic=False, refusal=str(refusal)))
        except SystemExit as end:
            print(json.dumps([end.code, refusal.read_text()]))
"""


async def test_what_the_installed_vllm_cannot_do_is_refused_in_words(folder):
    wrongs = [
        {"given": {"max_num_sequences": 4}},
        {"given": {"logprobs_mod": "raw_logprobs"}},
        {"given": {"block_size": "wide"}},
        {"device": "cuda"},
    ]
    command = [sys.executable, "-c", textwrap.dedent(REFUSALS), str(folder), json.dumps(wrongs)]
    program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await program.communicate()
    found = [json.loads(line) for line in said.splitlines() if line.startswith(b"[")]
    assert [code for code, _ in found] == [REFUSED] * len(wrongs)
    words = ["no option max_num_sequences", "no option logprobs_mod", "block-size", "computes on cpu, not on cuda"]
    assert [part for part, (_, why) in zip(words, found, strict=True) if part not in why] == []


async def test_a_server_that_refuses_its_options_is_one_error(folder):
    engine = open_engine("vllm", folder=folder, slots=2, max_length=64, deterministic=True)
    with pytest.raises(ManifestError, match="no batch-invariant kernels"):
        await engine.start()
    await engine.close()
