"""Models as they lie in folders: which tensors their safetensors files have, and which folder is whole and newer.

A folder is a whole model when it has config.json and its weights, ``model.safetensors`` or all files that
``model.safetensors.index.json`` names with the tensors that it says are there, and each file is exactly as long as its
header says: so none is cut off, or still grows. It is *settled* when nothing of it (names, inodes, sizes, times of
change) has changed for ``SETTLE_S`` seconds, which leaves no file that was given its length first and is filled now.
Who replaces a model may rename a folder, which is seen at once as a whole, or write files in whatever order.

Bytes are read straight to where they are served from: under a memory map, a file that somebody cuts off would end the
process by SIGBUS; so it is an error, and the folder is looked at again.

Invariant: what was read and is then ``unchanged`` is one model, as it lay in the folder for all that time.
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
"""Elements that are read at a time."""
_NUMBERED: Final = re.compile(r"(?:.*[^0-9])?([0-9]{1,9})")

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of each file of a model."""


class _Place(NamedTuple):
    """Place of a tensor: its file, where its bytes begin in that, its dtype (a key of ``DTYPES``) and shape."""

    file: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]


class StoredModel:
    """The whole model in ``folder``.

    dtype: to which floating-point tensors are rounded as they are read, None for none. tensors: by name the dtype (a
    key of ``weights.slices.DTYPES``) and shape of what ``read`` gives. Raises ManifestError where it is not whole, or
    has tensors that weights cannot be.
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
        """Marks of the files of the model, which change with every write, as they were when this was made."""
        return tuple(sorted(self._stamp.values()))

    @property
    def unchanged(self) -> bool:
        """Return whether all files are still those that they were when this was made."""
        try:
            if (self.folder / WEIGHTS).exists() != (WEIGHTS in self._stamp):
                return False
            return all(_mark(name, os.stat(self.folder / name)) == mark for name, mark in self._stamp.items())
        except OSError:
            return False

    def read(self, name: str, into: AnyArray) -> None:
        """Fill ``into``, contiguous, with a tensor; blocks. Raises DiskError where the file is not what it was."""
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
        """Yield the tensors. Raises OSError, ValueError, KeyError, TypeError or AttributeError for a wrong file."""
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
            raise ValueError(f"{_INDEX} names {min(named)}, which {named[min(named)]} has not")

    def _header(self, name: str) -> Iterator[tuple[str, _Place]]:
        path = self.folder / name
        if path.parent != self.folder:
            raise ValueError(f"{_INDEX} names {name!r}, which is not in the folder")
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            self._stamp[name] = _mark(name, found)
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MOST_HEADER or 8 + length > found.st_size:
                raise ValueError(f"{name} is cut off, or no safetensors file")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 0
        for tensor, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
            dtype, shape = _DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"]))
            if dtype is None:
                raise ValueError(f"{tensor} in {name} is {entry['dtype']}, and weights may be {', '.join(_DTYPES)}")
            begin, after = entry["data_offsets"]
            if begin != end or after - begin != prod(shape) * DTYPES[dtype].itemsize:
                raise ValueError(f"{tensor} in {name} does not lie where its header says")
            end = after
            yield tensor, _Place(path, 8 + length + begin, dtype, shape)
        if found.st_size != 8 + length + end:
            raise ValueError(f"{name} has {found.st_size} bytes, and its header says {8 + length + end}")

    def _text(self, name: str) -> str:
        with (self.folder / name).open(encoding="utf-8") as file:
            self._stamp[name] = _mark(name, os.fstat(file.fileno()))
            return file.read()


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return the subfolders whose names end with a number, the highest first, and that; "." begins a draft's name."""
    found = (
        (int(match[1]), each)
        for each in folder.iterdir()
        if not each.name.startswith(".") and (match := _NUMBERED.fullmatch(each.name)) and each.is_dir()
    )
    return sorted(found, reverse=True)


def newest_config(folder: Path) -> Path:
    """Return ``folder``, or its highest numbered subfolder, that has a config. Raises ManifestError where none has."""
    try:
        models = [folder, *(each for _, each in numbered(folder))]
    except OSError as error:
        raise _not_whole(folder, str(error.strerror)) from error
    if (found := next((each for each in models if (each / _CONFIG).is_file()), None)) is None:
        raise _not_whole(folder, f"neither it nor a numbered subfolder has {_CONFIG}")
    return found


@dataclass(kw_only=True)
class ModelWatch:
    """Finds the next model to publish in ``folder``, which is one model, or has numbered subfolders that are.

    dtype: see ``StoredModel``; settle_s: see the module. waits: what keeps the next one from being published, "" where
    there is none. Of several that are newer the newest is next: the others are never published.
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
        """Return the step and the model that is next, whole and settled at ``now`` (seconds, monotonic), or None."""
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
                self.waits = f"{folder} to stay as it is for {self.settle_s:g} s"
                break
        except OSError as error:
            self.waits = f"{self.folder}: {error.strerror}"
        return None

    def take(self, step: int, model: StoredModel) -> None:
        """Note that ``model`` was published as θ_step."""
        self._step, self._passed = step, {model.stamp: ""}

    def pass_over(self, model: StoredModel, why: str = "") -> None:
        """Note that ``model`` is not to be published, and why nothing newer is, where somebody has to mend that."""
        self._passed[model.stamp] = why

    def _candidates(self) -> list[tuple[int, Path]]:
        """Return the steps and folders of what may be next, the newest first. Raises OSError."""
        if not (self.folder / _CONFIG).exists() and (models := numbered(self.folder)):
            return [(number, each) for number, each in models if number > self._step]
        return [(self._step + 1, self.folder)]

    def _whole(self, folder: Path, known: StoredModel | None) -> StoredModel | None:
        """Return the model in a folder, None where none is whole; its headers are read again only once it changed."""
        try:
            model = known if known is not None and known.unchanged else StoredModel(folder, dtype=self.dtype)
        except ManifestError as error:
            self.waits = self.waits or str(error)
            return None
        self._known[folder] = model
        return model


def _mark(name: str, found: os.stat_result) -> tuple[str, int, int, int]:
    return name, found.st_ino, found.st_size, found.st_mtime_ns


def _read_at(file: int, at: int, into: AnyArray) -> None:
    """Fill an array with the bytes at ``at``. Raises OSError where the file ends before."""
    left = into.view(np.uint8).data
    while left:
        count = os.preadv(file, [left], at)
        if count == 0:
            raise OSError("the file ends before it")
        left, at = left[count:], at + count


def _rounded(raw: AnyArray, dtype: np.dtype[np.generic]) -> AnyArray:
    """Round numbers (uint16: the bits of bfloat16) to float32, or to the bits of the nearest bfloat16, ties to even."""
    exact = (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.uint16 else raw.astype(np.float32)
    if dtype != np.uint16:
        return exact
    bits = exact.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(exact), (bits >> 16) | 0x40, nearest).astype(np.uint16)


def _not_whole(folder: Path, why: str) -> ManifestError:
    hint = f"Give a folder with {_CONFIG} and {WEIGHTS}, or {_INDEX} and the files that it names"
    return ManifestError(f"no whole model: {why}", where=str(folder), hint=hint)
