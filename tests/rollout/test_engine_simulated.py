from __future__ import annotations

import asyncio
import selectors
import subprocess
import sys
import time

import numpy as np
import pytest

from asyncflow.errors import ManifestError, Refused
from asyncflow.identity import SampleKey, Version
from asyncflow.rollout.engines import open_engine
from asyncflow.rollout.engines.base import GenerationRequest
from asyncflow.rollout.engines.simulated import SimulatedEngine


def simulated(slots=4, *, keeps_prefix=False, **options):
    return open_engine(
        "simulated", folder=None, slots=slots, max_length=128, options=options, keeps_prefix=keeps_prefix
    )


class LeapingSelector(selectors.DefaultSelector):
    """A selector that lets the time of a loop leap to its next timer, instead of waiting for it."""

    now = 0.0

    def select(self, timeout=None):
        found = super().select(None if timeout is None else 0)
        self.now += 0.0 if timeout is None or found else timeout
        return found


def leaping_loop():
    selector = LeapingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    return loop


def leaping(work):
    with asyncio.Runner(loop_factory=leaping_loop) as runner:
        return runner.run(work)


async def ends(engine, requests, *, meanwhile=None):
    """Return (tokens, seconds from the start) of each request, all of which begin together."""
    loop = asyncio.get_running_loop()
    await engine.load(Version(0, 0), {})
    began = loop.time()

    async def one(each):
        made = await engine.generate(each)
        return len(made), loop.time() - began

    tasks = [asyncio.create_task(one(each)) for each in requests]
    if meanwhile is not None:
        await meanwhile()
    return await asyncio.gather(*tasks)


def request(serial, sample=0, **changes):
    return GenerationRequest(key=SampleKey(serial, sample), prompt_ids=(1, 2), max_tokens=64, **changes)


async def test_responses_are_keyed_by_the_sample():
    results = []
    for slots in (1, 8):
        engine = simulated(slots, tokens=16, sigma=0.8)
        await engine.load(Version(0, 3), {})
        results.append(await asyncio.gather(*(engine.generate(request(s, j)) for s in range(50) for j in range(4))))
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert len(a.ids) == len(a.logprobs) == len(a.versions)
        assert set(a.versions.tolist()) == {Version(0, 3).packed}
    lengths = [len(a.ids) for a in results[0]]
    assert 13 <= np.median(lengths) <= 19
    assert 1 <= min(lengths) < 8
    assert 32 < max(lengths) <= 64


async def test_a_response_that_was_begun_elsewhere_takes_the_time_of_its_rest():
    first, second = simulated(1, tokens=40, token_s=0.03), simulated(1, tokens=40, token_s=0.03)
    for step, engine in enumerate((first, second)):
        await engine.load(Version(0, step), {})
    whole = await first.generate(request(1))
    running = asyncio.create_task(first.generate(request(1)))
    await asyncio.sleep(0.1)
    await first.abort([SampleKey(1, 0)])
    begun = await running
    assert 0 < len(begun) < len(whole) == 40
    ended = await second.generate(request(1, continues=begun))
    assert np.array_equal(ended.ids, whole.ids)
    assert ended.finish == whole.finish
    assert ended.versions.tolist() == [Version(0, 0).packed] * len(begun) + [Version(0, 1).packed] * (40 - len(begun))
    assert second.stats().tokens == {"train": 40 - len(begun)}


@pytest.mark.parametrize("keeps_prefix", [False, True])
async def test_what_runs_stands_still_while_weights_are_loaded_and_goes_on_under_them(keeps_prefix):
    engine = simulated(keeps_prefix=keeps_prefix, token_s=0.02, load_s=0.2)
    await engine.load(Version(0, 0), {})
    whole = await engine.generate(request(1))
    began = time.monotonic()
    running = asyncio.create_task(engine.generate(request(1)))
    await asyncio.sleep(0.1)
    await engine.load(Version(0, 1), {})
    mixed = await running
    assert time.monotonic() - began >= 64 * 0.02 + 0.2
    assert np.array_equal(mixed.ids, whole.ids)
    old = int((mixed.versions == Version(0, 0).packed).sum())
    assert 0 < old < 64
    assert set(mixed.versions[old:].tolist()) == {Version(0, 1).packed}
    assert engine.stats().tokens["train"] == 128
    assert engine.stats().stale == (64 - old if keeps_prefix else 0)


def test_tokens_count_as_stale_while_their_sequence_runs():
    async def work():
        engine = simulated(keeps_prefix=True, token_s=0.01)
        await engine.load(Version(0, 0), {})
        running = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(0.105)
        await engine.load(Version(0, 1), {})
        await asyncio.sleep(0.2)
        return engine.stats().stale, await running, engine.stats().stale

    while_it_runs, made, ended = leaping(work())
    assert (while_it_runs, ended) == (20, 54)
    assert made.versions.tolist() == [Version(0, 0).packed] * 10 + [Version(0, 1).packed] * 54


def test_what_gets_its_slot_during_a_load_is_made_by_the_new_weights_alone():
    async def work():
        engine = simulated(1, keeps_prefix=True, token_s=0.01, load_s=0.1)
        await engine.load(Version(0, 0), {})
        running = [asyncio.create_task(engine.generate(request(serial))) for serial in (1, 2)]
        loading = asyncio.create_task(engine.load(Version(0, 1), {}))
        await asyncio.sleep(0.05)
        await engine.abort([SampleKey(1, 0)])
        await loading
        return await running[1], engine.stats().stale

    made, stale = leaping(work())
    assert made.versions.tolist() == [Version(0, 1).packed] * 64
    assert stale == 0


def test_a_load_that_fails_makes_nothing_stale():
    async def work():
        engine = simulated(keeps_prefix=True, token_s=0.01)
        await engine.load(Version(0, 0), {})
        running = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(0.1)
        with pytest.raises(AttributeError):
            await engine.load(Version(0, 1), {"w": "no tensor"})
        return await running, engine.stats().stale

    made, stale = leaping(work())
    assert made.versions.tolist() == [Version(0, 0).packed] * 64
    assert stale == 0


async def test_what_there_is_of_a_sequence_is_told_while_it_runs_and_counts_however_it_ends():
    engine, other = simulated(4, token_s=0.02, tokens=40), simulated(4, tokens=40)
    for each in (engine, other):
        await each.load(Version(0, 0), {})
    whole = await other.generate(request(1))
    running = asyncio.create_task(engine.generate(request(1)))
    while not engine.stats().tokens.get("train"):
        await asyncio.sleep(0.01)
    (so_far,) = engine.unfinished().values()
    assert so_far.finish == "aborted"
    assert 0 < len(so_far) < len(whole)
    assert np.array_equal(so_far.ids, whole.ids[: len(so_far)])
    ended = await other.generate(request(1, continues=so_far))
    assert np.array_equal(ended.ids, whole.ids)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert engine.unfinished() == {}
    assert engine.stats().tokens["train"] >= len(so_far)


async def test_slots_bound_what_runs_and_loading_waits_for_nobody():
    engine = simulated(3, token_s=1.0)
    with pytest.raises(Refused):
        await engine.generate(request(0))
    await engine.load(Version(0, 0), {})
    tasks = [asyncio.create_task(engine.generate(request(s))) for s in range(5)]
    await asyncio.sleep(0)
    assert engine.stats().running == 3
    assert engine.stats().waiting == 2
    await engine.abort([SampleKey(4, 0)])
    assert (await tasks[4]).finish == "aborted", "also what waits for a slot"
    tasks[0].cancel()
    await engine.abort([SampleKey(1, 0)])
    assert (await tasks[1]).finish == "aborted"
    await engine.close()
    assert (await tasks[2]).finish == "aborted"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_prefix_is_kept_by_engines_that_know_how():
    class Other(SimulatedEngine):
        can_keep_prefix = False

    with pytest.raises(ManifestError, match="can only recompute"):
        Other(folder=None, slots=1, max_length=8, keeps_prefix=True)


def test_options_are_checked():
    for options in ({"speed": 1}, {"token_s": -1.0}, {"token_s": "fast"}, {"sigma": float("inf")}, {"share_s": 1.0}):
        with pytest.raises(ManifestError, match="options"):
            simulated(**options)


def test_needs_no_torch():
    code = "import sys, asyncflow.rollout.engines.simulated; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


async def test_a_sample_that_was_claimed_again_may_run_twice_at_once():
    engine = simulated(2, token_s=0.001)
    await engine.load(Version(0, 0), {})
    first, second = await asyncio.gather(engine.generate(request(0)), engine.generate(request(0)))
    assert first.ids.tolist() == second.ids.tolist()
    assert engine.stats().running == 0


@pytest.mark.parametrize("share_s", [0.0, 0.003])
def test_each_further_sequence_slows_all_and_each_end_makes_the_rest_faster(share_s):
    engine = simulated(64, tokens=20, sigma=0.8, token_s=0.01, share_s=share_s, time_scale=2.0)
    found = sorted(leaping(ends(engine, [request(serial) for serial in range(40)])))
    at, before = 0.0, 0
    for index, (tokens, seconds) in enumerate(found):
        at += 2.0 * (tokens - before) * (0.01 + share_s * (len(found) - index - 1))
        before = tokens
        assert seconds == pytest.approx(at, abs=1e-6)


@pytest.mark.parametrize("kept", [False, True])
def test_sequences_that_share_stand_still_while_weights_are_loaded_and_caches_computed(kept):
    load_s = 0.5 if kept else 0.2
    recompute_s = 0.3 / (3 * 17)
    engine = simulated(3, keeps_prefix=kept, token_s=0.01, share_s=0.005, load_s=load_s, recompute_s=recompute_s)

    async def load():
        await asyncio.sleep(0.3)
        await engine.load(Version(0, 1), {})

    found = leaping(ends(engine, [request(serial) for serial in range(4)], meanwhile=load))
    three, one = 64 * 0.02, 64 * 0.01
    assert [seconds for _, seconds in found] == pytest.approx([three + 0.5] * 3 + [three + 0.5 + one], abs=1e-6)


def test_a_sequence_that_is_ended_makes_the_rest_faster():
    engine = simulated(2, token_s=0.01, share_s=0.01)

    async def abort():
        await asyncio.sleep(0.32)
        await engine.abort([SampleKey(1, 0)])

    (whole, last), (some, first) = leaping(ends(engine, [request(0), request(1)], meanwhile=abort))
    assert (some, whole) == (16, 64)
    assert (first, last) == pytest.approx((0.32, 0.32 + 48 * 0.01), abs=1e-6)


async def test_lengths_of_a_group_go_together_as_far_as_rho_says():
    spread = {}
    for rho in (0.0, 0.6):
        engine = open_engine(
            "simulated", folder=None, slots=999, max_length=100_000, options={"tokens": 1000, "sigma": 0.5, "rho": rho}
        )
        await engine.load(Version(0, 0), {})
        keys = [SampleKey(serial, sample) for serial in range(150) for sample in range(4)]
        asked = [GenerationRequest(key=key, prompt_ids=(1,), max_tokens=50_000) for key in keys]
        made = await asyncio.gather(*map(engine.generate, asked))
        logs = np.log([len(each) for each in made]).reshape(150, 4)
        assert logs.std() == pytest.approx(0.5, abs=0.06)
        spread[rho] = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert abs(spread[0.0]) < 0.2
    assert spread[0.6] == pytest.approx(0.6, abs=0.15)
