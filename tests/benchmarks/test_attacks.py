"""The attacks of ``make attacks`` can be done, and tell harm from none; what they preload does what they ask it to."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "attacks"))
from flow import Flow
from jobs import Harmed
from shim import SOURCE, Shim, build

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]

LOOK = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
print(time.time())
for name in ("a", "ledger"):
    try:
        with (folder / name).open("wb", buffering=0) as file:
            file.write(b"some")
            os.fsync(file.fileno())
        print("written")
    except OSError as error:
        print(error.errno)
"""


def looked(shim: Shim, folder: Path) -> list[str]:
    words = [sys.executable, "-c", LOOK, str(folder)]
    return subprocess.run(words, env=shim.env, capture_output=True, text=True, check=True).stdout.split()


def test_the_clock_and_the_disk_of_a_process_do_what_the_shim_says(tmp_path: Path) -> None:
    shim = Shim(build(tmp_path), tmp_path)
    at, *did = looked(shim, tmp_path)
    assert (abs(float(at) - time.time()) < 60, did) == (True, ["written", "written"])
    assert f"F {(tmp_path / 'ledger').stat().st_ino} 4" in shim.synced.read_text().splitlines()
    shim.set_clock(86_400)
    shim.fail(errno.EIO, f"{tmp_path}/ledger")
    at, *did = looked(shim, tmp_path)
    assert (float(at) > time.time() + 80_000, did) == (True, ["written", str(errno.EIO)])
    shim.heal()
    assert looked(shim, tmp_path)[1:] == ["written", "written"]


def test_an_attack_is_done_and_judged(tmp_path: Path) -> None:
    words = [sys.executable, str(SOURCE.parent), "forked-clients", "--seeds", "1", "1", "--keep", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows of 4 clients, one controller killed: survived" in done.stdout
    assert "| forked-clients | 1 | 1 |" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("completed", "harm"),
    [(range(1, 200), "1 are lost, 0 came twice"), ([*range(200), 7], "0 are lost, 1 came twice"), (range(200), "")],
)
def test_rows_that_are_lost_or_come_twice_are_harm(completed: list[int], harm: str) -> None:
    flow = Flow(lambda: pytest.fail("nobody asks"))
    flow.put, flow.completed = set(range(200)), Counter(completed)
    if not harm:
        flow._judge()
        return
    with pytest.raises(Harmed, match=harm):
        flow._judge()
