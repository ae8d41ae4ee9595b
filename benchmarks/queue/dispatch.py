"""MindSpeed RL's dispatch of a batch over links of limited speed, with one storage unit and with four (its eq. 4).

384 prompts with 16 responses each are 2.91 GiB to move (``volume``), which takes 9.92 s at 300 MiB/s: Table 1 of the
paper. This benchmark moves real bytes of 1/32 of the prompts over links with 1/32 of the speed, between namespaces;
each unit has its own link. The formula adds the bytes of writes and reads. A stage therefore first reads all of its
batches and then writes them, so that a link never carries data in both directions at the same time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import SECURED
from samples import emit
from servers import Handle, servers
from volume import CELL, COLUMNS, PROMPT, READS, RESPONSE, SCALARS, cells

from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import LeasedRow, TaskSpec

sys.path.append(str(Path(__file__).parents[1]))
from capped_links import CORE_ADDRESS, Network, capped_links, missing

SCALE = 32
G, N = 384 // SCALE, 16
BATCH = 6
LINK = 300 * 2**20 / SCALE
"""The speed of a link in bytes per second."""
HEADERS = 1.012
"""Bytes on the link per byte of payload, with packets of 9,000 bytes; TLS adds 22 bytes per 16 KiB."""
THREADS = 16
CALL_S = 120.0


def volume() -> int:
    """Return the total communication volume (TCV), in bytes (the paper's §3.1: G N B (2 PL + 3 n SL + 8 M))."""
    return G * N * CELL * (2 * PROMPT + 3 * COLUMNS * RESPONSE + 8 * SCALARS)


def dispatch(queue: BlockingQueue, partition: str) -> float:
    """Move one batch through all stages of the algorithm; return the seconds."""
    tasks = {**READS, "update": list(READS)}
    queue.declare(
        [TaskSpec(partition=partition, name=name, needs=needs, lease_s=60.0) for name, needs in tasks.items()],
        timeout=CALL_S,
    )
    prompts = {"prompt": cells(BATCH, PROMPT), **{f"m{i}": cells(BATCH, 1) for i in range(SCALARS)}}
    response = cells(BATCH, RESPONSE)

    def put(_number: int) -> None:
        queue.put(partition, prompts, timeout=CALL_S)

    def read(task: str) -> Sequence[LeasedRow]:
        rows = queue.claim(partition=partition, task=task, max_rows=BATCH, min_rows=BATCH, timeout=CALL_S).rows
        queue.fetch(rows, tasks[task], timeout=CALL_S)
        return rows

    def write(task: str, rows: Sequence[LeasedRow]) -> None:
        queue.complete(rows, {} if task == "update" else {task: response}, timeout=CALL_S)

    batches = range(G * N // BATCH)
    with ThreadPoolExecutor(THREADS) as pool:
        began = time.perf_counter()
        _all(pool.map(put, batches))
        for task in tasks:
            claimed = list(pool.map(lambda _number, task=task: read(task), batches))  # type: ignore[misc]
            _all(pool.map(lambda rows, task=task: write(task, rows), claimed))  # type: ignore[misc]
        return time.perf_counter() - began


def _all(results: Iterable[None]) -> None:
    for _ in results:
        pass


def measure(handle: Handle) -> float:
    """Dispatch twice and return the second time, because a hypervisor may be slow to provide memory on first use."""
    with handle.connect() as queue:
        for partition in ("warm", "dispatch"):
            seconds = dispatch(queue, partition)
            queue.clear_partition(partition=partition, timeout=CALL_S)
        return seconds


def run(units: int, implementation: str) -> None:
    """Create the network, start the servers in it, and run the client in it."""
    with capped_links(guests=units, bits_per_s=8 * HEADERS * LINK, both_ways=True, mtu=9000) as network:

        def host(name: str) -> str:
            return network.address(int(name.removeprefix("unit"))) if name.startswith("unit") else CORE_ADDRESS

        def within(name: str, argv: Sequence[str]) -> list[str]:
            namespace = network.guests[int(name.removeprefix("unit"))] if name.startswith("unit") else network.core
            return Network.within(namespace, argv)

        secured = implementation == SECURED
        with servers(units=units, secured=secured, bytes_per_unit="1Gi", hosts=host, within=within) as made:
            argv = [sys.executable, __file__, implementation, "--units", str(units), *made.handle.words]
            subprocess.run(Network.within(network.core, argv), check=True, timeout=600, env=dict(os.environ))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--units", nargs="+", type=int, default=[1, 4])
    options.add_argument("implementation", nargs="?", default=SECURED)
    options.add_argument("--address", default="")
    options.add_argument("--certificate", default="")
    chosen = options.parse_args()
    if chosen.address:
        seconds = measure(Handle(address=chosen.address, certificate=chosen.certificate))
        units = chosen.units[0]
        emit({"case": "dispatch", "units": units, "seconds": seconds, "formula_s": volume() / LINK / units})
        return
    if lacks := missing():
        sys.exit(f"capped links need {', '.join(lacks)}")
    for units in chosen.units:
        run(units, chosen.implementation)


if __name__ == "__main__":
    main()
