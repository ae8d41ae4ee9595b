"""One rank of a gang in a process of its own, forked from one that has imported torch: ``gang`` makes them all.

Rank 0 leaves its address in FOLDER/address. What a rank found out goes to FOLDER/result-WORLD-RANK.npz.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncflow.rpc.server import RpcServer
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import GatherService, HostProcessGroup, gather_bytes
from asyncflow.weights.sender import PublishedSlice

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "asyncflow.training.torch.backend",
        "asyncflow.training.trainer",
        "asyncflow.queue.controller.controller",
        "asyncflow.queue.storage.unit",
        "asyncflow.weights.service",
    ]
)
ATTEMPT = 3
FOLDER = Path()
RANK, WORLD = 0, 0


def gang(kind: str, folder: Path, world: int, *, within_s: float = 60) -> list[dict[str, Any]]:
    """Start ``world`` ranks, the last first, and return what each found."""
    (folder / "address").unlink(missing_ok=True)
    ranks = [FORKS.Process(target=run, args=(kind, folder, rank, world)) for rank in reversed(range(world))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(within_s)
    assert [rank.exitcode for rank in ranks] == [0] * world
    return [dict(np.load(folder / f"result-{world}-{rank}.npz")) for rank in range(world)]


def run(kind: str, folder: Path, rank: int, world: int) -> None:
    """Be one rank; an exception ends the process with status 1."""
    global FOLDER, RANK, WORLD
    FOLDER, RANK, WORLD = folder, rank, world
    asyncio.run(main(kind))


def gathers(group: HostProcessGroup) -> dict[str, Any]:
    rounds = [group.gather(np.array([RANK, number]), what="numbers") for number in range(50)]
    return {"rounds": np.stack(rounds), "floats": group.gather(np.full((2, 2), RANK / 3), what="floats")}


def counts(group: HostProcessGroup) -> dict[str, Any]:
    from asyncflow.identity import SampleKey
    from asyncflow.rpc.columns import Jagged
    from asyncflow.training.batch import MicroBatch
    from asyncflow.training.counting import CountingBackend
    from asyncflow.training.settings import BackendSettings, OptimizerSettings

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


def shards(group: HostProcessGroup) -> dict[str, Any]:
    """Train five steps; then again the last two, from each checkpoint after the third that the folder has."""
    from train_reference import HALF, STOCHASTIC, aged_samples, held_bytes, settings_of_shards, train_share

    from asyncflow.errors import ManifestError
    from asyncflow.training.torch.backend import TorchBackend

    model = FOLDER / "model"
    backend = TorchBackend(settings_of_shards(), group=group)
    found: dict[str, Any] = {}

    def keep(what: str, trainer: TrainerBackend = backend) -> None:
        found.update({f"{what}/{name}": array for name, array in whole(group, trainer).items()})

    backend.load(model, checkpoint=None)
    found["held"] = np.array(held_bytes(backend))
    train_share(backend, 1, 3)
    for kind in ("shared", "gathered"):
        saved = FOLDER / f"{kind}-{WORLD}"
        mine = saved if RANK == 0 else saved / f"rank-{RANK:04d}"
        if kind == "shared" or RANK == 0:
            mine.mkdir(parents=True, exist_ok=True)
        backend.snapshot(shared=kind == "shared")(mine)
    group.gather(np.zeros(1), what="what was saved")
    keep("after 3")
    older = {name: copy_of(given) for name, given in backend.tensors()}
    found["probe"] = backend.probe().logprobs
    rounded = backend.full_tensors(dict(backend.tensors(dtype="bfloat16")))
    found |= {f"rounded/{name}": array.copy() for name, array in rounded}
    train_share(backend, 4, 5)
    keep("straight")
    backend.measure(aged_samples() if RANK == 0 else MicroBatch.empty(), weights=older)
    keep("measured")
    found["gap"] = np.array(backend.finish_step(6)["logprob_gap"])
    for saved in sorted(FOLDER.glob("[gs]*-[124]")):
        sees = RANK == 0 or saved.name.startswith("shared")
        backend.load(model, checkpoint=saved if sees else None)
        keep(f"read {saved.name}")
        train_share(backend, 4, 5)
        keep(saved.name)
    half = TorchBackend(settings_of_shards(**HALF), group=group)
    half._ranks = backend._ranks
    half.load(model, checkpoint=None)
    found["half"] = np.array(train_share(half, 1, 1)["grad_norm"])
    if WORLD == 2:
        rounding = TorchBackend(settings_of_shards(**STOCHASTIC), group=group)
        rounding._ranks = backend._ranks
        rounding.load(model, checkpoint=None)
        found["rounding held"] = np.array(held_bytes(rounding))
        train_share(rounding, 1, 2)
        keep("rounding after 2", rounding)
        mine = FOLDER / "rounding-2" / (f"rank-{RANK:04d}" if RANK else "")
        mine.mkdir(parents=True, exist_ok=True)
        rounding.snapshot()(mine)
        group.gather(np.zeros(1), what="what was saved")
        train_share(rounding, 3, 3)
        keep("rounding straight", rounding)
        for world in (1, 2):
            rounding.load(model, checkpoint=FOLDER / f"rounding-{world}")
            keep(f"rounding read {world}", rounding)
            train_share(rounding, 3, 3)
            keep(f"rounding resumed from {world}", rounding)
    broken = FOLDER / f"broken-{WORLD}-{RANK}"
    broken.mkdir()
    (broken / "config.json").write_text((model / "config.json").read_text())
    content = (model / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:-1000] if RANK else content)
    try:
        backend.load(broken, checkpoint=None)
    except ManifestError as error:
        found["refused"] = np.array(str(error))
    backend.close()
    return found


def full_disk(group: HostProcessGroup) -> dict[str, Any]:
    """Write a checkpoint where rank 0 alone sees the folder, and its disk takes no file of weights; then again."""
    from train_reference import settings_of_shards, train_share

    from asyncflow.errors import DiskError
    from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints
    from asyncflow.training.torch.backend import TorchBackend

    backend = TorchBackend(settings_of_shards(options={"collective_timeout_s": 20}), group=group)
    backend.load(FOLDER / "model", checkpoint=None)
    train_share(backend, 1, 1)
    checkpoints = Checkpoints(FOLDER / f"checkpoints-{RANK}")
    checkpoints.group = group.background()
    checkpoints.claim(ATTEMPT)
    assert not checkpoints.shared
    asked = 0

    def carry(_folder: Path) -> None:
        nonlocal asked
        asked += 1
        assert dict(backend.full_tensors(dict(backend.tensors())))

    found: dict[str, Any] = {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (1000, limits[0]):
        if RANK == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            checkpoints.write(
                CheckpointManifest(attempt=ATTEMPT, step=1, samples=1), backend.snapshot(shared=False), carry
            )
        except DiskError as error:
            found["refused"] = np.array(str(error))
    found |= {"steps": np.array(checkpoints.steps()), "asked": np.array(asked)}
    backend.close()
    return found


def copy_of(given: Any) -> Any:
    return (given.array if isinstance(given, PublishedSlice) else given).copy()


def whole(group: HostProcessGroup, backend: TrainerBackend) -> dict[str, Any]:
    """The whole weights, put together from what every rank gives."""
    told = gather_bytes(group, pickle_free(dict(backend.tensors())), what="slices")
    merged: dict[str, Any] = {}
    for rank in told:
        for name, (dtype, shape, offset, extent, content) in msgspec.msgpack.decode(rank).items():
            array = np.frombuffer(content, dtype).reshape(extent)
            into = merged.setdefault(name, np.full(shape, np.nan, dtype))
            into[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = array
    return merged


def pickle_free(tensors: dict[str, Any]) -> bytes:
    parts = {}
    for name, given in tensors.items():
        shard = (
            given
            if isinstance(given, PublishedSlice)
            else PublishedSlice(array=given, offset=(0,) * given.ndim, shape=given.shape)
        )
        array = np.ascontiguousarray(shard.array)
        parts[name] = (array.dtype.str, shard.shape, shard.offset, array.shape, array.tobytes())
    return msgspec.msgpack.encode(parts)


def gradients(group: HostProcessGroup) -> dict[str, Any]:
    """Two steps of the torch backend on this rank's share of D_k; rank 1 has fewer packs, and an empty slot."""
    import torch
    from train_reference import GradientKept, part, samples

    from asyncflow.algorithms.loss import Aggregation, Loss
    from asyncflow.training.settings import BackendSettings, OptimizerSettings

    aggregation = Aggregation(name="seq-mean-token-mean")
    settings = BackendSettings(
        optimizer=OptimizerSettings(learning_rate=1e-3, steps=2, max_grad_norm=0),
        loss=Loss(aggregation=aggregation, kl=0.05, kl_name="k3"),
        temperature=0.8,
        pack_tokens=40,
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
        for slot in [mine, []] if RANK else [mine[:5], mine[5:]]:
            backend.micro_batch(part(batch, slot), version=0)
        metrics = backend.finish_step(step)
        kept |= {f"gradient{step}/{name}": tensor.numpy() for name, tensor in backend.kept.items()}
    backend.close()
    assert torch.is_grad_enabled()
    return kept | whole(group, backend) | {"metrics": np.array(sorted(metrics.items()), dtype="U32")}


def algorithms(group: HostProcessGroup) -> dict[str, Any]:
    """The gradient of one step of each of ``train_algorithms.LOSSES``; rank 0 has two thirds of the samples."""
    from train_algorithms import LOSSES, backend_of, gradient_of, samples_for

    kept = {}
    for name, loss in LOSSES.items():
        backend, batch = backend_of(FOLDER / "model", loss, group), samples_for(loss.algorithm)
        own = [key.serial if loss.algorithm.pairs else key.serial + key.sample for key in batch.keys]
        mine = [i for i, number in enumerate(own) if (number % 3 == 0) == bool(RANK)]
        slots = [mine, []] if RANK else [mine[:4], mine[4:]]
        kept |= {f"{name}/{key}": tensor.numpy() for key, tensor in gradient_of(backend, batch, slots).items()}
        backend.close()
    return kept


def kinds(group: HostProcessGroup) -> dict[str, Any]:
    from train_kinds import all_runs

    return all_runs(FOLDER, group)


def compiled(group: HostProcessGroup) -> dict[str, Any]:
    from train_kinds import compiled_run

    return compiled_run(FOLDER, group)


KINDS = {
    "gathers": gathers,
    "counts": counts,
    "gradients": gradients,
    "shards": shards,
    "kinds": kinds,
    "algorithms": algorithms,
    "full_disk": full_disk,
    "compiled": compiled,
}


async def main(kind: str) -> None:
    address = FOLDER / "address"
    server = RpcServer(name="trainer-0")
    if RANK == 0:
        GatherService(attempt=ATTEMPT, world=WORLD).attach(server)
        (FOLDER / "draft").write_text(await server.start())
        (FOLDER / "draft").rename(address)
    group = HostProcessGroup(
        rank=RANK,
        world=WORLD,
        attempt=ATTEMPT,
        leader=lambda: address.read_text() if address.exists() else None,
        loop=asyncio.get_running_loop(),
        patience_s=30,
    )
    result = await asyncio.to_thread(KINDS[kind], group)
    np.savez(FOLDER / f"result-{WORLD}-{RANK}.npz", **result)
    await group.close()
    if RANK == 0:
        await asyncio.sleep(0.2)
        await server.close()
