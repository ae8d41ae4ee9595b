"""Move weights from a device of one process to a device of another, by the transports that matter for devices.

    python benchmarks/weights/on_device.py [--device cuda:0] [--collective nccl] [--mebibytes 1024]

Each check prints one JSON line. A tensor is generated on the device from a seed, copied to the memory of the transport,
pulled by another process, copied to its device, and compared there with the same tensor from the seed. The figures are
gigabytes (1e9 bytes) per second of the copy from the device, of the pull, and of the copy to the device from ordinary
and from pinned memory (CUDA only), and the seconds for pinning. ``fallbacks`` is 1 if the transport failed and the host
network moved the version. This is expected for ``pairs`` with NCCL on one device, which NCCL refuses; the log has the
reason.

Invariant: a check with different bits, or one that misses its deadline, is an error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE
from typing import Any

import torch

from asyncflow.errors import AsyncFlowError
from asyncflow.identity import Version
from asyncflow.weights.slices import AnyArray, Arena, Box
from asyncflow.weights.transport import Pull, Region, Source, Transport, open_transport

KINDS = ("host", "ipc", "pairs")
VERSION = Version(0, 1)
WITHIN_S = 120.0
COLUMNS = 1024


def made_on(device: torch.device, mebibytes: int) -> torch.Tensor:
    """Return a tensor of random values from a fixed seed."""
    generator = torch.Generator(device=device).manual_seed(1)
    shape = (mebibytes * (1 << 20) // 4 // COLUMNS, COLUMNS)
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, device=device, dtype=torch.int32)


def arena_of(transport: Transport, tensor: torch.Tensor) -> Arena:
    return Arena({"w": ("int32", Box.whole(tensor.shape))}, allocate=transport.allocate)


def timed_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    """Copy the tensor, and return gigabytes per second."""
    started = time.perf_counter()
    target.copy_(source)
    if "cuda" in (target.device.type, source.device.type):
        torch.cuda.synchronize()
    return round(source.nbytes / (time.perf_counter() - started) / 1e9, 3)


async def hold(kind: str, options: argparse.Namespace) -> None:
    tensor = made_on(torch.device(options.device), options.mebibytes)
    transport = open_transport(kind, name="trainer", device=options.device, collective=options.collective)
    held: dict[str, Arena] = {}
    address = await transport.start(lambda _version, name, box: held["arena"].read(name, box))
    held["arena"] = arena_of(transport, tensor)
    rate = timed_copy(torch.from_numpy(held["arena"].arrays["w"]), tensor)
    sys.stdout.write(json.dumps({"address": address, "from_device": rate}) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def check(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Move the tensor by one kind of transport, and return the figures."""
    arguments = [f"--{name}={getattr(options, name)}" for name in ("mebibytes", "device", "collective")]
    holder = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--hold", kind, *arguments, stdin=PIPE, stdout=PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    expected = made_on(torch.device(options.device), options.mebibytes)
    transport = open_transport(kind, name="rollout", device=options.device, collective=options.collective)
    try:
        report = json.loads(await holder.stdout.readline())
        await transport.start(lambda *_: memoryview(b""))
        target = arena_of(transport, expected)
        region = Region(tensor="w", box=Box.whole(expected.shape), itemsize=4)
        started = time.perf_counter()
        await transport.pull(
            Pull(Source(worker="trainer", address=report["address"]), VERSION, [region], checked=True),
            sink=lambda part, data, **_: target.write("w", part.box, data),
        )
        pull = round(region.nbytes / (time.perf_counter() - started) / 1e9, 3)
        received = torch.empty_like(expected)
        to_device = timed_copy(received, torch.from_numpy(target.arrays["w"]))
        return {
            "check": kind,
            "device": options.device,
            "collective": options.collective if kind == "pairs" else None,
            "GB": round(region.nbytes / 1e9, 3),
            "from_device_GB_per_s": report["from_device"],
            "pull_GB_per_s": pull,
            "to_device_GB_per_s": to_device,
            **pinned(target.arrays["w"], received),
            "fallbacks": transport.fallbacks,
            "equal": torch.equal(received, expected),
        }
    finally:
        await transport.close()
        holder.stdin.close()
        await holder.wait()


def pinned(array: AnyArray, target: torch.Tensor) -> dict[str, float]:
    """Pin the memory of ``array``; return the seconds for this, and the rate of a copy from it to the device."""
    if target.device.type != "cuda":
        return {}
    library = torch.cuda.cudart()
    started = time.perf_counter()
    code = int(library.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    if code:
        return {"pin_failed": code}
    seconds = time.perf_counter() - started
    rate = timed_copy(target, torch.from_numpy(array))
    library.cudaHostUnregister(array.ctypes.data)
    return {"pin_s": round(seconds, 3), "to_device_pinned_GB_per_s": rate}


async def run(options: argparse.Namespace) -> int:
    status = 0
    for kind in KINDS:
        try:
            async with asyncio.timeout(WITHIN_S):
                line = await check(kind, options)
        except (AsyncFlowError, RuntimeError, OSError, ValueError) as error:
            line = {"check": kind, "failed": repr(error)}
        status |= line.get("equal") is not True
        print(json.dumps(line), flush=True)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--collective", default="nccl")
    parser.add_argument("--hold", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format=f"{os.getpid()} %(name)s: %(message)s")
    if options.hold:
        asyncio.run(hold(options.hold, options))
        return 0
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
