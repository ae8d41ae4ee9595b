"""Shards of tensors: the plain tensor that a rank holds, and where it lies in the whole one.

The optimizer, checkpoints and publications work on shards, so they do not know whether a model is cut over ranks.

Invariant: ranks cut tensors by ``share_of``, as FSDP2 does, so the shards of all ranks tile every tensor that is cut;
any other is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.training.ranks import ProcessGroup, jointly
from asyncflow.training.slice_files import SliceFiles, share_of, slice_metadata, within
from asyncflow.training.torch.device import TensorGroup
from asyncflow.training.torch.model import named_weights, open_model
from asyncflow.weights.slices import Box

_FILE_BYTES = 1 << 30
"""Bytes of gathered tensors that rank 0 holds at once where it writes for all ranks."""

Read: TypeAlias = Callable[[str, Box, Tensor], None]
"""Copies a box of a tensor, by name, into a tensor of the box's extent."""


class TensorShard(NamedTuple):
    """Box ``box`` of the tensor ``name``, whose whole shape is ``shape``; cut: other ranks hold the rest."""

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]
    cut: bool = False

    def beside(self, kind: str, tensor: Tensor) -> TensorShard:
        """Return the shard of the tensor ``kind``/name that lies like this one, or is one number for all of it."""
        name = f"{kind}/{self.name}"
        return self._replace(name=name, tensor=tensor) if tensor.ndim else TensorShard(name, tensor, Box.whole(()), ())


def tensor_shard(name: str, tensor: Tensor) -> TensorShard:
    """Return what this rank holds of a tensor, sharing its memory."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorShard(name, tensor.detach(), Box.whole(shape), shape)
    mesh = tensor.device_mesh
    box = share_of(shape, rank=mesh.get_local_rank(), world=mesh.size())
    return TensorShard(name, tensor.detach().to_local(), box, shape, cut=True)


def misfit(shards: Iterable[TensorShard], files: SliceFiles) -> str | None:
    """Return the first tensor of ``shards`` that ``files`` have in another shape or not at all, None where all fit."""
    return next((shard.name for shard in shards if files.shapes.get(shard.name) != shard.shape), None)


def narrowed(shards: Iterable[TensorShard], files: SliceFiles) -> bool:
    """Return whether ``files`` have float32 where ``shards`` are bfloat16, so that reading would round."""
    return any(shard.tensor.dtype == torch.bfloat16 and files.dtypes[shard.name] == "F32" for shard in shards)


def fill(shards: Iterable[TensorShard], read: Read | None, *, group: ProcessGroup, ranks: TensorGroup) -> None:
    """Fill ``shards``: each rank reads its own, or, unless all can, rank 0 reads whole tensors and sends them.

    read: None where this rank, not rank 0, cannot. Raises CheckpointError on all ranks where one cannot read its own.
    """
    if group.gather(np.array([read is not None]), what="who reads the tensors").all():
        assert read is not None
        with jointly(group, what="reading tensors"):
            for shard in shards:
                read(shard.name, shard.box, shard.tensor)
        return
    for shard in shards:
        whole = torch.empty(shard.shape, dtype=shard.tensor.dtype)
        if group.rank == 0 and read is not None:
            read(shard.name, Box.whole(shard.shape), whole)
        ranks.from_first(whole)
        shard.tensor.copy_(whole[within(shard.box, Box.whole(shard.shape))])


def read_first(
    folder: Path, shards: Sequence[TensorShard], *, longest: int | None = None, group: ProcessGroup, ranks: TensorGroup
) -> None:
    """Fill ``shards`` with the weights of a model folder; collective. longest: as for ``open_model``.

    From its safetensors files, where they hold the tensors as the model has them and are the same on all ranks; else
    rank 0 has transformers open the model, and sends them. Raises ManifestError where that fails.
    """
    read: Read | None = None
    mark = 0
    with jointly(group, what="opening the model"):
        try:
            files = SliceFiles(sorted(folder.glob("*.safetensors")), framework="pt")
        except CheckpointError as wrong:
            raise ManifestError(wrong.what, where=wrong.where, hint=wrong.hint) from wrong
        if misfit(shards, files) is None:
            read, mark = files.read, files.mark()
        elif group.rank == 0:
            read = _of_model(open_model(folder, weights=True, device=torch.device("cpu"), longest=longest))
    if (group.gather(np.array([mark]), what="which weights the ranks see") != mark).any() and group.rank > 0:
        read = None
    fill(shards, read, group=group, ranks=ranks)


def _of_model(model: nn.Module) -> Read:
    weights = dict(named_weights(model))

    def read(name: str, box: Box, into: Tensor) -> None:
        into.copy_(weights[name].detach()[within(box, Box.whole(weights[name].shape))])

    return read


def saved_files(checkpoint: Path, name: str) -> SliceFiles:
    """Open what any number of ranks saved under ``name``, each its own or one for all, in one file or several."""
    return SliceFiles(sorted(checkpoint.rglob(f"{Path(name).stem}*{Path(name).suffix}")), framework="pt")


def read_saved(
    checkpoint: Path | None,
    name: str,
    shards: Sequence[TensorShard],
    *,
    optional: TensorShard | None = None,
    group: ProcessGroup,
    ranks: TensorGroup,
) -> bool:
    """Fill ``shards`` from what any number of ranks saved under ``name``; collective.

    checkpoint: its folder, None on a rank other than 0 that does not see it. optional: is filled, and True returned,
    where it was saved in this shape. Raises CheckpointError where tensors are missing, do not fit, or would be rounded.
    """
    files: SliceFiles | None = None
    there = False
    with jointly(group, what=f"opening {name}"):
        if checkpoint is not None:
            files = saved_files(checkpoint, name)
            there = optional is not None and files.shapes.get(optional.name) == optional.shape
            if odd := misfit(shards, files):
                raise CheckpointError(
                    f"tensors of the checkpoint do not fit the model, first at {odd}",
                    where=str(checkpoint),
                    hint="Resume with the model that the run began with.",
                )
            if narrowed(shards, files):
                raise CheckpointError(
                    "the checkpoint's weights are float32, and reading them in bfloat16 would round them",
                    where=str(checkpoint),
                    hint="Resume with the precision that the run began with, or begin a new run with the weights that "
                    "`asyncflow model export` writes.",
                )
    there = bool(group.gather(np.array([there]), what=f"what is in {name}")[0, 0])
    more = [optional] if optional is not None and there else []
    fill([*shards, *more], files.read if files is not None else None, group=group, ranks=ranks)
    return there


def copied(shards: Iterable[TensorShard], *, group: ProcessGroup) -> list[TensorShard]:
    """Return copies, in host memory, of the shards that this rank writes: rank 0 alone writes what is not cut."""
    written = [shard for shard in shards if shard.tensor.numel() and (group.rank == 0 or shard.cut)]
    return [shard._replace(tensor=shard.tensor.to("cpu", copy=True).contiguous()) for shard in written]


def write_shards(file: Path, shards: Sequence[TensorShard]) -> None:
    """Write ``shards``, of host memory, into a safetensors file."""
    metadata = {"format": "pt"}
    if any(shard.cut for shard in shards):
        metadata |= slice_metadata({shard.name: shard.box.offset for shard in shards})
    save_file({shard.name: shard.tensor for shard in shards}, file, metadata=metadata)


def write_gathered(
    folder: Path, files: Mapping[str, Iterable[TensorShard]], *, group: ProcessGroup, ranks: TensorGroup
) -> None:
    """Write the whole tensors of all ranks' shards, by file: rank 0 writes, several files where one would be large.

    Where it cannot write, it gathers on, as the other ranks do, and raises SafetensorError or OSError at the end.
    """
    wrong: Exception | None = None
    for name, shards in files.items():
        for number, held in enumerate(_gathered(shards, group=group, ranks=ranks)):
            part = (folder / name).with_stem(f"{Path(name).stem}-{number:05d}")
            try:
                save_file(held, part, metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:
                wrong = error
    if wrong is not None:
        raise wrong


def _gathered(shards: Iterable[TensorShard], *, group: ProcessGroup, ranks: TensorGroup) -> Iterator[dict[str, Tensor]]:
    """Yield whole tensors by name, as many at once as rank 0 may hold; nothing on other ranks. Collective."""
    held: dict[str, Tensor] = {}
    for shard in shards:
        whole = (ranks.whole(shard.tensor, shard.shape) if shard.cut else shard.tensor).cpu()
        if group.rank == 0:
            held[shard.name] = whole.contiguous()
        if sum(tensor.nbytes for tensor in held.values()) >= _FILE_BYTES:
            yield held
            held = {}
    if held:
        yield held
