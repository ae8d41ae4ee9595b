"""Model folders on disk: reading the tensors of their safetensors files, and finding the newest whole model.

A folder is a whole model if it has config.json and its weights, and each weight file is exactly as long as its header
says, so that no file is truncated or still growing. The weights are ``model.safetensors``, or all files that
``model.safetensors.index.json`` lists, with the listed tensors. A folder is *settled* if none of its files (names,
inodes, sizes, modification times) has changed for ``SETTLE_S`` seconds. That also excludes a file that got its full
length first and is being filled. A new model may replace the old one by a rename of its folder, or by writing its files
in any order.

Bytes are read directly into the arrays that serve them. No memory map is used: truncating a mapped file would end the
process with SIGBUS. Instead a truncated file is an error, and the folder is examined again.

Invariant: if a model is ``unchanged`` after it was read, all its bytes belong to one model that was in the folder
during the whole read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from asyncflow.api.weights import PublishedDtype
from asyncflow.errors import DiskError, ManifestError
from asyncflow.models.source import WEIGHTS
from asyncflow.weights.slices import DTYPES, AnyArray

SETTLE_S: Final = 3.0
_INDEX: Final = f"{WEIGHTS}.index.json"
_CONFIG: Final = "config.json"
_DTYPES: Final[Mapping[str, str]] = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "U8": "uint8",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
}
_MOST_HEADER: Final = 100 << 20
_STRIDE: Final = 1 << 24
"""Number of elements read at a time."""
_NUMBERED: Final = re.compile(r"(?:.*[^0-9])?([0-9]{1,9})")

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and modification time of each file of a model."""


class _Place(NamedTuple):
    """Location of a tensor: its file, the offset of its bytes, its dtype (a key of ``DTYPES``) and shape."""

    file: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]


class StoredModel:
    """The whole model in ``folder``.

    dtype: target of the rounding of floating-point tensors, None for no rounding. tensors: dtype (a key of
    ``weights.slices.DTYPES``) and shape of the array that ``read`` fills, by name. Raises ManifestError if the model is
    not whole, or if a tensor has an unsupported dtype.
    """

    def __init__(self, folder: Path, *, dtype: PublishedDtype | None = None) -> None:
        self.folder = folder
        self._stamp: dict[str, tuple[str, int, int, int]] = {}
        try:
            json.loads(self._text(_CONFIG))
            self._places = dict(self._find())
            if not self._places:
                raise ValueError("there are no tensors")
        except FileNotFoundError as error:
            raise _not_whole(folder, f"{Path(error.filename).name} is missing") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_whole(folder, f"{error}") from error
        self.tensors: Mapping[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype if dtype is not None and "float" in place.dtype else place.dtype, place.shape)
            for name, place in self._places.items()
        }

    @property
    def stamp(self) -> Stamp:
        """File attributes of the model at construction, which change with every write."""
        return tuple(sorted(self._stamp.values()))

    @property
    def unchanged(self) -> bool:
        """Return whether all files still have the attributes that they had at construction."""
        try:
            if (self.folder / WEIGHTS).exists() != (WEIGHTS in self._stamp):
                return False
            return all(_mark(name, os.stat(self.folder / name)) == mark for name, mark in self._stamp.items())
        except OSError:
            return False

    def read(self, name: str, into: AnyArray) -> None:
        """Fill the contiguous array ``into`` with a tensor; blocks. Raises DiskError if that fails."""
        place, flat = self._places[name], into.reshape(-1)
        stored = DTYPES[place.dtype]
        try:
            with place.file.open("rb", buffering=0) as file:
                for start in range(0, flat.size, _STRIDE):
                    part = flat[start : start + _STRIDE]
                    same = self.tensors[name][0] == place.dtype
                    raw = part if same else np.empty(part.size, stored)
                    _read_at(file.fileno(), place.begin + start * stored.itemsize, raw)
                    if not same:
                        part[...] = _rounded(raw, part.dtype)
        except OSError as error:
            hint = "It is read again once its folder has settled"
            raise DiskError(f"{name} cannot be read: {error}", where=str(place.file), hint=hint) from error

    def _find(self) -> Iterator[tuple[str, _Place]]:
        """Yield the tensors. Raises OSError, ValueError, KeyError, TypeError or AttributeError for an invalid file."""
        named: dict[str, str] | None = None
        if not (self.folder / WEIGHTS).exists():
            named = json.loads(self._text(_INDEX))["weight_map"]
        for file in sorted(set(named.values())) if named is not None else (WEIGHTS,):
            for name, place in self._header(file):
                if named is None or named.get(name) == file:
                    yield name, place
                    if named is not None:
                        del named[name]
        if named:
            raise ValueError(f"{_INDEX} lists {min(named)} in {named[min(named)]}, which does not contain it")

    def _header(self, name: str) -> Iterator[tuple[str, _Place]]:
        path = self.folder / name
        if path.parent != self.folder:
            raise ValueError(f"{_INDEX} lists {name!r}, which is not in the folder")
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            self._stamp[name] = _mark(name, found)
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MOST_HEADER or 8 + length > found.st_size:
                raise ValueError(f"{name} is cut off or is not a safetensors file")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 0
        for tensor, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
            dtype, shape = _DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"]))
            if dtype is None:
                raise ValueError(f"{tensor} in {name} is {entry['dtype']}, and weights may be {', '.join(_DTYPES)}")
            begin, after = entry["data_offsets"]
            if begin != end or after - begin != prod(shape) * DTYPES[dtype].itemsize:
                raise ValueError(f"the size or offset of {tensor} in {name} contradicts the header")
            end = after
            yield tensor, _Place(path, 8 + length + begin, dtype, shape)
        if found.st_size != 8 + length + end:
            raise ValueError(f"{name} has {found.st_size} bytes, and its header says {8 + length + end}")

    def _text(self, name: str) -> str:
        with (self.folder / name).open(encoding="utf-8") as file:
            self._stamp[name] = _mark(name, os.fstat(file.fileno()))
            return file.read()


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return the subfolders whose names end with a number, highest first; names that start with "." are skipped."""
    found = (
        (int(match[1]), each)
        for each in folder.iterdir()
        if not each.name.startswith(".") and (match := _NUMBERED.fullmatch(each.name)) and each.is_dir()
    )
    return sorted(found, reverse=True)


def newest_config(folder: Path) -> Path:
    """Return ``folder``, or its highest numbered subfolder that has a config. Raises ManifestError if none has one."""
    try:
        models = [folder, *(each for _, each in numbered(folder))]
    except OSError as error:
        raise _not_whole(folder, str(error.strerror)) from error
    if (found := next((each for each in models if (each / _CONFIG).is_file()), None)) is None:
        raise _not_whole(folder, f"neither it nor a numbered subfolder has {_CONFIG}")
    return found


@dataclass(kw_only=True)
class ModelWatch:
    """Finds the next model to publish in ``folder``, which is one model or contains numbered subfolders of models.

    dtype: see ``StoredModel``; settle_s: see the module. waits: the condition that the next publication waits for, ""
    if there is none. If several models are newer, only the newest is published.
    """

    folder: Path
    dtype: PublishedDtype | None = None
    settle_s: float = SETTLE_S
    waits: str = field(default="", init=False)
    _seen: dict[Stamp, float] = field(default_factory=dict, init=False)
    _known: dict[Path, StoredModel] = field(default_factory=dict, init=False)
    _passed: dict[Stamp, str] = field(default_factory=dict, init=False)
    _step: int = field(default=-1, init=False)

    def look(self, now: float) -> tuple[int, StoredModel] | None:
        """Return the step and the next model, whole and settled at ``now`` (seconds, monotonic), or None."""
        self.waits, seen, self._seen = "", self._seen, {}
        known, self._known = self._known, {}
        try:
            for step, folder in self._candidates():
                model = self._whole(folder, known.get(folder))
                if model is None or model.stamp in self._passed:
                    self.waits = self.waits or (self._passed[model.stamp] if model is not None else "")
                    continue
                since = self._seen[model.stamp] = seen.get(model.stamp, now)
                if now - since >= self.settle_s:
                    return step, model
                self.waits = f"{folder} to stay unchanged for {self.settle_s:g} s"
                break
        except OSError as error:
            self.waits = f"{self.folder}: {error.strerror}"
        return None

    def take(self, step: int, model: StoredModel) -> None:
        """Record that ``model`` was published as θ_step."""
        self._step, self._passed = step, {model.stamp: ""}

    def skip(self, model: StoredModel, why: str = "") -> None:
        """Record that ``model`` is not to be published; why: shown in ``waits``, if the user must correct something."""
        self._passed[model.stamp] = why

    def _candidates(self) -> list[tuple[int, Path]]:
        """Return the steps and folders of candidates for the next model, newest first. Raises OSError."""
        if not (self.folder / _CONFIG).exists() and (models := numbered(self.folder)):
            return [(number, each) for number, each in models if number > self._step]
        return [(self._step + 1, self.folder)]

    def _whole(self, folder: Path, known: StoredModel | None) -> StoredModel | None:
        """Return the whole model in a folder, or None; headers of an unchanged model are not read again."""
        try:
            model = known if known is not None and known.unchanged else StoredModel(folder, dtype=self.dtype)
        except ManifestError as error:
            self.waits = self.waits or str(error)
            return None
        self._known[folder] = model
        return model


def _mark(name: str, found: os.stat_result) -> tuple[str, int, int, int]:
    return name, found.st_ino, found.st_size, found.st_mtime_ns


def _read_at(file: int, offset: int, into: AnyArray) -> None:
    """Fill an array with the bytes at ``offset``. Raises OSError if the file is too short."""
    left = into.view(np.uint8).data
    while left:
        count = os.preadv(file, [left], offset)
        if count == 0:
            raise OSError("the file ends before it")
        left, offset = left[count:], offset + count


def _rounded(raw: AnyArray, dtype: np.dtype[np.generic]) -> AnyArray:
    """Return numbers (uint16: bfloat16 bits) as float32, or as bits of the nearest bfloat16, ties to even."""
    exact = (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.uint16 else raw.astype(np.float32)
    if dtype != np.uint16:
        return exact
    bits = exact.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(exact), (bits >> 16) | 0x40, nearest).astype(np.uint16)


def _not_whole(folder: Path, why: str) -> ManifestError:
    hint = f"Use a folder with {_CONFIG} and {WEIGHTS}, or {_INDEX} and the files that it names"
    return ManifestError(f"no whole model: {why}", where=str(folder), hint=hint)
