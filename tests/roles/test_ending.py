"""A role that is told to end while it waits for a driver that does not answer."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncflow.local.placement import PortReservation

pytestmark = pytest.mark.process

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"


@pytest.mark.parametrize("role", ["controller", "storage", "trainer", "rollout"])
def test_it_ends_at_once_as_it_has_nothing_to_hand_on(role: str, tmp_path: Path) -> None:
    with PortReservation(1) as (nobody,):
        options = {
            "job": COUNTING,
            "driver": f"tcp://127.0.0.1:{nobody}",
            "index": 0,
            "attempt": 0,
            "workdir": tmp_path,
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        argv = [sys.executable, "-m", "asyncflow", "role", role, *words]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout is not None
                assert "attempt 0, worker" in process.stdout.readline()
                time.sleep(1.0)  # until it waits for the driver; it would end sooner as well
                process.send_signal(signal.SIGTERM)
                said, _ = process.communicate(timeout=20)
            finally:
                process.kill()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
