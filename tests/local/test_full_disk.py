"""A run whose folder lies on a disk of its own, which fills up or becomes read-only."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncflow.local.record import Placed, load_record

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Run

pytestmark = pytest.mark.process

OWN_MOUNTS = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
ENTER = ["nsenter", "--mount"] if os.geteuid() == 0 else ["nsenter", "--user", "--preserve-credentials", "--mount"]


class DiskRun(Run):
    """A run in a mount namespace of its own, with a disk of 32 MiB for its folder."""

    def __init__(self, cwd, roles, *, disk_s=300.0):
        (cwd / "out").mkdir()
        mount = f'mount -t tmpfs -o size=32m none {cwd}/out && exec "$@"'
        super().__init__(
            cwd, roles, end_s=8.0, active_s="", within=[*OWN_MOUNTS, "sh", "-c", mount, "sh"], disk_s=disk_s
        )

    @property
    def disk(self):
        return Path(f"/proc/{self.process.pid}/root{self.folder}")

    def fill(self):
        with (self.disk / "ballast").open("wb", buffering=0) as ballast:
            size = 1 << 20
            while size:
                try:
                    ballast.write(bytes(size))
                except OSError:
                    size //= 2

    def free(self):
        (self.disk / "ballast").unlink()

    def only_read(self):
        """Refuse whatever is opened for writing from now on; a mount with writers cannot be made so itself."""
        out = str(self.folder)
        for words in (["--bind", out, out], ["-o", "remount,bind,ro", out]):
            subprocess.run([*ENTER, "--target", str(self.process.pid), "mount", *words], check=True, timeout=20)

    def on_disk(self, role, index) -> Placed:
        record = load_record(self.disk)
        assert record is not None
        return next(each for each in record.processes if (each.role, each.index) == (role, index))


@pytest.fixture
def start(tmp_path) -> Iterator:
    if subprocess.run([*OWN_MOUNTS, "true"], check=False, capture_output=True, timeout=20).returncode:
        pytest.skip("no mount namespace can be made here")
    runs: list[DiskRun] = []

    def begin(*, disk_s=300.0, **roles):
        runs.append(DiskRun(tmp_path, roles, disk_s=disk_s))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


def test_what_dies_while_the_disk_is_full_starts_again_when_there_is_room(start):
    run = start(driver={}, rollout={"replicas": 2}, trainer={"replicas": 2, "gang": True})
    replicas = ["driver-0", "rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    first = {replica: run.pids(replica)[0] for replica in replicas}
    run.fill()
    for replica in ("rollout-0", "trainer-1"):
        os.kill(first[replica], signal.SIGKILL)
    run.wait_until(lambda: not any(map(run.alive, (first["rollout-0"], first["trainer-0"]))), "their ends")
    time.sleep(0.3)
    assert not (run.cwd / "rollout-0.1.json").exists(), "an attempt is on record before it starts"
    run.free()
    second = {replica: run.pids(replica, 1)[0] for replica in ("rollout-0", "trainer-0", "trainer-1")}
    assert run.alive(first["rollout-1"])
    for replica, pid in second.items():
        role, index = replica.split("-")
        run.wait_until(lambda r=role, i=int(index), p=pid: run.on_disk(r, i).pid == p, f"the record of {replica}")
        assert run.on_disk(role, int(index)).attempt == 1
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def test_a_disk_that_can_only_be_read_any_more_ends_the_run_in_order_with_a_sentence(start):
    run = start(driver={}, storage={}, rollout={"replicas": 2})
    pids = [run.pids(replica)[0] for replica in ("driver-0", "storage-0", "rollout-0", "rollout-1")]
    run.only_read()
    os.kill(pids[2], signal.SIGKILL)
    assert run.wait() == 1
    assert run.ended() == ["rollout-1", "driver-0", "storage-0"]
    last = run.said().splitlines()[-1]
    assert last.endswith(
        "out: the run's folder can no longer be written: Read-only file system. "
        "Make it writable, or free some space, and continue with --resume"
    )
    run.wait_until(lambda: not any(map(run.alive, pids)), "the processes to be gone")


def test_a_disk_that_stays_full_ends_the_run_in_the_end(start):
    run = start(driver={}, rollout={}, disk_s=0.5)
    pids = [run.pids(replica)[0] for replica in ("driver-0", "rollout-0")]
    run.fill()
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait() == 1
    assert "the run's folder can no longer be written: No space left on device" in run.said()
    assert run.ended() == ["driver-0"]
