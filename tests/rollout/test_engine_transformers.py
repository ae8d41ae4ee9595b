from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from asyncflow.errors import ManifestError, NotYetError, Refused
from asyncflow.identity import SampleKey, Version
from asyncflow.rollout.engines import open_engine
from asyncflow.rollout.engines.base import GenerationRequest
from asyncflow.rollout.engines.batch import Sequence
from asyncflow.rollout.engines.model import CausalModel
from asyncflow.telemetry.span_file import read_recording
from asyncflow.telemetry.spans import Spans

from .conftest import random_weights, write_config

V1, V2 = Version(0, 1), Version(0, 2)


def make_engine(folder, *, slots=8, max_length=48, dtype="float32", **settings):
    return open_engine("transformers", folder=folder, slots=slots, max_length=max_length, dtype=dtype, **settings)


def request(serial, sample=0, *, prompt=None, **changes):
    prompt = prompt or tuple((serial * 7 + i * 3) % 60 + 1 for i in range(3 + serial % 11))
    settings = {"max_tokens": 20, "seed": 5, "stop_ids": (0, 7, 11), **changes}
    return GenerationRequest(key=SampleKey(serial, sample), prompt_ids=prompt, **settings)


def same(a, b):
    return (
        a.finish == b.finish
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and np.array_equal(a.versions, b.versions)
    )


async def generate_all(engine, requests):
    return await asyncio.gather(*(engine.generate(r) for r in requests))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_sequence_is_the_same_whoever_runs_beside_it(tiny, dtype):
    engine = make_engine(tiny, dtype=dtype)
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    requests = [request(s, j, temperature=0.0 if s % 5 == 4 else 1.0) for s in range(10) for j in range(3)]
    alone = [await engine.generate(r) for r in requests[::4]]
    crowded = (await generate_all(engine, requests))[::4]
    shuffled = list(requests)
    random.Random(3).shuffle(shuffled)
    again = dict(zip((r.key for r in shuffled), await generate_all(engine, shuffled), strict=True))
    await engine.close()
    for r, a, b in zip(requests[::4], alone, crowded, strict=True):
        assert same(a, b)
        assert same(a, again[r.key])
        assert set(a.versions.tolist()) == {V1.packed}
        assert a.finish == ("stop" if a.ids[-1] in r.stop_ids else "length")
        assert not set(a.ids[:-1].tolist()) & set(r.stop_ids)
    assert len({tuple(c.ids.tolist()) for c in crowded}) > 3


async def until_steps(engine, steps):
    while engine.stats().steps < steps:
        await asyncio.sleep(0.001)


def beginning(whole, tokens):
    """Return what an engine has of a response after so many tokens."""
    parts = {name: getattr(whole, name)[:tokens] for name in ("ids", "logprobs", "versions")}
    return replace(whole, **parts, finish="aborted")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_response_that_another_engine_began_ends_as_it_would_have_there(tiny, dtype):
    weights = random_weights(tiny, seed=1)
    requests = [request(s, stop_ids=(0,), max_tokens=90, temperature=s % 3 / 2) for s in range(8)]
    first, second = (make_engine(tiny, max_length=120, dtype=dtype) for _ in range(2))
    for engine in (first, second):
        await engine.start()
        await engine.load(V1, weights)
    whole = await generate_all(first, requests)
    begun = [beginning(each, 1 + 23 * i % (len(each) - 1)) for i, each in enumerate(whole)]
    others = [request(s, stop_ids=(), max_tokens=30, purpose="eval") for s in range(20, 25)]
    beside = asyncio.create_task(generate_all(second, others))
    asked = [replace(r, continues=each) for r, each in zip(requests, begun, strict=True)]
    rest = await generate_all(second, asked[::-1])
    await beside
    assert second.stats().tokens["train"] == sum(map(len, whole)) - sum(map(len, begun))
    for engine in (first, second):
        await engine.close()
    assert all(same(a, b) for a, b in zip(whole, rest[::-1], strict=True))


async def test_running_sequences_go_on_under_weights_that_are_loaded(tiny):
    old, new = random_weights(tiny, seed=1), random_weights(tiny, seed=2)
    engine, other = make_engine(tiny, max_length=250), make_engine(tiny, max_length=250)
    await engine.start()
    await engine.load(V1, old)
    requests = [request(s, stop_ids=(), max_tokens=200 + s) for s in range(10)]
    whole = await generate_all(engine, requests)
    before = engine.stats().steps
    running = [asyncio.create_task(engine.generate(r)) for r in requests]
    await until_steps(engine, before + 2)
    await engine.load(V2, new)
    mixed = await asyncio.gather(*running)
    await engine.close()
    await other.start()
    await other.load(V2, new)
    continued = []
    for r, undisturbed, each in zip(requests, whole, mixed, strict=True):
        begun = int((each.versions == V1.packed).sum())
        assert each.versions.tolist() == [V1.packed] * begun + [V2.packed] * (len(each) - begun)
        assert (begun > 0) == (r.key.serial < 8), "the last two waited for a slot"
        assert np.array_equal(each.ids[:begun], undisturbed.ids[:begun])
        continued.append(replace(r, continues=beginning(each, begun)))
    for again, each in zip(await generate_all(other, continued), mixed, strict=True):
        assert same(again, each)
    await other.close()


async def test_what_older_weights_made_of_running_sequences_may_be_kept(tiny):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    weights = {V1: random_weights(tiny, seed=1), V2: random_weights(tiny, seed=2)}
    engine = make_engine(tiny, max_length=250, keeps_prefix=True)
    await engine.start()
    await engine.load(V1, weights[V1])
    requests = [request(s, stop_ids=(), max_tokens=100 + s) for s in range(10)]
    running = [asyncio.create_task(engine.generate(r)) for r in requests]
    await until_steps(engine, 2)
    await engine.load(V2, weights[V2])
    mixed = await asyncio.gather(*running)
    begun = [int((each.versions == V1.packed).sum()) for each in mixed]
    assert [n > 0 for n in begun] == [True] * 8 + [False] * 2, "the last two waited for a slot"
    assert engine.stats().stale == sum(len(each) - n for each, n in zip(mixed, begun, strict=True) if n)
    await engine.close()

    def model(version):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny), dtype=torch.float32).eval()
        made.load_state_dict({k: torch.from_numpy(v) for k, v in weights[version].items()}, strict=False)
        return made

    old, new = model(V1), model(V2)
    for r, n, each in zip(requests, begun, mixed, strict=True):
        ids = torch.tensor([[*r.prompt_ids, *each.ids.tolist()]])
        here = len(r.prompt_ids) + max(0, n - 1)
        with torch.no_grad():
            kept = old(ids[:, :here], past_key_values=DynamicCache()) if n else new(ids[:, :here])
            logits = new(ids[:, here:-1], past_key_values=kept.past_key_values).logits[0]
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, here + 1 :, None])[:, 0].numpy()
        assert np.abs(expected - each.logprobs[len(each) - len(expected) :]).max() < 2e-5


async def test_a_response_that_is_handed_on_twice_loses_no_token(tiny):
    engine = make_engine(tiny, slots=2, max_length=120)
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    asked = request(1, stop_ids=(), max_tokens=100)
    whole = await engine.generate(asked)
    reading = Sequence(replace(asked, continues=beginning(whole, 40)))
    assert len(reading.completion()) == 40, "also what is ended while it is read again has what was begun"
    assert reading.completion().finish == "aborted"
    assert same(await engine.generate(replace(asked, continues=reading.completion())), whole)
    with pytest.raises(ManifestError, match="already has 100"):
        await engine.generate(replace(asked, continues=whole))
    await engine.close()


async def test_what_there_is_of_a_sequence_while_it_runs_is_a_beginning_of_it(tiny):
    weights = random_weights(tiny, seed=1)
    engine, other = make_engine(tiny, max_length=250), make_engine(tiny, max_length=250)
    await engine.start()
    await engine.load(V1, weights)
    requests = [request(s, stop_ids=(), max_tokens=150 + s) for s in range(10)]
    running = [asyncio.create_task(engine.generate(r)) for r in requests]
    seen = {("train", r.key): [] for r in requests}
    counts = [0]
    while not all(each.done() for each in running):
        for name, so_far in engine.unfinished().items():
            seen[name].append(so_far)
        counts.append(engine.stats().tokens.get("train", 0))
        await asyncio.sleep(0.005)
    whole = [each.result() for each in running]
    assert engine.unfinished() == {}
    await engine.close()
    assert counts == sorted(counts)
    assert 0 < counts[len(counts) // 2] < sum(map(len, whole))
    last = {}
    for r, ended in zip(requests, whole, strict=True):
        lengths = [len(so_far) for so_far in seen["train", r.key]]
        assert lengths == sorted(lengths)
        assert lengths[-1] < len(ended)
        assert all(same(so_far, beginning(ended, len(so_far))) for so_far in seen["train", r.key])
        last[r.key] = seen["train", r.key][-1]
    await other.start()
    await other.load(V1, weights)
    rest = await generate_all(other, [replace(r, continues=last[r.key]) for r in requests])
    await other.close()
    assert all(same(a, b) for a, b in zip(whole, rest, strict=True))


def test_a_token_that_ends_a_response_is_not_among_what_there_is_while_it_runs():
    sequence = Sequence(request(1, max_tokens=3, stop_ids=(7,)))
    assert len(sequence.so_far()) == 0
    for token in (5, 7):
        sequence.append(token, -1.0, V1.packed)
    assert sequence.so_far().ids.tolist() == [5]
    assert sequence.completion().without_last().ids.tolist() == [5]
    assert sequence.completion().without_last().finish == sequence.so_far().finish == "aborted"


async def test_a_group_is_prefilled_once_and_that_is_recorded(tiny, tmp_path):
    engine = make_engine(tiny, slots=4)
    engine.spans = Spans(tmp_path / "rollout.spans", role="rollout")
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    await generate_all(engine, [request(3, j) for j in range(12)])
    assert engine.stats().prefilled == 1
    await engine.load(V2, random_weights(tiny, seed=2))
    await generate_all(engine, [request(3, j) for j in range(12)])
    stats = engine.stats()
    await engine.close()
    assert stats.prefilled == 2
    assert [span.kind for span in read_recording(tmp_path / "rollout.spans").track.background] == ["prefill"] * 2
    assert stats.running == stats.waiting == 0
    assert stats.tokens["train"] > 0
    assert stats.busy_s > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_an_ordinary_forward(tmp_path, changes, temperature):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_config(tmp_path / "m", **changes)
    weights = random_weights(folder, seed=1)
    engine = make_engine(folder)
    await engine.start()
    await engine.load(V1, weights)
    requests = [request(s, temperature=temperature) for s in range(6)]
    completions = await generate_all(engine, requests)
    await engine.close()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    model.tie_weights()
    for r, c in zip(requests, completions, strict=True):
        ids = torch.tensor([[*r.prompt_ids, *c.ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(r.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, ids[0, len(r.prompt_ids) :, None])
        assert np.abs(expected[:, 0].numpy() - c.logprobs).max() < 2e-5
        if temperature == 0:
            assert logits.argmax(-1).tolist() == c.ids.tolist()


async def test_samples_follow_the_distribution(tiny):
    engine = make_engine(tiny, slots=64)
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    first = await generate_all(engine, [request(2, j, max_tokens=1) for j in range(3000)])
    await engine.close()
    logprob = {int(c.ids[0]): float(c.logprobs[0]) for c in first}
    counts = np.bincount([int(c.ids[0]) for c in first], minlength=61)
    expected = np.array([np.exp(logprob.get(i, -np.inf)) for i in range(61)]) * 3000
    common = expected > 20
    assert expected.sum() > 0.97 * 3000
    assert (np.abs(counts - expected)[common] < 4.5 * np.sqrt(expected[common])).all()


async def test_weights_are_checked_before_any_is_overwritten(tmp_path, tiny):
    good = random_weights(tiny, seed=1)
    engine = make_engine(tiny)
    await engine.start()
    with pytest.raises(Refused, match="no weights"):
        await engine.generate(request(1))
    await engine.load(V1, good)
    before = await engine.generate(request(1))
    name = next(iter(good))
    last = list(good)[-1]
    for bad, message in [
        ({k: v for k, v in good.items() if k != last}, f"missing {last}"),
        ({**good, "stranger": good[name]}, "unexpected stranger"),
        ({**good, last: good[last][:-1]}, "not \\("),
        ({**good, last: good[last].astype(np.float64)}, "float64"),
    ]:
        changed = {k: v + 1 if k == name else v for k, v in bad.items()}
        with pytest.raises(ManifestError, match=message):
            await engine.load(V2, changed)
    assert engine.version == V1
    assert same(before, await engine.generate(request(1)))
    await engine.load(V2, random_weights(tiny, seed=2))
    after = await engine.generate(request(1))
    await engine.close()
    assert engine.version == V2
    assert set(after.versions.tolist()) == {V2.packed}
    assert not np.array_equal(before.logprobs, after.logprobs)


async def test_tied_weights_may_come_under_any_of_their_names(tmp_path):
    folder = write_config(tmp_path / "m", tie_word_embeddings=True)
    once, twice = random_weights(folder, seed=1), random_weights(folder, seed=1, tied_names=True)
    assert len(twice) == len(once) + 1
    engine = make_engine(folder)
    await engine.start()
    results = []
    for weights in (once, twice):
        await engine.load(V1, weights)
        results.append(await engine.generate(request(1)))
    with pytest.raises(ManifestError, match="tied"):
        await engine.load(V2, {**twice, "lm_head.weight": twice["lm_head.weight"] + 1})
    await engine.close()
    assert same(*results)


async def test_bfloat16_bits_are_taken_by_either_dtype(tiny):
    import torch

    weights = random_weights(tiny, seed=1)
    rounded = {k: torch.from_numpy(v).bfloat16() for k, v in weights.items()}
    bits = {k: v.view(torch.uint16).numpy().copy() for k, v in rounded.items()}
    for array in bits.values():
        array.flags.writeable = False
    results = []
    for dtype, tensors in [("float32", bits), ("float32", {k: v.float().numpy() for k, v in rounded.items()})]:
        engine = make_engine(tiny, dtype=dtype)
        await engine.start()
        await engine.load(V1, tensors)
        results.append(await engine.generate(request(1)))
        await engine.close()
    assert same(*results)


async def test_cancel_and_abort_free_the_slot_at_the_next_step(tiny):
    engine = make_engine(tiny, slots=2, max_length=250)
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    long = [request(s, stop_ids=(), max_tokens=230) for s in range(4)]
    tasks = [asyncio.create_task(engine.generate(r)) for r in long]
    await until_steps(engine, 3)
    await engine.abort([long[0].key, long[3].key])
    tasks[1].cancel()
    partial, waiting = await tasks[0], await tasks[3]
    assert partial.finish == waiting.finish == "aborted"
    assert 0 < len(partial.ids) < 230
    assert len(waiting.ids) == 0
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    whole = await tasks[2]
    assert whole.finish == "length"
    again = await engine.generate(long[0])
    assert np.array_equal(again.ids[: len(partial.ids)], partial.ids)
    await engine.close()
    with pytest.raises(Refused, match="closed"):
        await engine.generate(request(1))


async def test_a_load_that_fails_halfway_is_the_end_of_the_engine(tiny, monkeypatch):
    engine = make_engine(tiny)
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))

    def fail(_self, _tensors):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(CausalModel, "load", fail)
    for wanted in (engine.load(V2, random_weights(tiny, seed=2)), engine.generate(request(0))):
        with pytest.raises(RuntimeError, match="no memory is left"):
            await asyncio.wait_for(wanted, 30)
    await engine.close()


async def test_loads_that_wait_when_it_is_closed_end(tiny):
    engine = make_engine(tiny)
    await engine.start()
    weights = random_weights(tiny, seed=1)
    loads = [asyncio.create_task(engine.load(V1, weights)) for _ in range(9)]
    await asyncio.sleep(0)
    await engine.close()
    ends = await asyncio.wait_for(asyncio.gather(*loads, return_exceptions=True), 30)
    assert all(end is None or isinstance(end, Refused) for end in ends)


async def test_what_cannot_work_is_refused(tmp_path, tiny):
    for changes in (
        {"model_type": "bloom"},
        {"model_type": "gpt_oss"},
        {"attn_logit_softcapping": 50.0},
        {"rope_parameters": {"rope_type": "dynamic"}},
        {"layer_types": ["linear_attention"]},
    ):
        engine = make_engine(write_config(tmp_path / "bad", **changes))
        with pytest.raises(NotYetError):
            await engine.start()
    for bad in ({"dtype": "float16"}, {"max_length": 300}):
        engine = make_engine(tiny, **bad)
        with pytest.raises(ManifestError):
            await engine.start()
    engine = make_engine(tiny, max_length=24)
    for changes in ({"max_tokens": 0}, {"max_tokens": 23}, {"temperature": float("nan")}):
        with pytest.raises(ManifestError):
            await engine.generate(request(1, **changes))
    with pytest.raises(ManifestError, match="use one of: simulated"):
        open_engine("nope", folder=None, slots=1, max_length=8)


def test_options_that_are_checked_without_loading_a_plugin_are_the_plugins_own() -> None:
    from asyncflow.commands.preflight import HEAVY
    from asyncflow.rollout.engines.transformers import TransformersEngine
    from asyncflow.rollout.engines.vllm.engine import VllmEngine
    from asyncflow.training.torch.backend import TorchBackend

    engines = {"transformers": TransformersEngine.Options, "vllm": VllmEngine.Options}
    assert {**engines, "torch": TorchBackend.Options} == HEAVY
