"""Tensors in safetensors files, each full in one file or as slices in several files.

The metadata of a file with slices contains the offset of each slice, in the format of torch's distributed checkpoints
for Hugging Face (``DCP_SHARDING_INFO``). A file without this metadata contains full tensors. So other programs that
know the format can read these files, and any number of ranks can read tensors written by any other number.

Invariants: ``read`` fills the whole requested box or raises CheckpointError. It reads only the bytes that it needs.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from asyncflow.errors import CheckpointError, DiskError
from asyncflow.weights.sender import PublishedSlice
from asyncflow.weights.slices import AnyArray, Box, intersect, subtract

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_SAMPLE = 1 << 16


class SliceFiles:
    """The tensors in ``files``; framework: type of the arrays that are read, torch's ("pt") or numpy's.

    shapes: shapes of the full tensors, by name; dtypes: dtypes in safetensors' notation, such as F32 and BF16. Raises
    CheckpointError if a file cannot be read.
    """

    def __init__(self, files: Iterable[Path], *, framework: Literal["pt", "numpy"]) -> None:
        self._held: dict[str, list[tuple[Path, Any, Box]]] = {}
        self.dtypes: dict[str, str] = {}
        for path in files:
            try:
                file: Any = safe_open(path, framework=framework)
                offsets = _offsets(file.metadata() or {})
                for name in file.keys():  # noqa: SIM118  an open file is not a mapping
                    stored = file.get_slice(name)
                    self.dtypes[name] = stored.get_dtype()
                    extent = tuple(stored.get_shape())
                    box = Box(offsets.get(name, (0,) * len(extent)), extent)
                    self._held.setdefault(name, []).append((path, file, box))
            except (OSError, SafetensorError, msgspec.MsgspecError) as error:
                raise _unreadable(path, error) from error
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(max(ends) for ends in zip(*(_end(box) for _, _, box in held), strict=True))
            for name, held in self._held.items()
        }

    def mark(self) -> int:
        """Return a checksum of names, sizes and some bytes of the files, which very likely detects changes."""
        mark = 0
        for path in sorted({path for held in self._held.values() for path, _, _ in held}):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(size // 2)
                mark = zlib.crc32(f"{path.name} {size} ".encode() + file.read(_SAMPLE), mark)
        return mark

    def read(self, name: str, box: Box, into: Any) -> None:
        """Copy ``box`` of a tensor into ``into``, an array or tensor with the box's extent, converting to its dtype."""
        missing = [box]
        for path, file, held in self._held.get(name, []):
            common = intersect(box, held) if box.extent else box
            if common is None:
                continue
            try:
                stored = file.get_slice(name)[within(common, held)] if box.extent else file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error
            into[within(common, box)] = stored
            missing = [rest for part in missing for rest in subtract(part, [common])]
        if any(part.volume for part in missing):
            where = str(self._held[name][0][0].parent) if name in self._held else ""
            raise CheckpointError(f"no file contains {missing[0]} of {name!r}", where=where, hint="A file is missing")

    def array(self, name: str, box: Box) -> AnyArray:
        """Return ``box`` of a tensor, if the files were opened for numpy."""
        _, file, held = self._held[name][0]
        stored = file.get_slice(name)[:0] if held.extent else file.get_tensor(name)
        array: AnyArray = np.empty(box.extent, stored.dtype)
        self.read(name, box, array)
        return array


def write_slices(file: Path, slices: Mapping[str, PublishedSlice]) -> None:
    """Write numpy slices into a safetensors file, or no file for no slices. Raises DiskError if that fails."""
    if not slices:
        return
    arrays = {name: np.asarray(one.array, order="C") for name, one in slices.items()}
    try:
        save_file(arrays, file, metadata=slice_metadata({name: one.offset for name, one in slices.items()}))
    except SafetensorError as error:
        raise unwritable(file, error) from error


def unwritable(path: Path, error: Exception) -> DiskError:
    """Return the error for a file or folder that cannot be written."""
    hint = "Free space, or use a folder that this process may write to"
    return DiskError(f"the weights cannot be written: {error}", where=str(path), hint=hint)


def slice_metadata(offsets: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the metadata of a file whose slices start at ``offsets``."""
    info = {name: {_OFFSETS: offset} for name, offset in offsets.items()}
    return {_SHARDING: msgspec.json.encode(info).decode()}


def share_of(shape: tuple[int, ...], *, rank: int, world: int) -> Box:
    """Return the box of a tensor that rank ``rank`` of ``world`` holds: rows, divided as by ``torch.chunk`` and FSDP2.

    All ranks hold a tensor without axes. The last ranks may hold nothing.
    """
    if not shape or world == 1:
        return Box.whole(shape)
    rows = -(-shape[0] // world)
    start = min(rank * rows, shape[0])
    return Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))


def within(box: Box, held: Box) -> tuple[slice, ...]:
    """Return the index of ``box`` in an array of ``held``."""
    return tuple(
        slice(start - base, start - base + size)
        for start, base, size in zip(box.offset, held.offset, box.extent, strict=True)
    )


def _end(box: Box) -> tuple[int, ...]:
    return tuple(start + size for start, size in zip(box.offset, box.extent, strict=True))


def _offsets(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    if _SHARDING not in metadata:
        return {}
    info = msgspec.json.decode(metadata[_SHARDING], type=dict[str, dict[str, tuple[int, ...]]])
    return {name: stored[_OFFSETS] for name, stored in info.items()}


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the file cannot be read: {error}", where=str(path), hint="It may be truncated: copy it again"
    )
