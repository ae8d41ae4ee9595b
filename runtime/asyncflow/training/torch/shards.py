"""Shards of tensors: the plain tensor that a rank holds, and its location in the full tensor.

Optimizer, checkpoints and publications work on shards, so they do not depend on whether a model is sharded over ranks.

Invariant: ranks divide tensors by ``share_of``, as FSDP2 does, so the shards of all ranks tile every sharded tensor;
any other tensor is the same on all ranks.
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
from asyncflow.models.folder import named_weights
from asyncflow.training.ranks import ProcessGroup, jointly
from asyncflow.training.slice_files import SliceFiles, share_of, slice_metadata, within
from asyncflow.training.torch.device import TensorGroup
from asyncflow.training.torch.model import open_model
from asyncflow.weights.slices import Box

_FILE_BYTES = 1 << 30
"""Bytes of gathered tensors that rank 0 holds at the same time if it writes for all ranks."""

Read: TypeAlias = Callable[[str, Box, Tensor], None]
"""Copies a box of a tensor, by name, into a tensor of the box's extent."""


class TensorShard(NamedTuple):
    """Box ``box`` of the tensor ``name``, whose full shape is ``shape``; sharded: other ranks hold the rest."""

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]
    sharded: bool = False

    def companion(self, kind: str, tensor: Tensor) -> TensorShard:
        """Return the shard ``kind``/name with the same location as this one, or unsharded if it is a scalar."""
        name = f"{kind}/{self.name}"
        return self._replace(name=name, tensor=tensor) if tensor.ndim else TensorShard(name, tensor, Box.whole(()), ())


def tensor_shard(name: str, tensor: Tensor) -> TensorShard:
    """Return this rank's part of a tensor, sharing its memory."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorShard(name, tensor.detach(), Box.whole(shape), shape)
    mesh = tensor.device_mesh
    box = share_of(shape, rank=mesh.get_local_rank(), world=mesh.size())
    return TensorShard(name, tensor.detach().to_local(), box, shape, sharded=True)


def first_mismatch(shards: Iterable[TensorShard], files: SliceFiles) -> str | None:
    """Return the first tensor of ``shards`` that is missing in ``files`` or has another shape, None if all fit."""
    return next((shard.name for shard in shards if files.shapes.get(shard.name) != shard.shape), None)


def would_round(shards: Iterable[TensorShard], files: SliceFiles) -> bool:
    """Return whether ``files`` have float32 for bfloat16 ``shards``, so that reading would round."""
    return any(shard.tensor.dtype == torch.bfloat16 and files.dtypes[shard.name] == "F32" for shard in shards)


def fill(shards: Iterable[TensorShard], read: Read | None, *, group: ProcessGroup, ranks: TensorGroup) -> None:
    """Fill ``shards``: each rank reads its own, or, unless all can read, rank 0 reads full tensors and broadcasts them.

    read: None if this rank, other than rank 0, cannot read. Raises CheckpointError on all ranks if one fails to read.
    """
    if group.gather(np.array([read is not None]), what="access to the tensors").all():
        assert read is not None
        with jointly(group, what="reading tensors"):
            for shard in shards:
                read(shard.name, shard.box, shard.tensor)
        return
    for shard in shards:
        whole = torch.empty(shard.shape, dtype=shard.tensor.dtype)
        if group.rank == 0 and read is not None:
            read(shard.name, Box.whole(shard.shape), whole)
        ranks.broadcast(whole)
        shard.tensor.copy_(whole[within(shard.box, Box.whole(shard.shape))])


def read_first(
    folder: Path, shards: Sequence[TensorShard], *, longest: int | None = None, group: ProcessGroup, ranks: TensorGroup
) -> None:
    """Fill ``shards`` with the weights of a model folder. Collective. longest: as for ``open_model``.

    Reads the safetensors files if they have the model's tensors and are the same on all ranks. Otherwise rank 0 opens
    the model with transformers and broadcasts the weights. Raises ManifestError if that fails.
    """
    read: Read | None = None
    mark = 0
    with jointly(group, what="opening the model"):
        try:
            files = SliceFiles(sorted(folder.glob("*.safetensors")), framework="pt")
        except CheckpointError as error:
            raise ManifestError(error.what, where=error.where, hint=error.hint) from error
        if first_mismatch(shards, files) is None:
            read, mark = files.read, files.mark()
        elif group.rank == 0:
            read = _of_model(open_model(folder, weights=True, device=torch.device("cpu"), longest=longest))
    if (group.gather(np.array([mark]), what="the ranks' weights") != mark).any() and group.rank > 0:
        read = None
    fill(shards, read, group=group, ranks=ranks)


def _of_model(model: nn.Module) -> Read:
    weights = dict(named_weights(model))

    def read(name: str, box: Box, into: Tensor) -> None:
        into.copy_(weights[name].detach()[within(box, Box.whole(weights[name].shape))])

    return read


def saved_files(checkpoint: Path, name: str) -> SliceFiles:
    """Open the files that any number of ranks saved under ``name``, one or several files per rank or for all ranks."""
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
    """Fill ``shards`` from the files that any number of ranks saved under ``name``. Collective.

    checkpoint: its folder, None on a rank other than 0 that cannot access it. optional: a shard to fill, if it was
    saved with this shape; the function returns whether it was. Raises CheckpointError if tensors are missing, do not
    fit, or would be rounded.
    """
    files: SliceFiles | None = None
    has_optional = False
    with jointly(group, what=f"opening {name}"):
        if checkpoint is not None:
            files = saved_files(checkpoint, name)
            has_optional = optional is not None and files.shapes.get(optional.name) == optional.shape
            if mismatch := first_mismatch(shards, files):
                raise CheckpointError(
                    f"tensors of the checkpoint do not fit the model, for example {mismatch}",
                    where=str(checkpoint),
                    hint="Resume with the same model as at the start of the run",
                )
            if would_round(shards, files):
                raise CheckpointError(
                    "the checkpoint's weights are float32, and reading them in bfloat16 would round them",
                    where=str(checkpoint),
                    hint="Resume with the same precision as at the start of the run, or start a new run with the "
                    "weights that asyncflow model export writes",
                )
    has_optional = bool(group.gather(np.array([has_optional]), what=f"the content of {name}")[0, 0])
    more = [optional] if optional is not None and has_optional else []
    fill([*shards, *more], files.read if files is not None else None, group=group, ranks=ranks)
    return has_optional


def copied(shards: Iterable[TensorShard], *, group: ProcessGroup) -> list[TensorShard]:
    """Return copies in host memory of the shards that this rank writes; only rank 0 writes tensors not sharded."""
    written = [shard for shard in shards if shard.tensor.numel() and (group.rank == 0 or shard.sharded)]
    return [shard._replace(tensor=shard.tensor.to("cpu", copy=True).contiguous()) for shard in written]


def write_shards(file: Path, shards: Sequence[TensorShard]) -> None:
    """Write ``shards`` in host memory into a safetensors file."""
    metadata = {"format": "pt"}
    if any(shard.sharded for shard in shards):
        metadata |= slice_metadata({shard.name: shard.box.offset for shard in shards})
    save_file({shard.name: shard.tensor for shard in shards}, file, metadata=metadata)


def write_gathered(
    folder: Path, files: Mapping[str, Iterable[TensorShard]], *, group: ProcessGroup, ranks: TensorGroup
) -> None:
    """Write the full tensors of all ranks' shards, by file: rank 0 writes, in several files if one would be large.

    If it cannot write, it still takes part in the gathering, and raises SafetensorError or OSError at the end.
    """
    failure: Exception | None = None
    for name, shards in files.items():
        for number, held in enumerate(_gathered(shards, group=group, ranks=ranks)):
            part = (folder / name).with_stem(f"{Path(name).stem}-{number:05d}")
            try:
                save_file(held, part, metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:
                failure = error
    if failure is not None:
        raise failure


def _gathered(shards: Iterable[TensorShard], *, group: ProcessGroup, ranks: TensorGroup) -> Iterator[dict[str, Tensor]]:
    """Yield full tensors by name, as many at a time as rank 0 may hold, nothing on other ranks. Collective."""
    held: dict[str, Tensor] = {}
    for shard in shards:
        whole = (ranks.full_tensor(shard.tensor, shard.shape) if shard.sharded else shard.tensor).cpu()
        if group.rank == 0:
            held[shard.name] = whole.contiguous()
        if sum(tensor.nbytes for tensor in held.values()) >= _FILE_BYTES:
            yield held
            held = {}
    if held:
        yield held
