"""Pieces of tensors: the plain tensor that a rank holds, and where it lies in the whole one.

The optimizer, checkpoints and publications work on pieces, so they do not know whether a model is cut over ranks.

Invariant: ranks cut tensors by ``share_of``, as FSDP2 does, so the pieces of all ranks tile every tensor that is cut;
any other is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.train.backends.torch.model import named_weights, open_model
from asyncflow.train.backends.torch.ranks import TensorGroup
from asyncflow.train.ranks import Group, jointly
from asyncflow.train.slice_files import SliceFiles, share_of, slice_metadata, within
from asyncflow.weights.slices import Box

_FILE_BYTES = 1 << 30
"""Bytes of gathered tensors that rank 0 holds at once where it writes for all ranks."""

Read: TypeAlias = Callable[[str, Box, Tensor], None]
"""Copies a box of a tensor, by name, into a tensor of the box's extent."""


class Piece(NamedTuple):
    """Box ``box`` of the tensor ``name``, whose whole shape is ``shape``; cut: other ranks hold the rest."""

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]
    cut: bool = False

    def beside(self, kind: str, tensor: Tensor) -> Piece:
        """Return the piece of the tensor ``kind``/name that lies like this one, or is one number for all of it."""
        name = f"{kind}/{self.name}"
        return self._replace(name=name, tensor=tensor) if tensor.ndim else Piece(name, tensor, Box.whole(()), ())


def piece_of(name: str, tensor: Tensor) -> Piece:
    """Return what this rank holds of a tensor, sharing its memory."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(name, tensor.detach(), Box.whole(shape), shape)
    mesh = tensor.device_mesh
    box = share_of(shape, rank=mesh.get_local_rank(), world=mesh.size())
    return Piece(name, tensor.detach().to_local(), box, shape, cut=True)


def misfit(pieces: Iterable[Piece], files: SliceFiles) -> str | None:
    """Return the first tensor of ``pieces`` that ``files`` have in another shape or not at all, None where all fit."""
    return next((piece.name for piece in pieces if files.shapes.get(piece.name) != piece.shape), None)


def narrowed(pieces: Iterable[Piece], files: SliceFiles) -> bool:
    """Return whether ``files`` have float32 where ``pieces`` are bfloat16, so that reading would round."""
    return any(piece.tensor.dtype == torch.bfloat16 and files.dtypes[piece.name] == "F32" for piece in pieces)


def fill(pieces: Iterable[Piece], read: Read | None, *, group: Group, ranks: TensorGroup) -> None:
    """Fill ``pieces``: each rank reads its own, or, unless all can, rank 0 reads whole tensors and sends them.

    read: None where this rank, not rank 0, cannot. Raises CheckpointError on all ranks where one cannot read its own.
    """
    if group.gather(np.array([read is not None]), what="who reads the tensors").all():
        assert read is not None
        with jointly(group, what="reading tensors"):
            for piece in pieces:
                read(piece.name, piece.box, piece.tensor)
        return
    for piece in pieces:
        whole = torch.empty(piece.shape, dtype=piece.tensor.dtype)
        if group.rank == 0 and read is not None:
            read(piece.name, Box.whole(piece.shape), whole)
        ranks.from_first(whole)
        piece.tensor.copy_(whole[within(piece.box, Box.whole(piece.shape))])


def read_first(
    folder: Path, pieces: Sequence[Piece], *, longest: int | None = None, group: Group, ranks: TensorGroup
) -> None:
    """Fill ``pieces`` with the weights of a model folder; collective. longest: as for ``open_model``.

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
        if misfit(pieces, files) is None:
            read, mark = files.read, files.mark()
        elif group.rank == 0:
            read = _of_model(open_model(folder, weights=True, device=torch.device("cpu"), longest=longest))
    if (group.gather(np.array([mark]), what="which weights the ranks see") != mark).any() and group.rank > 0:
        read = None
    fill(pieces, read, group=group, ranks=ranks)


def _of_model(model: nn.Module) -> Read:
    weights = dict(named_weights(model))

    def read(name: str, box: Box, into: Tensor) -> None:
        into.copy_(weights[name].detach()[within(box, Box.whole(weights[name].shape))])

    return read


def read_saved(
    checkpoint: Path | None,
    name: str,
    pieces: Sequence[Piece],
    *,
    optional: Piece | None = None,
    group: Group,
    ranks: TensorGroup,
) -> bool:
    """Fill ``pieces`` from what any number of ranks saved under ``name``; collective.

    checkpoint: its folder, None on a rank other than 0 that does not see it. optional: is filled, and True returned,
    where it was saved in this shape. Raises CheckpointError where tensors are missing, do not fit, or would be rounded.
    """
    files: SliceFiles | None = None
    there = False
    with jointly(group, what=f"opening {name}"):
        if checkpoint is not None:
            found = sorted(checkpoint.rglob(f"{Path(name).stem}*{Path(name).suffix}"))
            files = SliceFiles(found, framework="pt")
            there = optional is not None and files.shapes.get(optional.name) == optional.shape
            if odd := misfit(pieces, files):
                raise CheckpointError(
                    f"tensors of the checkpoint do not fit the model, first at {odd}",
                    where=str(checkpoint),
                    hint="Resume with the model that the run began with.",
                )
            if narrowed(pieces, files):
                raise CheckpointError(
                    "the checkpoint's weights are float32, and reading them in bfloat16 would round them",
                    where=str(checkpoint),
                    hint="Resume with the precision that the run began with, or begin a new run with the weights that "
                    "`asyncflow model export` writes.",
                )
    there = bool(group.gather(np.array([there]), what=f"what is in {name}")[0, 0])
    more = [optional] if optional is not None and there else []
    fill([*pieces, *more], files.read if files is not None else None, group=group, ranks=ranks)
    return there


def copied(pieces: Iterable[Piece], *, group: Group) -> list[Piece]:
    """Return copies, in host memory, of the pieces that this rank writes: rank 0 alone writes what is not cut."""
    mine = [piece for piece in pieces if piece.tensor.numel() and (group.rank == 0 or piece.cut)]
    return [piece._replace(tensor=piece.tensor.to("cpu", copy=True).contiguous()) for piece in mine]


def write_pieces(file: Path, pieces: Sequence[Piece]) -> None:
    """Write ``pieces``, of host memory, into a safetensors file."""
    metadata = {"format": "pt"}
    if any(piece.cut for piece in pieces):
        metadata |= slice_metadata({piece.name: piece.box.offset for piece in pieces})
    save_file({piece.name: piece.tensor for piece in pieces}, file, metadata=metadata)


def write_gathered(file: Path, pieces: Iterable[Piece], *, group: Group, ranks: TensorGroup) -> None:
    """Write the whole tensors of all ranks' ``pieces``: rank 0 writes, into several files where they are large."""
    held: dict[str, Tensor] = {}
    number = 0
    for piece in pieces:
        whole = (ranks.whole(piece.tensor, piece.shape) if piece.cut else piece.tensor).cpu()
        if group.rank == 0:
            held[piece.name] = whole.contiguous()
        if sum(tensor.nbytes for tensor in held.values()) >= _FILE_BYTES:
            save_file(held, file.with_stem(f"{file.stem}-{number:05d}"), metadata={"format": "pt"})
            held, number = {}, number + 1
    if held:
        save_file(held, file.with_stem(f"{file.stem}-{number:05d}"), metadata={"format": "pt"})
