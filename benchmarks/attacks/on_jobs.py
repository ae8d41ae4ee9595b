"""Attacks on whole jobs. Each gets a job and a shim, disturbs the job at random, and raises Harmed if it did harm."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from pathlib import Path

from jobs import ROLES, STEPS, Harmed, Job, reason_of
from power import cut
from shim import Shim

_NUMBER = re.compile(rb"(?<=[:,])\s*[0-9][0-9.]*")
READ_BY_PEOPLE = ("metrics.jsonl", "events.jsonl", "lives.json", "rewards.json", "run/processes.json")


def damaged_files(job: Job, _shim: Shim) -> None:
    """Damage files for users, and the supervisor's record, between two starts."""
    job.start()
    job.wait_for_step(3, 12)
    if job.dice.random() < 0.5:
        job.kill_tree()
    else:
        job.interrupt()
    for name in job.dice.sample(READ_BY_PEOPLE, job.dice.randint(1, len(READ_BY_PEOPLE))):
        job.done.append(f"{_damage(job, job.folder / name)} {name}")
    job.start(resume=True)
    job.succeed()


def _damage(job: Job, file: Path) -> str:
    data = bytearray(file.read_bytes())
    dice = job.dice
    at = dice.randrange(len(data) + 1)
    match dice.choice(["flip", "cut", "garbage", "zeros", "nothing", "line", "number"]):
        case "flip" if data:
            data[min(at, len(data) - 1)] ^= 1 << dice.randrange(8)
            did = "flipped a bit of"
        case "cut":
            del data[at:]
            did = "cut"
        case "garbage":
            data[at:at] = dice.randbytes(dice.randint(1, 99))
            did = "put garbage into"
        case "zeros":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
            did = "zeroed a part of"
        case "line":
            data[at:at] = dice.choice([b"\n", b"{}\n", b'\n{"step":1}\n', b"\nnull\n", b'\n{"event":"evaluation"}\n'])
            did = "put a line into"
        case "number" if numbers := list(_NUMBER.finditer(bytes(data))):
            place, number = dice.choice(numbers), dice.choice([b"45", b"-3", b"NaN", b"1e18", b"9007199254740993"])
            data[place.start() : place.end()] = number
            did = f"put {number.decode()} for {place.group().decode()} into"
        case _:
            data.clear()
            did = "emptied"
    file.write_bytes(data)
    return did


def set_clock(job: Job, shim: Shim) -> None:
    """Set the system clock back and forth, and restart roles meanwhile."""
    job.start()
    ahead = 0
    for step in (2, 6, 10):
        job.wait_until(lambda step=step: job.steps_done() >= step, f"step {step}")
        ahead += job.dice.choice([-86_400 * 365, -3600, -60, -5, -1, 5, 3600, 86_400 * 30])
        shim.set_clock(ahead)
        job.done.append(f"clock {ahead:+d} s")
        if job.dice.random() < 0.5:
            job.kill(job.dice.choice(ROLES))
    job.succeed()


def power_cut(job: Job, shim: Shim) -> None:
    """Cut the power, with the default ``ledger.sync``, after a checkpoint or before the first one."""
    job.start()
    if job.dice.random() < 0.8:
        job.wait_until(lambda: bool(job.checkpoints()), "a checkpoint")
    job.wait_for_step(1, 13)
    job.kill_tree()
    image = job.folder.with_name("image")
    cut(job.folder, shim.synced, image)
    job.folder.rename(job.folder.with_name("before"))
    image.rename(job.folder)
    checkpoints = job.checkpoints()
    job.done.append(f"power cut with checkpoints {checkpoints}")
    job.start(resume=True)
    job.succeed()
    log = (job.folder / "logs" / "trainer-0.log").read_text()
    if checkpoints and f"starts at step {checkpoints[-1]}" not in log:
        raise Harmed(f"training did not resume at the checkpoint of step {checkpoints[-1]}")


def failing_checkpoint(job: Job, shim: Shim) -> None:
    """Make the disk of the checkpoints fail repeatedly while they are written."""
    job.start("storage.checkpoints.every=1")
    for _ in range(4):
        job.wait_for_step(1, 3)
        number = job.dice.choice([errno.EIO, errno.ENOSPC])
        job.done.append(shim.fail_for(job.dice.uniform(0.05, 0.5), number, "/run/checkpoints/"))
    job.succeed()


def full_disk(job: Job, shim: Shim) -> None:
    """Make the disk full, or return errors, for 0.3 to 0.5 s, and kill a role meanwhile."""
    job.start()
    for step in (2, 5, 8):
        job.wait_until(lambda step=step: job.steps_done() >= step, f"step {step}")
        number = job.dice.choice([errno.EIO, errno.ENOSPC])
        shim.fail(number, str(job.folder))
        time.sleep(job.dice.uniform(0.0, 0.2))
        job.kill(job.dice.choice(ROLES))
        time.sleep(0.3)
        shim.heal()
        job.done.append(f"{errno.errorcode[number]} for 0.3 s")
    job.succeed()


def only_read(job: Job, shim: Shim) -> None:
    """Make the file system read-only. The run must end with one sentence as the reason, and can be resumed."""
    job.start()
    job.wait_for_step(2, 12)
    shim.fail(errno.EROFS, str(job.folder))
    began = time.monotonic()
    status = job.wait()
    reason = reason_of(job.said)
    if status != 1 or not reason:
        raise Harmed(f"the run ended with status {status} and no sentence: {job.said[-3:]}")
    job.done.append(f"ended after {time.monotonic() - began:.1f} s: {reason.partition('error: ')[2][-120:]}")
    shim.heal()
    job.start(resume=True)
    job.succeed()


def killed_tree(job: Job, _shim: Shim) -> None:
    """Kill the whole process tree repeatedly."""
    job.start()
    for life in range(3):
        job.wait_until(lambda life=life: job.steps_done() >= 3 * life + 1, f"step {3 * life + 1}")
        time.sleep(job.dice.uniform(0.0, 1.5))
        if job.process is None or job.process.poll() is not None:
            break
        job.kill_tree()
        job.done.append(f"killed the tree after step {job.steps_done()}")
        job.start(resume=True)
    job.succeed()


def suspended_tree(job: Job, _shim: Shim) -> None:
    """Stop the whole process tree for longer than a lease, and resume it."""
    job.start("rollout.leaseSeconds=2")
    job.wait_for_step(2, 10)
    assert job.process is not None
    tree = [job.process.pid, *(pid for role in ROLES for pid in job.pids(role))]
    job.dice.shuffle(tree)
    seconds = job.dice.uniform(3.0, 12.0)
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    job.dice.shuffle(tree)
    for pid in tree:
        os.kill(pid, signal.SIGCONT)
    job.done.append(f"stopped {len(tree)} processes for {seconds:.1f} s")
    job.succeed()


def fewer_units(job: Job, _shim: Shim) -> None:
    """Resume a job with another number of storage units. It must make its next step within seconds."""
    job.start("transferQueue.storageUnits=3")
    job.wait_for_step(2, STEPS - 4)
    job.kill_tree()
    units = job.dice.choice([1, 2, 4])
    before = job.steps_done()
    job.start(f"transferQueue.storageUnits={units}", resume=True)
    job.wait_until(lambda: any("phase running" in line for line in job.said), "the phase running")
    began = time.monotonic()
    job.wait_until(lambda: job.steps_done() > before, "the next step")
    job.done.append(f"3 units, then {units}: the next step after {time.monotonic() - began:.1f} s")
    if time.monotonic() - began > 20:
        raise Harmed("the job made no step for more than 20 s")
    job.succeed()


ATTACKS = {
    "damaged-files": damaged_files,
    "set-clock": set_clock,
    "power-cut": power_cut,
    "failing-checkpoint": failing_checkpoint,
    "full-disk": full_disk,
    "only-read": only_read,
    "killed-tree": killed_tree,
    "suspended-tree": suspended_tree,
    "fewer-units": fewer_units,
}
