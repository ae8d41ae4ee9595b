"""Measure the bytes on the wire of MindSpeed RL's dispatch of one batch, by the kernel's counters.

Its paper gives the volume for G prompts with N responses each, n columns of response length SL, prompts of length PL
and M scalars, in cells of B bytes: G N B (2 PL + 3 n SL + 8 M). Prompts are written and read once, each column is
written once and read twice, and the last term is the metadata for all participants. Here, in a network namespace of
its own, a client puts the prompts, five stages each read columns of earlier stages and add a column, and an update
reads all columns. The result is the number of bytes acknowledged on all TCP connections, without headers and
retransmissions. All bytes that are not cells count as metadata.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from report import SECURED
from samples import emit
from servers import Handle, servers

from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

sys.path.append(str(Path(__file__).parents[1]))
from capped_links import Network, capped_links, missing

G, N, COLUMNS, SCALARS, CELL = 256, 8, 5, 3, 4
PROMPT, RESPONSE = 2048, 8192
BATCH = 256
READS = {"c1": ["prompt"], "c2": ["c1"], "c3": ["c1"], "c4": ["c2"], "c5": ["c3", "c4"]}
"""The columns that each stage reads to compute its column; the update then reads all five columns."""
CALL_S = 120.0


def cells(rows: int, length: int) -> Jagged:
    values = np.random.default_rng(length).integers(0, 1 << 31, rows * length).astype(np.int32)
    return Jagged(values, np.arange(rows + 1) * length)


def flow(queue: BlockingQueue, partition: str) -> None:
    """Move one batch through all stages of the algorithm."""
    tasks = {**READS, "update": list(READS)}
    queue.declare(
        [TaskSpec(partition=partition, name=name, needs=needs, lease_s=30.0) for name, needs in tasks.items()],
        timeout=CALL_S,
    )
    scalars = {f"m{i}": cells(BATCH, 1) for i in range(SCALARS)}
    for _ in range(G * N // BATCH):
        queue.put(partition, {"prompt": cells(BATCH, PROMPT), **scalars}, timeout=CALL_S)
    for task, needs in tasks.items():
        for _ in range(G * N // BATCH):
            rows = queue.claim(partition=partition, task=task, max_rows=BATCH, min_rows=BATCH, timeout=CALL_S).rows
            queue.fetch(rows, needs, timeout=CALL_S)
            if task == "update":
                queue.complete(rows, {}, timeout=CALL_S)
            else:
                queue.complete(rows, {task: cells(BATCH, RESPONSE)}, timeout=CALL_S)


def counted() -> int:
    """Return the number of bytes acknowledged on the connections of this namespace."""
    program = shutil.which("ss", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ss"
    printed = subprocess.run([program, "-tinH"], check=True, capture_output=True, text=True, timeout=20).stdout
    return sum(map(int, re.findall(r"bytes_acked:(\d+)", printed)))


def measure(handle: Handle) -> dict[str, float]:
    with handle.connect() as queue:
        before = counted()
        flow(queue, "volume")
        moved = counted() - before
    payload = G * N * CELL * (2 * PROMPT + 3 * COLUMNS * RESPONSE)
    term = G * N * CELL * 8 * SCALARS
    return {
        "moved_bytes": moved,
        "tcv_bytes": payload + term,
        "to_tcv": round(moved / (payload + term), 5),
        "metadata_bytes": moved - payload,
        "metadata_to_term": round((moved - payload) / term, 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("implementation")
    options.add_argument("--address", default="")
    options.add_argument("--certificate", default="")
    chosen = options.parse_args()
    if chosen.address:
        handle = Handle(address=chosen.address, certificate=chosen.certificate)
        emit({"case": "volume", "implementation": chosen.implementation, **measure(handle)})
        return
    if lacks := missing():
        sys.exit(f"a network namespace needs {', '.join(lacks)}")
    with capped_links(guests=0, bits_per_s=1e9) as network:
        within = lambda _name, argv: Network.within(network.core, argv)  # noqa: E731
        with servers(secured=chosen.implementation == SECURED, within=within) as made:
            argv = [sys.executable, __file__, chosen.implementation, *made.handle.words]
            subprocess.run(Network.within(network.core, argv), check=True, timeout=600, env=dict(os.environ))


if __name__ == "__main__":
    main()
