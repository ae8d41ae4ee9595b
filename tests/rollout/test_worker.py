"""The worker against the real queue, weights and reward processes, over sockets."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, PeerLost
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta
from asyncflow.rollout.engines.base import NOTHING, Completion
from asyncflow.rollout.engines.simulated import SimulatedEngine
from asyncflow.rollout.job import RESPONSE, Job, RolloutSettings, worth_saving
from asyncflow.rollout.worker import RolloutMeter
from asyncflow.telemetry.metrics import RolloutMetrics
from asyncflow.weights.probe import WeightProbe, probe_ids

from .conftest import random_weights

sys.path.insert(0, str(Path(__file__).parent))
from rollout_world import ANY, running_world, until


@pytest.fixture
async def world(tmp_path):
    async with running_world(tmp_path) as world:
        yield world


def steps(rows, columns):
    """The version steps of each row, as a set, by step of the row."""
    found = {}
    for row, versions in zip(rows, columns["versions"], strict=True):
        found.setdefault(row.meta.step, set()).update(Version.unpack(int(v)).step for v in versions)
    return found


async def test_a_sample_is_claimed_generated_scored_and_delivered(world):
    rollout = await world.rollout("r0", reward="rollout_reward:words", tokens=6, sigma=0.5)
    await world.put([0, 1, 2], step=1, oldest=0)
    await world.publish(0)
    rows, columns = await world.made(12)
    assert [row.meta.key for row in rows] == [(s, j) for s in range(3) for j in range(4)]
    for row, ids, logprobs, versions, reward in zip(rows, *columns.values(), strict=True):
        tags = row.meta.tags
        assert ids.dtype == np.int32
        assert logprobs.dtype == np.float32
        assert versions.dtype == np.int64
        assert len(ids) == len(logprobs) == len(versions) == tags["tokens"] == tags["response_tokens"]
        text = len(ids) - (ids[-1] == 1)  # an id that ends a response is no part of its text
        assert reward.tolist() == [tags["reward"]] == [text + 0.5]
        assert ("failure" in tags, tags["version_min"], tags["version_max"]) == (False, 0, 0)
    status = rollout.worker.status()
    assert status["version"] == Version(0, 0).packed
    assert status["tokens_generated"] == sum(len(ids) for ids in columns["response_ids"])
    assert status["delivered"] == 12
    assert status["inflight"] == status["fenced"] == status["lost"] == 0
    assert status["busy_s"] > 0


async def test_quota_makes_each_step_from_its_version_with_instances_that_share(world):
    rollouts = [await world.rollout(f"r{i}", tokens=6, sigma=0.5, token_s=0.001) for i in range(2)]
    await world.publish(0)
    await world.put(range(6), step=1, oldest=0)
    await world.put(range(6, 12), step=2, oldest=0)
    await until(lambda: sum(r.worker.meter.delivered for r in rollouts) >= 10, "some of θ0")
    await world.publish(1)
    await world.put(range(12, 18), step=3, oldest=1)
    await world.publish(2)
    await world.put(range(18, 24), step=4, oldest=2)
    rows, columns = await world.made(96)
    assert steps(rows, columns) == {1: {0}, 2: {0}, 3: {1}, 4: {2}}
    assert all(len(set(v.tolist())) == 1 for v in columns["versions"])
    assert all(r.worker.meter.delivered > 0 for r in rollouts)


async def test_standing_still_for_weights_is_counted_and_other_idleness_is_not(world):
    rollout = await world.rollout("r0", load_s=0.2)
    meter = rollout.worker.meter
    await world.publish(0)
    await until(lambda: rollout.worker.loader.swaps == 1, "θ0")
    await world.publish(1)
    await until(lambda: rollout.worker.loader.swaps == 2, "θ1, which nobody waits for")
    assert meter.stall_s == 0
    world.catalogue.require([2])
    await world.publish(2)
    await world.put([0], step=4, oldest=2)
    await world.made(4)
    waited = meter.busy.seconds()
    assert waited["swap"] >= 0.2
    assert meter.stall_s == waited.get("receive", 0.0) + waited["swap"]


async def test_without_work_it_loads_what_is_staged(world):
    rollout = await world.rollout("r0")
    for step in range(3):
        await world.publish(step)
        await until(lambda step=step: rollout.instance.current == Version(0, step), f"θ{step} to be loaded")
    assert rollout.worker.meter.occupied.total() == 0


def test_waiting_for_weights_on_their_way_is_counted() -> None:
    meter = RolloutMeter(RolloutMetrics())
    meter.running(0, waiting=True)
    time.sleep(0.02)
    meter.running(0, waiting=False)
    assert 0.02 <= meter.stall_s == meter.busy.seconds()["receive"]


def test_waiting_that_shows_late_is_not_counted_beside_the_swap_before_it() -> None:
    begun = time.monotonic()
    meter = RolloutMeter(RolloutMetrics())
    meter.running(1, waiting=False)
    with meter.swaps(1):
        time.sleep(0.02)
    meter.running(0, waiting=True)
    assert meter.stall_s <= time.monotonic() - begun


def test_a_swap_without_work_counts_from_when_there_is_some() -> None:
    meter = RolloutMeter(RolloutMetrics())
    with meter.swaps(1, idle=True):
        time.sleep(0.01)
        assert meter.stall_s == 0
        meter.holding(2)
        time.sleep(0.01)
    assert 0.01 <= meter.stall_s == meter.busy.seconds()["swap"]


async def test_a_rollout_is_occupied_while_it_has_rows_also_while_they_wait_for_weights(world):
    rollout = await world.rollout("r0", load_s=0.2)
    meter = rollout.worker.meter
    await world.publish(0)
    await until(lambda: rollout.worker.loader.swaps == 1, "θ0")
    assert meter.occupied.total() == 0
    await world.publish(1)
    world.catalogue.require([1])
    await world.put([0], step=3, oldest=1)
    await world.made(4)
    await until(lambda: not len(rollout.worker._in_flight), "the rows to be delivered")
    before = meter.occupied.total()
    assert before > meter.generate_s
    await asyncio.sleep(0.05)
    assert rollout.worker.status()["held_s"] == before == meter.occupied.total()


async def test_versions_are_merged_while_others_are_in_use_and_loaded_as_merged(world):
    merged, loaded = [], {}

    def merge(tensors):
        step = int(tensors["step"][0])
        merged.append(step)
        return {"whole": tensors["step"] + 100}

    rollout = await world.rollout("r0", merge=merge)
    engine, over = rollout.worker._engine, asyncio.Event()
    load, generate = engine.load, engine.generate

    async def seen(version, tensors):
        loaded[version.step] = tensors["whole"][0]
        await load(version, tensors)

    async def held(request):
        await over.wait()
        return await generate(request)

    engine.load, engine.generate = seen, held
    await world.publish(0)
    await world.put([0], step=1, oldest=0)
    await until(lambda: rollout.worker.status()["running"] > 0, "sequences of θ0")
    world.catalogue.require([1])
    await world.publish(1)
    await until(lambda: merged == [0, 1], "θ1 to be merged")
    assert loaded == {0: 100}
    over.set()
    await world.put([1], step=2, oldest=1)
    assert steps(*await world.made(8)) == {1: {0}, 2: {1}}
    assert loaded == {0: 100, 1: 101}
    assert merged == [0, 1]


async def test_rows_of_a_version_that_no_process_holds_any_more_are_given_back_soon(world):
    await world.publish(0)
    await world.publish(1)
    rollout = await world.rollout("r0")
    receiver, worker = rollout.receiver, rollout.worker
    worker._settings = replace(worker._settings, load_s=60.0, lost_s=0.05)
    await until(lambda: rollout.instance.current == Version(0, 1), "θ1")
    pulling, keeping = asyncio.Event(), receiver._pull

    async def lost(version):
        assert version == Version(0, 0)
        pulling.set()
        await asyncio.sleep(60)

    receiver._pull = lost
    await world.put([0], step=1, oldest=0)
    await pulling.wait()
    assert len(worker._in_flight) == 4
    await world.sender.close()
    await until(lambda: not len(worker._in_flight), "the rows to be given back")
    receiver._pull = keeping
    await world.put([1], step=2, oldest=1)
    rows, columns = await world.made(4)
    assert steps(rows, columns) == {2: {1}}


async def test_quota_goes_back_for_rows_of_an_older_version(world):
    world.catalogue.require([0, 3])
    await world.publish(0)
    await world.publish(3)
    rollout = await world.rollout("r0")
    await world.put([0], step=5, oldest=3)
    await world.made(4)
    await world.put([1], step=1, oldest=0)
    rows, columns = await world.made(4)
    assert steps(rows, columns) == {1: {0}}
    await world.put([2], step=5, oldest=3)
    assert steps(*await world.made(4)) == {5: {3}}
    assert rollout.worker.loader.swaps == 3


async def test_sequence_takes_new_versions_as_they_come_and_mixes_none(world):
    await world.publish(0)
    rollout = await world.rollout("r0", swap_at="sequence", token_s=0.005)
    await world.put(range(30), step=1, oldest=0, newest=ANY)
    seen, order = [], []
    for step in (1, 2):
        seen += (await world.made(8))[0]
        await world.publish(step)
        await until(lambda step=step: rollout.worker.loader.swaps == step + 1, f"a swap to θ{step}")
    rest, _ = await world.made(120 - len(seen))
    rows = sorted([*seen, *rest], key=lambda row: row.meta.key)
    columns = await world.queue.fetch(rows, ["versions"], timeout=10)
    for i in range(120):
        versions = set(columns["versions"].row(i).tolist())
        assert len(versions) == 1
        order.append(Version.unpack(versions.pop()).step)
    assert set(order) == {0, 1, 2}


@pytest.mark.parametrize("swap_at", ["quota", "sequence"])
async def test_evaluation_is_pinned_and_greedy_where_asked(world, swap_at):
    rollouts = [await world.rollout(f"r{i}", swap_at=swap_at) for i in range(2)]
    newest = ANY if swap_at == "sequence" else None
    await world.publish(0)
    await world.put(range(8), step=1, oldest=0, newest=newest)
    await world.put(range(100, 120), step=0, oldest=0, group=2, purpose="eval", tags={"temperature": 0.0})
    await world.publish(1)
    world.catalogue.require([0, 1])
    await world.put(range(8, 16), step=2, oldest=1 if newest is None else 0, newest=newest)
    await world.put(range(200, 220), step=1, oldest=1, group=2, purpose="eval", tags={"max_tokens": 3})
    rows, columns = await world.made(80, purpose="eval")
    assert steps(rows, columns) == {0: {0}, 1: {1}}
    assert {row.meta.tags["tokens"] for row in rows if row.meta.step == 1} == {3}
    await world.made(64)
    tokens = [r.worker.status()["tokens_generated_eval"] for r in rollouts]
    assert sum(tokens) == sum(len(ids) for ids in columns["response_ids"])


async def test_a_stuck_reward_delays_only_its_own_sample(world):
    rollout = await world.rollout("r0", reward="rollout_reward:stuck_on_three", slots=4)
    await world.publish(0)
    await world.put(range(8), step=1, oldest=0, group=1)
    rows, _ = await world.made(7)
    assert 3 not in {row.meta.serial for row in rows}
    assert rollout.instance.running == 0
    late, _ = await world.made(1)
    assert (late[0].meta.tags["failure"], late[0].meta.tags["reward"]) == ("timeout", 0.0)


async def test_leaving_gives_back_what_is_not_generated(world):
    slow = await world.rollout("slow", token_s=60.0)
    await world.publish(0)
    await world.put(range(4), step=1, oldest=0)
    await until(lambda: slow.instance.running > 0, "sequences")
    assert (await world.queue.stats(timeout=10)).leased["train/rollout"] > 0
    await slow.leave()
    await slow.queue.close()
    assert (await world.queue.stats(timeout=10)).leased.get("train/rollout", 0) == 0
    assert slow.worker.status()["draining"]
    await world.rollout("fast")
    rows, _ = await world.made(16)
    assert {row.meta.key for row in rows} == {(s, j) for s in range(4) for j in range(4)}


async def at_work(world, *, newest=0, **options):
    """Return a rollout that generates eight sequences under θ_0."""
    rollout = await world.rollout("slow", **options)
    await world.publish(0)
    await world.put(range(2), step=1, oldest=0, newest=newest)
    await until(lambda: rollout.instance.running == 8, "sequences")
    return rollout


async def test_what_runs_when_an_instance_leaves_is_continued_by_the_next(world):
    slow = await at_work(world, token_s=0.5)
    await asyncio.sleep(0.6)
    await slow.leave()
    handed_on = slow.worker.status()["tokens_generated"]
    assert handed_on >= 8
    fast = await world.rollout("fast")
    _, columns = await world.made(8)
    total = sum(map(len, columns["response_ids"]))
    assert fast.worker.status()["tokens_generated"] == total - handed_on, "no token is made twice"
    assert not any(row.partial for row in world.controller.table.state.rows.values())


@pytest.mark.parametrize(
    ("mixes", "versions", "max_tokens", "continued"),
    [
        (False, [3, 3], 12, True),
        (False, [2, 3], 12, False),
        (False, [3, 3], 2, False),
        (True, [2, 2], 12, True),
        (True, [2, 4], 12, False),
        (True, [2, 3], 2, False),
    ],
)
def test_what_was_begun_is_continued_where_versions_and_length_allow(mixes, versions, max_tokens, continued):
    settings = RolloutSettings(temperature=1.0, max_tokens=max_tokens, stop_ids=(), seed=0, mixes=mixes)
    job = leased(purpose="train", there=RESPONSE)
    assert job.has_partial
    assert not leased(purpose="train", there=(*RESPONSE, "reward")).has_partial, "it was finished"
    job.partial = beginning(2, versions)
    assert job.request(settings, loaded=Version(0, 3), continues=True).prior_tokens == (2 if continued else 0)
    assert job.request(settings, loaded=Version(0, 3), continues=False).prior_tokens == 0
    judged = leased(purpose="eval", there=RESPONSE)
    judged.partial = job.partial
    same = set(versions) == {3} and max_tokens > 2
    assert judged.request(settings, loaded=Version(0, 3), continues=True).prior_tokens == (2 if same else 0)


def beginning(tokens, versions=()):
    packed = np.array([Version(0, step).packed for step in versions or (0,) * tokens])
    return Completion(ids=np.arange(tokens), logprobs=np.zeros(tokens, np.float32), versions=packed, finish="aborted")


def leased(*, purpose, there):
    meta = RowMeta(partition=purpose, serial=1, sample=0, step=1, purpose=purpose)
    sizes = dict.fromkeys(there, 8)
    row = LeasedRow(row=1, meta=meta, attempt=1, lease="1", until=1.0, unit=0, bytes=sizes)
    return Job(row=row, prompt_ids=(1,))


async def test_what_other_weights_began_is_made_again(world):
    slow = await at_work(world, newest=9, token_s=0.5, swap_at="sequence")
    await asyncio.sleep(0.6)
    await slow.leave()
    await world.publish(1)
    world.catalogue.leave("slow")
    fast = await world.rollout("fast", swap_at="sequence")
    rows, columns = await world.made(8)
    assert steps(rows, columns) == {1: {1}}, "no response mixes versions"
    assert fast.worker.status()["tokens_generated"] == sum(map(len, columns["response_ids"]))


async def test_what_cannot_be_handed_on_is_given_back_all_the_same(world, monkeypatch):
    slow = await world.rollout("slow", token_s=0.05)
    give_back = slow.queue.give_back

    async def without_room(rows, *, reason, columns=None, timeout):
        if columns:
            raise DeadlineExceeded("there is no room", where="here")
        return await give_back(rows, reason=reason, timeout=timeout)

    monkeypatch.setattr(slow.queue, "give_back", without_room)
    await world.publish(0)
    await world.put(range(2), step=1, oldest=0)
    await until(lambda: slow.instance.running == 8, "sequences")
    await asyncio.sleep(0.1)
    await slow.leave()
    assert (await world.queue.stats(timeout=10)).leased.get("train/rollout", 0) == 0
    await world.rollout("fast")
    assert len((await world.made(8))[0]) == 8


@pytest.mark.parametrize("swap_at", ["sequence", "token"])
async def test_staggered_one_changes_weights_while_the_other_goes_on(world, swap_at):
    """Both are at work when θ1 comes: one of them changes to it while the other begins more under θ0."""
    await world.publish(0)
    both = [await world.rollout(name, token_s=0.02, swap_at=swap_at, staggered=True) for name in ("r0", "r1")]
    await world.put(range(400), step=1, oldest=0, newest=9)
    await until(
        lambda: all(each.instance.running >= 8 and each.worker.status()["tokens_generated"] for each in both),
        "tokens of both",
    )
    grant, found = world.permits.grant, []

    def observed(*known, **when):
        if granted := grant(*known, **when):
            found.append((len(granted), sorted(rollout.instance.current.step for rollout in both)))
        return granted

    world.permits.grant = observed
    await world.publish(1)
    await until(lambda: all(rollout.instance.current == Version(0, 1) for rollout in both), "both swaps")
    assert found[0] == (1, [0, 0])
    later = [(1, [0, 1])], [(1, [1, 1])], []
    assert found[1:] in later, "whoever has nothing to do for a moment changes without a permit"
    rows, columns = await world.made(160)
    assert steps(rows, columns)[1] == {0, 1}


async def test_token_swaps_also_while_there_is_more_work_than_room(world):
    busy = await world.rollout("busy", token_s=0.02, swap_at="token")
    await world.publish(0)
    await world.put(range(40), step=1, oldest=0, newest=9)
    await until(lambda: busy.instance.running >= 8, "sequences")
    await world.publish(1)
    await until(lambda: busy.instance.current == Version(0, 1), "the swap")
    assert busy.worker.meter.delivered < 80
    await world.made(160)


async def test_token_goes_on_under_newer_weights_and_continues_what_others_began(world):
    first = await at_work(world, newest=9, token_s=0.5, swap_at="token")
    await asyncio.sleep(0.6)
    await world.publish(1)
    await until(lambda: first.instance.current == Version(0, 1), "the swap")
    assert first.instance.running == 8
    await asyncio.sleep(0.6)
    await first.leave()
    await world.publish(2)
    second = await world.rollout("second", swap_at="token")
    rows, columns = await world.made(8)
    assert steps(rows, columns) == {1: {0, 1, 2}}
    assert all((np.diff(versions) >= 0).all() for versions in columns["versions"]), "versions never go back"
    made = [rollout.worker.status()["tokens_generated"] for rollout in (first, second)]
    assert sum(made) == sum(map(len, columns["response_ids"]))
    assert min(made) > 0


async def test_rows_that_are_being_given_back_when_an_instance_leaves_are_given_back(world, monkeypatch):
    rollout, given_back, goes_on = await world.rollout("r0"), asyncio.Event(), asyncio.Event()
    give_back = rollout.queue.give_back

    async def no_prompts(*_args, **_options):
        raise DeadlineExceeded("a unit is unreachable", where="here")

    async def slowly(rows, **options):
        given_back.set()
        await goes_on.wait()
        return await give_back(rows, **options)

    monkeypatch.setattr(rollout.queue, "fetch", no_prompts)
    monkeypatch.setattr(rollout.queue, "give_back", slowly)
    await world.publish(0)
    await world.put([0], step=1, oldest=0)
    await given_back.wait()
    rollout.worker.drain()
    for _ in range(20):
        await asyncio.sleep(0)
    goes_on.set()
    await rollout.running
    assert (await world.queue.stats(timeout=10)).leased.get("train/rollout", 0) == 0


async def test_rows_taken_over_by_another_are_dropped_without_a_word(world):
    await at_work(world, token_s=60.0)
    await world.rollout("fast")
    await world.queue.expire(worker="slow", timeout=10)
    rows, _ = await world.made(8)
    assert len(rows) == 8


async def test_a_lost_lease_ends_its_sequences(tmp_path):
    async with running_world(tmp_path, lease_s=1.0) as world:
        slow = await world.rollout("slow", token_s=60.0)
        await world.publish(0)
        await world.put([0], step=1, oldest=0)
        await until(lambda: slow.instance.running == 4, "sequences")
        fast = await world.rollout("fast")
        await until(lambda: fast.receiver.held == [0], "weights")
        await world.queue.expire(worker="slow", timeout=10)
        await world.made(4)
        await until(lambda: slow.worker.status()["lost"] == 4, "lost leases")
        assert slow.instance.running == 0


async def test_what_was_saved_when_a_lease_is_lost_is_continued(tmp_path):
    async with running_world(tmp_path, lease_s=1.5) as world:
        slow = await at_work(world, token_s=0.5)
        slow.instance.drain()
        rows = world.controller.table.state.rows.values()
        await until(lambda: all(row.partial for row in rows), "what is saved")
        saved = sum(row.partial["response_ids"] // 4 for row in rows)
        assert saved >= 8
        fast = await world.rollout("fast")
        await world.queue.expire(worker="slow", timeout=10)
        _, columns = await world.made(8)
        assert fast.worker.status()["tokens_generated"] <= sum(map(len, columns["response_ids"])) - saved
        assert not any(row.partial for row in rows)


async def test_a_response_whose_reward_takes_long_is_saved_but_for_its_last_token(tmp_path):
    async with running_world(tmp_path, lease_s=1.5) as world:
        stuck = await world.rollout("stuck", reward="rollout_reward:stuck_on_three", reward_s=60.0)
        await world.publish(0)
        await world.put([3], step=1, oldest=0, group=1)
        (row,) = world.controller.table.state.rows.values()
        await until(lambda: row.partial, "what is saved")
        stuck.instance.drain()
        fast = await world.rollout("fast")
        await world.queue.expire(worker="stuck", timeout=10)
        _, columns = await world.made(1)
        assert len(columns["response_ids"][0]) > 1
        assert fast.worker.status()["tokens_generated"] == 1


async def test_a_unit_that_is_away_holds_up_only_what_is_saved_and_handed_on_there(tmp_path, monkeypatch):
    async with running_world(tmp_path, lease_s=1.5) as world:
        slow = await at_work(world, token_s=0.5)
        assert {job.row.unit for job in slow.worker._in_flight} == {0, 1}
        given_back = set()
        give_back = slow.queue.give_back

        async def recorded(rows, *, reason, columns=None, timeout):
            ok = await give_back(rows, reason=reason, columns=columns, timeout=timeout)
            given_back.update((row.unit, columns is not None) for row in rows)
            return ok

        monkeypatch.setattr(slow.queue, "give_back", recorded)
        del world.unit_addresses[1]
        await until(lambda: sum(job.saved_tokens > 0 for job in slow.worker._in_flight) == 4, "what is saved")
        assert {job.row.unit for job in slow.worker._in_flight if job.saved_tokens} == {0}
        made = slow.worker.status()["tokens_generated"]
        await until(lambda: slow.worker.status()["tokens_generated"] >= made + 8, "tokens that are not saved")
        await slow.leave()
        assert given_back == {(0, True), (1, False)}
        assert (await world.queue.stats(timeout=10)).leased.get("train/rollout", 0) == 0


async def test_generation_goes_on_where_nothing_can_be_saved(tmp_path, monkeypatch):
    async with running_world(tmp_path, lease_s=1.5) as world:
        rollout = await world.rollout("r0", token_s=0.15)
        tried = asyncio.Event()

        async def without_room(rows, columns, *, timeout):
            tried.set()
            raise DeadlineExceeded("a unit is unreachable", where="here")

        monkeypatch.setattr(rollout.queue, "save", without_room)
        await world.publish(0)
        await world.put(range(2), step=1, oldest=0)
        assert len((await world.made(8))[0]) == 8
        assert tried.is_set()
        assert rollout.worker.status()["tokens_generated"] == 8 * 12


def test_what_is_saved_has_been_under_way_since_the_look_before_and_has_grown():
    young, old, grown, taken_over = (leased(purpose="train", there=()) for _ in range(4))
    old.saved_tokens = grown.saved_tokens = taken_over.saved_tokens = 2
    made = {young: beginning(9), old: beginning(2), grown: beginning(3), taken_over: beginning(3)}
    assert worth_saving(made, before={old, grown}) == [grown, taken_over]
    assert worth_saving(made, before=set(made)) == [young, grown, taken_over]


async def test_the_controller_may_go_away_for_a_while(world):
    rollout = await world.rollout("r0", token_s=0.01)
    await world.publish(0)
    await world.put(range(4), step=1, oldest=0)
    await until(lambda: rollout.instance.running > 0, "sequences")
    await world.stop_controller()
    await world.start_controller()
    rows, _ = await world.made(16)
    assert len(rows) == 16
    await world.put(range(4, 8), step=1, oldest=0)
    assert len((await world.made(16))[0]) == 16
    assert not rollout.running.done()


async def test_a_unit_that_restarts_empty_costs_only_what_lay_there(world):
    rollout = await world.rollout("r0", token_s=0.02)
    await world.publish(0)
    await world.put(range(4), step=1, oldest=0)
    await until(lambda: rollout.instance.running > 0, "sequences")
    for index in (0, 1):
        await world.stop_unit(index)
        await world.start_unit(index)
    await until(lambda: rollout.worker.status()["inflight"] == 0, "nothing in flight")
    assert rollout.worker.status()["fenced"] > 0
    await world.put(range(4, 8), step=1, oldest=0)
    assert len((await world.made(16))[0]) == 16


async def test_weights_that_do_not_fit_end_the_worker(world, tiny):
    rollout = await world.rollout("r0", engine="transformers", model=tiny)
    await world.publish(0, {"stranger": np.zeros(3, np.float32)})
    with pytest.raises(ManifestError, match="stranger"):
        await rollout.running


@pytest.mark.parametrize("off", [1e-6, 0.5])
async def test_an_engine_that_has_other_weights_than_were_published_ends_the_worker(world, monkeypatch, off):
    ids = probe_ids(vocabulary=97, most=64)
    logprobs = np.linspace(-4, -1, len(ids) - 1, dtype=np.float32)
    asked, staged = [], []

    async def probe(_, ids):
        asked.append(list(ids))
        return logprobs + off

    async def stage(_, version, tensors):
        staged.append((version, set(tensors)))

    monkeypatch.setattr(SimulatedEngine, "probe", probe)
    monkeypatch.setattr(SimulatedEngine, "stage", stage)
    tensors = {"step": np.zeros(64, np.float32), **WeightProbe(ids, logprobs).tensors}
    rollout = await world.rollout("r0")
    await world.publish(0, tensors)
    if off > 1e-3:
        with pytest.raises(AsyncFlowError, match=r"differ by 0\.5 on average"):
            await rollout.running
        return
    await world.put(range(2), step=1, oldest=0)
    await world.made(8)
    await world.publish(1, tensors)
    await until(lambda: bool(staged) and len(asked) == 2, "the next version to be prepared, loaded and asked")
    assert asked == [ids.tolist()] * 2
    assert staged == [(Version(0, 1), {"step"})]


async def test_what_loaded_weights_made_is_delivered_once_they_are_proved_and_else_left_to_nobody(world, monkeypatch):
    logprobs, delivered = np.linspace(-4, -1, 4, dtype=np.float32), []

    async def probe(engine, _):
        if engine.version.step > 0:
            await until(lambda: engine.stats().running <= 4, "the end of some sequences")
            delivered.append(rollout.worker.meter.delivered)
        return logprobs + (engine.version.step == 2)

    monkeypatch.setattr(SimulatedEngine, "probe", probe)
    tensors = {"step": np.zeros(64, np.float32), **WeightProbe(np.arange(5, dtype=np.int32), logprobs).tensors}
    rollout = await world.rollout("r0", swap_at="token", token_s=0.02)
    engine = rollout.worker._engine
    await world.publish(0, tensors)
    for step in (1, 2):
        await world.put([2 * step, 2 * step + 1], step=step, oldest=0, newest=9)
        await until(lambda: [*map(bool, map(len, engine.unfinished().values()))] == [True] * 8, "a token of each")
        await world.publish(step, tensors)
        if step == 1:
            rows, columns = await world.made(8)
            assert steps(rows, columns) == {1: {0, 1}}
            assert rollout.worker.status()["tokens_generated"] == sum(map(len, columns["response_ids"]))
    with pytest.raises(AsyncFlowError, match="differ by 1 on average"):
        await rollout.running
    assert delivered == [0, 8]
    rows = (await world.queue.claim(partition="train", task="rollout", max_rows=8, version=1, timeout=5.0)).rows
    begun = [row for row in rows if "versions" in row.bytes]
    versions = (await world.queue.fetch(begun, ["versions"], timeout=5.0))["versions"]
    assert (len(rows), {int(each) for index in range(len(begun)) for each in versions.row(index)}) == (8, {1})


async def test_a_response_that_cannot_be_written_ends_the_worker(world, monkeypatch):
    rollout = await world.rollout("r0")
    rollout.worker._scoring = None  # as where the reward is a role of its own
    monkeypatch.setattr(SimulatedEngine, "generate", lambda *_: asyncio.sleep(0, replace(NOTHING, finish="stop")))
    await world.publish(0)
    await world.put([0], step=1, oldest=0)
    with pytest.raises(ValueError, match="zero-size"):
        async with asyncio.timeout(10):
            await rollout.running


async def test_an_engine_that_ends_while_nothing_runs_ends_the_worker(world, monkeypatch):
    async def ended(_):
        await asyncio.sleep(0.2)
        raise PeerLost("the server ended")

    monkeypatch.setattr(SimulatedEngine, "ended", ended)
    rollout = await world.rollout("r0")
    with pytest.raises(PeerLost, match="the server ended"):
        await rollout.running


async def test_with_the_real_engine_who_generates_changes_nothing(tmp_path, tiny):
    made = []
    for instances in (1, 2):
        async with running_world(tmp_path / str(instances)) as world:
            await world.publish(0, random_weights(tiny, seed=4))
            for index in range(instances):
                await world.rollout(f"r{index}", engine="transformers", model=tiny)
            await world.put(range(8), step=1, oldest=0)
            _, columns = await world.made(32)
            assert all(r.worker.meter.delivered for r in world.rollouts)
            made.append(columns)
    for name in ("response_ids", "logprobs", "versions"):
        for alone, shared in zip(made[0][name], made[1][name], strict=True):
            assert np.array_equal(alone, shared)
    assert len({tuple(ids.tolist()) for ids in made[0]["response_ids"]}) > 5


async def test_with_the_real_engine_what_a_lost_holder_saved_is_continued_to_the_same_bits(tmp_path, tiny):
    made = []
    for name in ("undisturbed", "lost"):
        async with running_world(tmp_path / name, lease_s=1.5) as world:
            await world.publish(0, random_weights(tiny, seed=4))
            first = await world.rollout("first", engine="transformers", model=tiny, max_tokens=48)
            if name == "lost":
                step = first.worker._engine._batch.step
                first.worker._engine._batch.step = lambda step=step: [time.sleep(0.1), step()][1]
            await world.put(range(2), step=1, oldest=0)
            if name == "lost":
                rows = world.controller.table.state.rows.values()
                await until(
                    lambda rows=rows: len(rows) == 8 and all("response_ids" in row.sizes for row in rows),
                    "what is saved",
                )
                assert any(row.partial for row in rows)
                saved = sum(row.sizes["response_ids"] // 4 for row in rows)
                first.instance.drain()
                second = await world.rollout("second", engine="transformers", model=tiny, max_tokens=48)
                await world.queue.expire(worker="first", timeout=10)
            rows, columns = await world.made(8)
            made.append(columns)
    assert second.worker.status()["tokens_generated"] <= sum(map(len, made[0]["response_ids"])) - saved
    for column in ("response_ids", "logprobs", "versions"):
        for undisturbed, continued in zip(made[0][column], made[1][column], strict=True):
            assert np.array_equal(undisturbed, continued)
