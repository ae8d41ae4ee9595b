"""The host memory of one version: one anonymous mapping with a box of each tensor in it.

Invariant: the memory goes back to the system when the arena and every view of it are gone, and not before; so whoever
still computes with a version, or sends it, never sees it vanish.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from asyncflow.errors import StaleHandle
from asyncflow.weights.manifest import DTYPES
from asyncflow.weights.slices import AnyArray, Box, view

_ALIGNMENT = 64


class Arena:
    """Zeroed memory for ``boxes``: by tensor name its dtype (a key of ``DTYPES``) and the box of it that lies here.

    nbytes: of the boxes, without padding; boxes: by name what lies here; arrays: by name a writable array of the box.
    """

    def __init__(self, boxes: Mapping[str, tuple[str, Box]]) -> None:
        starts, end, self.nbytes = {}, 0, 0
        for name, (dtype, box) in boxes.items():
            starts[name] = end
            nbytes = box.volume * DTYPES[dtype].itemsize
            self.nbytes += nbytes
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.boxes: Mapping[str, Box] = {name: box for name, (_, box) in boxes.items()}
        self.arrays: Mapping[str, AnyArray] = {
            name: np.ndarray(box.extent, dtype=DTYPES[dtype], buffer=memory, offset=starts[name])
            for name, (dtype, box) in boxes.items()
        }

    @property
    def tensors(self) -> Mapping[str, AnyArray]:
        """By name the array of the box that lies here: read-only views, no copy."""
        views = {}
        for name, array in self.arrays.items():
            views[name] = array.view()
            views[name].flags.writeable = False
        return MappingProxyType(views)

    def read(self, tensor: str, box: Box) -> memoryview:
        """Return the bytes of ``box`` of ``tensor`` in C order: in place where contiguous, else a copy.

        Raises StaleHandle where they do not lie here.
        """
        at = self.boxes.get(tensor)
        if at is None or len(at.offset) != len(box.offset):
            raise StaleHandle(f"no tensor {tensor!r} of {len(box.offset)} axes", where="weights arena")
        try:
            part = view(self.arrays[tensor], at, box)
        except ValueError as error:
            raise StaleHandle(f"{tensor!r}: {error}", where="weights arena") from error
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data.toreadonly()

    def write(self, tensor: str, box: Box, data: memoryview) -> None:
        """Copy ``data``, the bytes of ``box`` in C order, to its place. Raises ValueError where the size differs."""
        place = view(self.arrays[tensor], self.boxes[tensor], box)
        place[...] = np.frombuffer(data, dtype=place.dtype).reshape(box.extent)
