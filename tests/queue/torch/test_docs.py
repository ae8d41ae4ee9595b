"""The examples of docs/guide/queue-torch.md run, in their order, against a queue."""

import faulthandler
import multiprocessing
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "queue-torch.md"
BLOCK = re.compile(r"^```python(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORLD = 4


def test_the_examples_run(served, tmp_path):
    here = {"ADDRESS": served.address, "__name__": "docs"}
    blocks = BLOCK.findall(PAGE.read_text())
    assert [title for title, _ in blocks] == ["", "", "", "train.py"]
    for title, text in blocks:
        if not title:
            exec(compile(text, str(PAGE), "exec"), here)
            continue
        (tmp_path / title).write_text(text)
        launch(tmp_path / title, served.address, str(tmp_path))
    stats = served.stats()
    assert (stats.committed, stats.staged) == (32, 0)
    weights = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    expected = torch.tensor([[-2.0 * serial / 16] for serial in range(16)], dtype=torch.float64)
    for each in weights:
        assert torch.equal(each["model"]["weight"], expected)
        assert each["data"] == {"partition": "corpus", "step": 2}


def launch(script, *arguments):
    """Start ``script`` as torchrun does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, store.port, script, arguments)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(90)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * WORLD


def _rank(rank, port, script, arguments):
    faulthandler.dump_traceback_later(80, exit=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    dist.destroy_process_group()
