"""Bandwidth of put and get over links limited to 100 MB/s in both directions, for 1 to 4 units in network namespaces.

Each unit is in a namespace with its own link; client and controller are in the core. Threads put, then get, batches of
16 MiB, so that all links are busy. Packets have 9,000 bytes, because two cores cannot process 400 MB/s in small ones.
The measurement runs twice and the second time counts, because a hypervisor may provide memory on its first use more
slowly than the link fills it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from report import SECURED
from samples import emit
from servers import Handle, Servers, servers

from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

sys.path.append(str(Path(__file__).parents[1]))
from capped_links import CORE_ADDRESS, Network, capped_links, missing

BITS_PER_S = 800e6
BATCH_BYTES, ROWS, BATCHES, THREADS = 16 << 20, 16, 32, 8
PARTITIONS = "warm", "links"
CALL_S = 120.0


def measure(handle: Handle) -> dict[str, float]:
    """Put and get all batches; return the GB/s of both."""
    column = Jagged(
        np.random.default_rng(0).integers(0, 1 << 60, BATCH_BYTES // 8),
        np.arange(ROWS + 1) * (BATCH_BYTES // 8 // ROWS),
    )
    with handle.connect() as queue:
        for partition in PARTITIONS:
            rates = _put_and_get(queue, partition, column)
            queue.clear_partition(partition=partition, timeout=CALL_S)
        return rates


def _put_and_get(queue: BlockingQueue, partition: str, column: Jagged) -> dict[str, float]:
    queue.declare([TaskSpec(partition=partition, name="t", needs=["x"], groups=True, lease_s=30.0)], timeout=CALL_S)

    def put(_number: int) -> None:
        queue.put(partition, {"x": column}, group_size=ROWS, timeout=CALL_S)

    def get(_number: int) -> None:
        rows = queue.claim(partition=partition, task="t", max_rows=ROWS, min_rows=ROWS, timeout=CALL_S).rows
        fetched = queue.fetch(rows, ["x"], timeout=CALL_S)["x"]
        assert np.array_equal(fetched.values, column.values)
        queue.complete(rows, {}, timeout=CALL_S)

    return {"put_GBps": _rate(put), "get_GBps": _rate(get)}


def _rate(job: Callable[[int], None]) -> float:
    with ThreadPoolExecutor(THREADS) as pool:
        started = time.perf_counter()
        list(pool.map(job, range(BATCHES)))
        return round(BATCHES * BATCH_BYTES / (time.perf_counter() - started) / 1e9, 4)


def run(units: int, implementation: str) -> None:
    with capped_links(guests=units, bits_per_s=BITS_PER_S, both_ways=True, mtu=9000) as network:

        def host(name: str) -> str:
            return network.address(int(name.removeprefix("unit"))) if name.startswith("unit") else CORE_ADDRESS

        def within(name: str, argv: Sequence[str]) -> list[str]:
            namespace = network.guests[int(name.removeprefix("unit"))] if name.startswith("unit") else network.core
            return Network.within(namespace, argv)

        with servers(
            units=units, secured=implementation == SECURED, bytes_per_unit="1Gi", hosts=host, within=within
        ) as made:
            _client(made, network, units=units, implementation=implementation)


def _client(made: Servers, network: Network, *, units: int, implementation: str) -> None:
    """Run this program as the client, in the core's namespace."""
    argv = [sys.executable, __file__, implementation, "--units", str(units), *made.handle.words]
    subprocess.run(Network.within(network.core, argv), check=True, timeout=600, env=dict(os.environ))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--units", nargs="+", type=int, default=[1, 2, 4])
    options.add_argument("implementation")
    options.add_argument("--address", default="")
    options.add_argument("--certificate", default="")
    chosen = options.parse_args()
    if chosen.address:
        handle = Handle(address=chosen.address, certificate=chosen.certificate)
        result = measure(handle)
        emit({"case": "links", "implementation": chosen.implementation, "units": chosen.units[0], **result})
        return
    if lacks := missing():
        sys.exit(f"capped links need {', '.join(lacks)}")
    for units in chosen.units:
        run(units, chosen.implementation)


if __name__ == "__main__":
    main()
