"""Holders, receivers and the driver die, stop and come back: real processes, real signals."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest
from weights_world import Relay, RelayedTransport, bulk, receiver_that_prefers, until

from asyncflow.errors import DeadlineExceeded
from asyncflow.identity import Version
from asyncflow.local.placement import PortReservation
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.manifest import digest_of

SOON = 40.0


@pytest.mark.process
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_transfer_goes_on_with_another_holder_when_its_own_fails_in_the_middle(world, spawn, fault):
    version = Version(0, 1)
    victim = await spawn("sender", world.address, "victim", 2 << 20)
    victim.tell(0, 1)
    await victim.says("published")
    peer = await world.sender("peer")
    await peer.publish(version, bulk(1), timeout=SOON)
    name = receiver_that_prefers("victim", ["peer"], version)
    receiver = await world.receiver(name, transport=HostTransport(name=name, patience_s=4.0))
    await until(lambda: receiver.progress is not None and receiver.progress[1] > 1 << 19, "the middle")
    victim.process.send_signal(fault)
    await receiver.ensure(1, timeout=SOON)
    record = receiver.transfers[0]
    assert record.faults >= 1
    assert record.holders["victim"] > 1 << 19
    assert sum(record.holders.values()) == record.nbytes
    taken = receiver.take(1)[1]
    assert all(np.array_equal(taken[name].view(np.uint8), array.view(np.uint8)) for name, array in bulk(1).items())


@pytest.mark.process
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_those_that_pull_from_a_receiver_that_fails_on_its_way_go_on_elsewhere(world, spawn, fault):
    version, weights = Version(0, 1), bulk(1, 8)
    sender = await world.sender(transport=HostTransport(name="trainer", bandwidth=6 << 20))
    victim = await spawn("receiver", world.address, "victim")
    await victim.says("ready")
    others = [
        await world.receiver(
            f"r{index}", want=lambda _: None, transport=HostTransport(name=f"r{index}", patience_s=4.0)
        )
        for index in range(5)
    ]
    await sender.publish(version, {f"layer.{at}": weights["big"][at * 1024 :][:1024] for at in range(8)}, timeout=SOON)
    placed = world.service.catalogue._spread._receivers
    await until(lambda: "victim" in placed, "the victim has begun")
    arriving = [asyncio.create_task(receiver.ensure(1, timeout=SOON)) for receiver in others]

    def fed() -> list[str]:
        return [name for name, known in placed.items() if known.parent == "victim"]

    def begun() -> bool:
        return len(fed()) == 2 and all(
            receiver.progress is not None and receiver.progress[1] > 1 << 20
            for receiver in others
            if receiver._holder.worker in fed()
        )

    await until(begun, "two receivers have something of the victim")
    victim.process.send_signal(fault)
    await asyncio.gather(*arriving)
    for receiver in others:
        taken = receiver.take(1)[1]
        assert all(
            np.array_equal(taken[f"layer.{at}"].view(np.uint32), weights["big"][at * 1024 :][:1024].view(np.uint32))
            for at in range(8)
        )
    moved = [receiver.transfers[0] for receiver in others if "victim" in receiver.transfers[0].holders]
    assert len(moved) == 2
    assert all(len(transfer.holders) >= 2 for transfer in moved)


@pytest.mark.process
async def test_a_stopped_receiver_holds_up_nobody_and_catches_up(world, spawn):
    sender = await world.sender(transport=HostTransport(name="trainer"))
    stopped, going = [await spawn("receiver", world.address, name) for name in ("stopped", "going")]
    await sender.publish(Version(0, 0), bulk(0), timeout=SOON)
    for worker in (stopped, going):
        await worker.says("took 0")
    world.service.require([])
    stopped.process.send_signal(signal.SIGSTOP)
    for step in range(1, 4):
        await sender.publish(Version(0, step), bulk(step), timeout=SOON)
        assert (await going.says(f"took {step}")).split()[2] == digest_of(bulk(step)["big"])
    await until(lambda: [version.step for version in sender.versions] == [2, 3], "old versions are dropped")
    stopped.process.send_signal(signal.SIGCONT)
    assert (await stopped.says("took 3")).split()[2] == digest_of(bulk(3)["big"])


@pytest.mark.process
async def test_a_killed_trainer_leaves_its_versions_alive_at_the_rollouts(world, spawn):
    trainer = await spawn("sender", world.address, "trainer")
    early = await world.receiver("early")
    for step in (0, 1):
        trainer.tell(0, step)
        await early.ensure(step, timeout=SOON)
    trainer.process.kill()
    await trainer.process.wait()
    world.service.leave("trainer")
    late = await world.receiver("late")
    for step in (0, 1):
        await late.ensure(step, timeout=SOON)
        assert np.array_equal(late.take(step)[1]["small"], bulk(step)["small"])
    successor = await world.sender("successor")
    await successor.publish(Version(1, 1), bulk(1), timeout=SOON)
    await late.wait_for(lambda: late.staged == Version(1, 1), what="θ1@1", timeout=SOON)


@pytest.mark.process
async def test_a_killed_driver_that_comes_back_learns_everything_again(world, spawn):
    with PortReservation(1) as (port,):
        world.address = f"tcp://127.0.0.1:{port}"
    driver = await spawn("driver", world.address, "driver")
    await driver.says("ready")
    sender, receiver = await world.sender(), await world.receiver("early")
    await sender.publish(Version(0, 1), bulk(1), timeout=SOON)
    await receiver.ensure(1, timeout=SOON)
    driver.process.kill()
    await driver.process.wait()
    publishing = asyncio.create_task(sender.publish(Version(0, 2), bulk(2), timeout=SOON))
    driver = await spawn("driver", world.address, "driver")
    await driver.says("ready")
    assert await publishing
    await receiver.wait_for(lambda: receiver.staged == Version(0, 2), what="θ2", timeout=SOON)
    await sender.close()
    late = await world.receiver("late")
    for step in (1, 2):
        await late.ensure(step, timeout=SOON)
    assert {worker for record in late.transfers for worker in record.holders} <= {"early", "trainer"}


async def test_a_newer_version_replaces_an_unfinished_one_that_is_not_required(world):
    relay = Relay(limit=1 << 20)
    sender = await world.sender(transport=RelayedTransport(relay=relay, name="trainer"))
    await sender.publish(Version(0, 0), bulk(0), timeout=SOON)
    receiver = await world.receiver()
    await until(lambda: receiver.progress is not None and receiver.progress[1] > 0, "θ0 has begun")
    await sender.publish(Version(0, 1), bulk(1), timeout=SOON)
    await until(lambda: receiver.progress is not None and receiver.progress[0] == Version(0, 1), "θ1 has begun")
    relay.resume()
    await receiver.ensure(1, timeout=SOON)
    assert [record.version.step for record in receiver.transfers] == [1]


async def test_an_unfinished_version_that_a_step_requires_comes_first(world):
    relay = Relay(limit=1 << 20)
    sender = await world.sender(transport=RelayedTransport(relay=relay, name="trainer"))
    world.service.require([0])
    await sender.publish(Version(0, 0), bulk(0), timeout=SOON)
    receiver = await world.receiver()
    await until(lambda: receiver.progress is not None and receiver.progress[1] > 0, "θ0 has begun")
    await sender.publish(Version(0, 1), bulk(1), timeout=SOON)
    await receiver.wait_for(lambda: receiver.available() == [0, 1], what="the news", timeout=SOON)
    first, second = Version(0, 0).packed, Version(0, 1).packed
    _, there, nbytes = receiver.progress
    assert 0 < there <= 1 << 20 < nbytes == sum(array.nbytes for array in bulk(0).values())
    told = {"newest": second, "version": -1, "staged": -1, "receiving": first, "received": there / nbytes}
    assert receiver.status() == told
    relay.resume()
    await receiver.wait_for(lambda: receiver.held == [0, 1], what="both", timeout=SOON)
    assert [record.version.step for record in receiver.transfers] == [0, 1]
    told |= {"staged": second, "receiving": -1, "received": 0.0}
    last = receiver.transfers[-1]
    assert receiver.status() == told | {"transfer_s": last.finished - last.started, "wire_bytes": last.sent}
    assert 0 < last.finished - last.started < SOON


async def test_a_version_that_nobody_waits_for_any_more_comes_to_its_end_but_not_after_the_receiver(world):
    relay, records = Relay(limit=1 << 20), []
    sender = await world.sender(transport=RelayedTransport(relay=relay, name="trainer"))
    await sender.publish(Version(0, 0), bulk(0), timeout=SOON)
    closed = await world.receiver()
    await until(lambda: closed.progress is not None and closed.progress[1] > 0, "θ0 has begun")
    await closed.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("pull")]
    receiver = await world.receiver(want=lambda view: None, on_transfer=records.append)
    with pytest.raises(DeadlineExceeded, match="weights of step 0"):
        await receiver.ensure(0, timeout=0.1)
    receiver.notify()
    relay.resume()
    await receiver.wait_for(lambda: receiver.held == [0], what="θ0", timeout=SOON)
    assert records == list(receiver.transfers)
    assert len(records) == 1


async def test_a_slow_link_is_not_taken_for_a_dead_peer(world):
    relay = Relay(bytes_per_s=1 << 20)
    sender = await world.sender(transport=RelayedTransport(relay=relay, name="trainer"))
    await sender.publish(Version(0, 0), bulk(0, mebibytes=2), timeout=SOON)
    receiver = await world.receiver()
    await receiver.ensure(0, timeout=SOON)
    assert receiver.transfers[0].faults == 0
