"""One rank of a gang in a process of its own: ``rank_process.py KIND FOLDER RANK WORLD ATTEMPT``.

Rank 0 leaves its address in FOLDER/address. What a rank found out goes to FOLDER/result-RANK.npz.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.net.rpc import RpcServer
from asyncflow.train.ranks import GatherService, HostGroup

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, WORLD, ATTEMPT = map(int, sys.argv[3:])


def gathers(group: HostGroup) -> dict[str, Any]:
    rounds = [group.gather(np.array([RANK, number]), what="numbers") for number in range(50)]
    return {"rounds": np.stack(rounds), "floats": group.gather(np.full((2, 2), RANK / 3), what="floats")}


def counts(group: HostGroup) -> dict[str, Any]:
    from asyncflow.identity import SampleKey
    from asyncflow.net.frames import Jagged
    from asyncflow.train.backends.counting import CountingBackend
    from asyncflow.train.batch import MicroBatch
    from asyncflow.train.settings import BackendSettings, OptimizerSettings

    settings = BackendSettings(
        optimizer=OptimizerSettings(learning_rate=1, steps=2), group_size=2, options={"capacity": 8}
    )
    backend = CountingBackend(settings, group=group)
    backend.load(FOLDER, checkpoint=None)
    none = Jagged.from_rows([[]] * 2, "int64")
    for step in (1, 2):
        keys = [SampleKey(2 * (step - 1) + RANK, sample) for sample in range(2)]
        backend.micro_batch(
            MicroBatch(
                keys=keys,
                prompts=none,
                responses=none,
                logprobs=none,
                versions=none,
                advantages=np.zeros(2, np.float32),
            ),
            version=0,
        )
        backend.finish_step(step)
    return dict(backend.tensors())


def gradients(group: HostGroup) -> dict[str, Any]:
    """Two steps of the torch backend on this rank's share of D_k; rank 1 has an empty slot more."""
    import torch
    from train_reference import GradientKept, part, samples

    from asyncflow.algorithms.aggregation import Aggregation
    from asyncflow.algorithms.grpo import GrpoLoss
    from asyncflow.train.settings import BackendSettings, OptimizerSettings

    aggregation = Aggregation(name="seq-mean-token-mean")
    settings = BackendSettings(
        optimizer=OptimizerSettings(learning_rate=1e-3, steps=2, max_grad_norm=0),
        loss=GrpoLoss(aggregation=aggregation, kl=0.05, kl_name="k3"),
        temperature=0.8,
        threads=1,
    )
    backend = GradientKept(settings, group=group)
    if RANK != 0:
        (FOLDER / "bare").mkdir()
        (FOLDER / "bare" / "config.json").write_text((FOLDER / "model" / "config.json").read_text())
    backend.load(FOLDER / ("model" if RANK == 0 else "bare"), checkpoint=None)
    batch = samples()
    mine = [i for i in range(len(batch)) if i % 3 == 0] if RANK else [i for i in range(len(batch)) if i % 3]
    kept = {}
    for step in (1, 2):
        backend.micro_batch(part(batch, mine), version=0)
        if RANK:
            backend.micro_batch(part(batch, []), version=0)
        metrics = backend.finish_step(step)
        kept |= {f"gradient{step}/{name}": tensor.numpy() for name, tensor in backend.kept.items()}
    backend.close()
    assert torch.is_grad_enabled()
    return kept | dict(backend.tensors()) | {"metrics": np.array(sorted(metrics.items()), dtype="U32")}


def adapters(group: HostGroup) -> dict[str, Any]:
    """Two steps of two updates each on adapters; rank 1 has no sample of the second mini-batch."""
    from train_reference import adapter_steps, samples

    return adapter_steps(FOLDER / "model", group, [i for i in range(len(samples())) if (i < 6 and i % 2 == 0) == RANK])


async def main() -> None:
    address = FOLDER / "address"
    server = RpcServer(name="trainer-0")
    if RANK == 0:
        GatherService(attempt=ATTEMPT, world=WORLD).attach(server)
        (FOLDER / "draft").write_text(await server.start())
        (FOLDER / "draft").rename(address)
    group = HostGroup(
        rank=RANK,
        world=WORLD,
        attempt=ATTEMPT,
        leader=lambda: address.read_text() if address.exists() else None,
        loop=asyncio.get_running_loop(),
        patience_s=30,
    )
    result = await asyncio.to_thread(
        {"gathers": gathers, "counts": counts, "gradients": gradients, "adapters": adapters}[KIND], group
    )
    np.savez(FOLDER / f"result-{RANK}.npz", **result)
    await group.close()
    if RANK == 0:
        await asyncio.sleep(0.2)
        await server.close()


if __name__ == "__main__":
    asyncio.run(main())
