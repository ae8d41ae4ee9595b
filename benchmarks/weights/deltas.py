"""Measure the bytes sent for each version of a run in bfloat16, as a share of the version, by learning rate.

The torch trainer makes optimizer steps (AdamW, GRPO's loss on random tokens with random advantages), from the model
``--model`` or from a small model with random weights of standard deviation 0.02. After each step a sender publishes the
weights as the trainer's role does, rounded to bfloat16, and receivers pull them over the host network, one with and one
without differences. All bits are compared. ``encode_GB_per_s`` uses the CPU time of one thread that computes the
differences.

    python benchmarks/weights/deltas.py --model models/smollm2 --rate 1e-6 1e-5 1e-4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from asyncflow.identity import SampleKey, Version
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.weights.deltas import difference
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.receiver import WeightReceiver
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.service import CatalogueService

SOON = 120.0
CHUNK = 1 << 19


def small_model(folder: Path) -> Path:
    """Write a model with 7 million random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        vocab_size=4096,
        initializer_range=0.02,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def batch_of(seed: int, *, vocabulary: int, samples: int = 4, length: int = 32) -> MicroBatch:
    """Return samples of random tokens."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocabulary, length) for _ in range(2 * samples)]
    return MicroBatch(
        keys=[SampleKey(0, sample) for sample in range(samples)],
        prompts=Jagged.from_rows(tokens[:samples], "int32"),
        responses=Jagged.from_rows(tokens[samples:], "int32"),
        logprobs=Jagged.from_rows([rng.normal(-8, 0.5, length) for _ in range(samples)], "float32"),
        versions=Jagged.from_rows([np.zeros(length) for _ in range(samples)], "int64"),
        advantages=rng.normal(size=samples).astype(np.float32),
        loss_mask=Jagged.from_rows([np.ones(length, bool) for _ in range(samples)], "bool"),
    )


def encode_seconds(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """Return the CPU seconds of one thread that computes the differences."""
    began = time.thread_time()
    for name, array in after.items():
        old, new = (each.reshape(-1).view(np.uint8) for each in (before[name], array))
        for at in range(0, new.size, 2 * CHUNK):
            difference(old[at : at + 2 * CHUNK].data, new[at : at + 2 * CHUNK].data, itemsize=array.itemsize)
    return time.thread_time() - began


async def measure(model: Path, *, rate: float, steps: int) -> None:
    """Train, publish and pull, and print the share of bytes that were sent."""
    optimizer = OptimizerSettings(learning_rate=rate, steps=steps)
    backend = TorchBackend(BackendSettings(optimizer=optimizer, threads=1), group=SingleProcess())
    backend.load(model, checkpoint=None)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    server, directory = RpcServer(name="driver"), Directory()
    directory.attach(server)
    CatalogueService(server, directory=directory)
    address = await server.start()
    members = [
        Membership(driver=address, member=Member(role=name, index=0, incarnation=name))
        for name in ("trainer", "differences", "whole")
    ]
    for member in members:
        await member.join(SOON)
    sender = WeightSender(membership=members[0], worker="trainer", transport=HostTransport(name="trainer"))
    receivers = [
        WeightReceiver(
            membership=member,
            worker=member.member.role,
            transport=HostTransport(name=member.member.role, delta=member.member.role == "differences"),
        )
        for member in members[1:]
    ]
    for part in (sender, *receivers):
        await part.start()
    before: dict[str, np.ndarray] = {}
    for step in range(steps + 1):
        if step:
            backend.micro_batch(batch_of(step, vocabulary=vocabulary), version=None)
            backend.finish_step(step)
        weights = {name: np.array(array) for name, array in backend.tensors(dtype="bfloat16")}
        await sender.publish(Version(0, step), weights, timeout=SOON)
        for receiver in receivers:
            await receiver.ensure(step, timeout=SOON)
            taken = receiver.take(step)[1]
            assert all(np.array_equal(taken[name], array) for name, array in weights.items())
        if before:
            changed = sum(np.count_nonzero(before[name] != array) for name, array in weights.items())
            record, plain = (receiver.transfers[-1] for receiver in receivers)
            figures = {
                "rate": rate,
                "version": step,
                "MB": round(record.nbytes / 1e6, 1),
                "changed": round(changed / sum(array.size for array in weights.values()), 4),
                "sent": round(record.sent / record.nbytes, 4),
                "sent_without_differences": round(plain.sent / plain.nbytes, 4),
                "encode_GB_per_s": round(record.nbytes / encode_seconds(before, weights) / 1e9, 2),
            }
            sys.stdout.write(json.dumps(figures) + "\n")
        before = weights
    for part in (*receivers, sender, *members, directory, server):
        await part.close()
    backend.close()


def main() -> None:
    """Parse the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path)
    options.add_argument("--rate", type=float, nargs="+", default=[1e-6])
    options.add_argument("--steps", type=int, default=3)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or small_model(Path(folder))
        for rate in chosen.rate:
            asyncio.run(measure(model, rate=rate, steps=chosen.steps))


if __name__ == "__main__":
    main()
