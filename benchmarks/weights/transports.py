"""Compare the transports of weights: the speed of each between two processes of this host.

    python benchmarks/weights/transports.py [--mebibytes 256] [--rounds 3] [--kinds host ipc ...] [--collective nccl]

``host`` uses shared memory between processes of one host. ``host-tcp`` uses TCP without encryption, as between two
hosts, and ``host-tls`` uses TLS. The other kinds run without the fallback to the host network, and print a failure.

A version is one tensor with half of the bytes, and 64 tensors with the other half. All kinds take turns, round by
round. A round pulls a version into new memory, first as a whole, then (``columns``) the middle half of the columns of
the large tensor, with digests by the source. Prints one JSON line for each kind, and a table of the medians. On a busy
machine, the CPU seconds of holder and receiver per gigabyte are more reliable than the gigabytes per second.

Invariant: bits are compared after every pull, and a kind whose bits differ has no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncflow.errors import AsyncFlowError
from asyncflow.identity import Version
from asyncflow.local.issuer import Issuer
from asyncflow.rpc.shm import SHARED_MEMORY_ENV
from asyncflow.weights.fast_transport import FastTransport
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.ipc_transport import IpcTransport
from asyncflow.weights.mooncake_transport import MooncakeTransport
from asyncflow.weights.pairs_transport import PairsTransport
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transport import Pull, Region, Source, Transport

KINDS = ("host", "host-tcp", "host-tls", "ipc", "pairs", "mooncake")
FAST: dict[str, type[FastTransport]] = {"ipc": IpcTransport, "pairs": PairsTransport, "mooncake": MooncakeTransport}
VERSION = Version(0, 1)
ROWS = 4096
PARTS = 64


def shapes(mebibytes: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of float32 tensors with ``mebibytes`` in total."""
    columns = mebibytes * (1 << 20) // 4 // ROWS // 2
    return {"big": (ROWS, columns), **{f"part.{index}": (ROWS // PARTS, columns) for index in range(PARTS)}}


def arena_of(transport: Transport, boxes: dict[str, Box]) -> Arena:
    return Arena({name: ("float32", box) for name, box in boxes.items()}, allocate=transport.allocate)


def fill(arena: Arena) -> None:
    for seed, array in enumerate(arena.arrays.values()):
        array.view(np.uint32)[...] = np.random.default_rng(seed).integers(0, 2**32, array.shape, dtype=np.uint32)


def opened(kind: str, name: str, options: argparse.Namespace) -> Transport:
    if kind in FAST:
        more = {"device": options.device, "collective": options.collective} if kind == "pairs" else {}
        return FAST[kind](name=name, **more)
    credentials = Issuer(Path(options.tls)).credentials(name) if kind == "host-tls" else None
    return HostTransport(name=name, credentials=credentials)


async def hold(kind: str, options: argparse.Namespace) -> None:
    transport = opened(kind, "trainer", options)
    held: dict[str, Arena] = {}
    address = await transport.start(lambda _version, tensor, box: held["arena"].read(tensor, box))
    held["arena"] = arena_of(transport, {name: Box.whole(shape) for name, shape in shapes(options.mebibytes).items()})
    fill(held["arena"])
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


class Pulling:
    """The measurement of one kind: its holder process and the results."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self.kind = kind
        self.seconds: dict[str, list[float]] = {"whole": [], "columns": []}
        self.cpu: dict[str, list[float]] = {"whole": [], "columns": []}
        self.failed = ""
        self._options = options
        self._environment = {SHARED_MEMORY_ENV: "off"} if kind in ("host-tcp", "host-tls") else {}
        self._process: Process | None = None

    async def start(self) -> None:
        passed = [f"--{name}={getattr(self._options, name)}" for name in ("mebibytes", "device", "collective", "tls")]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--hold",
            self.kind,
            *passed,
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, **self._environment},
        )
        assert self._process.stdout is not None
        self.source = Source(worker="trainer", address=(await self._process.stdout.readline()).decode().strip())
        os.environ.update(self._environment)
        self.transport = opened(self.kind, "rollout", self._options)
        await self.transport.start(lambda *_: memoryview(b""))

    async def round(self, expected: Arena) -> None:
        if self.failed:
            return
        os.environ.pop(SHARED_MEMORY_ENV, None)
        os.environ.update(self._environment)
        whole = {name: Box.whole(shape) for name, shape in shapes(self._options.mebibytes).items()}
        rows, columns = whole["big"].extent
        middle = {"big": Box((0, columns // 4), (rows, columns // 2))}
        try:
            for name, boxes, checked in (("whole", whole, False), ("columns", middle, True)):
                seconds, cpu = await self._pull(boxes, expected, checked=checked)
                self.seconds[name].append(seconds)
                self.cpu[name].append(cpu)
        except AsyncFlowError as error:
            self.failed = str(error)

    async def _pull(self, boxes: dict[str, Box], expected: Arena, *, checked: bool) -> tuple[float, float]:
        regions = [Region(tensor=name, box=box, itemsize=4) for name, box in boxes.items()]
        started, used = time.perf_counter(), self._cpu()
        target = arena_of(self.transport, boxes)
        await self.transport.pull(
            Pull(self.source, VERSION, regions, checked),
            sink=lambda region, data, **_: target.write(region.tensor, region.box, data),
        )
        seconds, used = time.perf_counter() - started, self._cpu() - used
        for name, box in boxes.items():
            (top, left), (height, width) = box.offset, box.extent
            cut = expected.arrays[name][top : top + height, left : left + width]
            assert np.array_equal(target.arrays[name].view(np.uint32), cut.view(np.uint32)), f"{self.kind}: {name}"
        return seconds, used

    def _cpu(self) -> float:
        assert self._process is not None
        holder = psutil.Process(self._process.pid).cpu_times()
        return time.process_time() + holder.user + holder.system

    async def close(self) -> None:
        assert self._process is not None
        await self.transport.close()
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await asyncio.wait_for(self._process.wait(), 30)

    def figures(self, mebibytes: int) -> dict[str, Any]:
        if self.failed:
            return {"transport": self.kind, "failed": self.failed}
        sizes = {"whole": mebibytes << 20, "columns": (mebibytes << 20) // 4}
        rates = {name: [sizes[name] / seconds / 1e9 for seconds in found] for name, found in self.seconds.items()}
        cpu = {name: [1e9 * used / sizes[name] for used in found] for name, found in self.cpu.items()}
        return {
            "transport": self.kind,
            **{f"{name}_GB_per_s": round(statistics.median(found), 3) for name, found in rates.items()},
            **{f"{name}_cpu_s_per_GB": round(statistics.median(found), 2) for name, found in cpu.items()},
            "rounds": {name: [round(rate, 3) for rate in found] for name, found in rates.items()},
        }


async def compare(options: argparse.Namespace) -> None:
    expected = Arena({name: ("float32", Box.whole(shape)) for name, shape in shapes(options.mebibytes).items()})
    fill(expected)
    pulls = [Pulling(kind, options) for kind in options.kinds]
    for pull in pulls:
        await pull.start()
    for _ in range(options.rounds):
        for pull in pulls:
            await pull.round(expected)
    for pull in pulls:
        await pull.close()
    found = [pull.figures(options.mebibytes) for pull in pulls]
    for line in found:
        print(json.dumps(line))
    base = next((line for line in found if line["transport"] == "host" and "failed" not in line), None)
    columns = [f"{name}_{figure}" for name in ("whole", "columns") for figure in ("GB_per_s", "cpu_s_per_GB")]
    print(f"\n{'':10}", *(f"{column:>24}" for column in columns), f"  load {os.getloadavg()[0]:.1f}")
    for line in found:
        cells = [
            f"{line[name]:12.2f} (x {line[name] / base[name]:6.2f})" if base else "" for name in columns if name in line
        ]
        print(f"{line['transport']:10}", *(f"{cell:>24}" for cell in cells), line.get("failed", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--collective", default="gloo")
    parser.add_argument("--hold", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--tls", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        asyncio.run(hold(options.hold, options))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.tls = folder
        Issuer(Path(folder))
        asyncio.run(compare(options))


if __name__ == "__main__":
    main()
