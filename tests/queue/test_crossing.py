"""A claim that finds rows crosses few files of the runtime, from the user's call to the ledger and back.

Whoever follows it has to open each of them.
"""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import asyncflow
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

sys.path.insert(0, str(Path(__file__).parent / "client"))

from blocking_world import Cluster

ROOT = Path(asyncflow.__file__).parent
MOST = 20


class Crossed:
    """The files in which a frame ran while this was open, in threads that were started under it."""

    def __init__(self):
        self.files = set()
        self.open = False

    def __call__(self, frame, _event, _what):
        if self.open:
            self.files.add(frame.f_code.co_filename)

    @property
    def own_files(self):
        return sorted(str(Path(file).relative_to(ROOT)) for file in self.files if file.startswith(f"{ROOT}/"))


@pytest.fixture
def crossed():
    crossed = Crossed()
    threading.setprofile(crossed)
    yield crossed
    threading.setprofile(None)


def test_a_claim_crosses_few_files(crossed, tmp_path):
    queue = Cluster(tmp_path)
    try:
        queue.start_unit(0)
        client = queue.connect()
        client.declare([TaskSpec(partition="scores", name="grade", needs=["text"], writes=["score"])], timeout=10)
        client.put("scores", {"text": Jagged.from_rows([np.arange(4)] * 32, "int64")}, timeout=10)
        assert client.claim(partition="scores", task="grade", max_rows=4, timeout=10).rows
        queue.run(queue.units.pop(0).close())
        time.sleep(0.2)
        sys.setprofile(crossed)
        crossed.open = True
        claimed = client.claim(partition="scores", task="grade", max_rows=4, timeout=10)
        crossed.open = False
        sys.setprofile(None)
        assert len(claimed.rows) == 4
    finally:
        queue.close()
    files = crossed.own_files
    assert {"queue/blocking.py", "queue/ledger/log.py"} <= set(files)
    assert len(files) <= MOST, "a claim crosses {} files:\n{}".format(len(files), "\n".join(files))
