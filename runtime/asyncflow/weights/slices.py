"""Boxes of tensors, the arithmetic that converts between any two sharded layouts, and the host memory of versions.

A box is an axis-aligned region of one tensor in global coordinates. An ``Arena`` is the host memory of one version: one
contiguous block that contains a box of each tensor.

Invariants: the boxes that ``subtract``, ``split`` or ``route`` return are disjoint, non-empty and inside the requested
boxes. Together with the boxes reported missing they cover all of the request. ``split`` returns its boxes in C order.
The memory of an arena is returned to its allocator only when the arena and all views of it have been deleted, so a
process that still computes with a version, or sends it, never loses its memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import StaleHandle

H = TypeVar("H", bound=Hashable)
AnyArray = NDArray[np.generic]

DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.uint16),
    **{
        name: np.dtype(name)
        for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    },
}
"""The dtypes that weights may have. A numpy uint16 array always means the bits of bfloat16."""

_ALIGNMENT = 64

Allocate = Callable[[int], mmap.mmap | memoryview]
"""Returns writable memory of at least so many bytes, aligned to 64 bytes; it lives as long as a view of it."""


def anonymous(nbytes: int) -> mmap.mmap:
    """Return zeroed memory that no other process shares."""
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A region of a tensor: along axis i the indices offset[i] <= x < offset[i] + extent[i]. Rank 0 is one element."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return the box that covers a tensor of ``shape``."""
        extent = tuple(int(size) for size in shape)
        return cls((0,) * len(extent), extent)

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.extent)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the box is well formed and lies inside a tensor of ``shape``."""
        return len(self.offset) == len(self.extent) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= limit
            for start, size, limit in zip(self.offset, self.extent, shape, strict=True)
        )


def intersect(a: Box, b: Box) -> Box | None:
    """Return the region that two boxes of one tensor share, or None if it is empty."""
    start = tuple(map(max, a.offset, b.offset))
    stop = (min(i + x, j + y) for i, x, j, y in zip(a.offset, a.extent, b.offset, b.extent, strict=True))
    extent = tuple(end - begin for begin, end in zip(start, stop, strict=True))
    return Box(start, extent) if all(size > 0 for size in extent) else None


def hull(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that contains all of ``boxes``, of which there is at least one."""
    found = list(boxes)
    start = tuple(map(min, zip(*(box.offset for box in found), strict=True)))
    stops = ([i + x for i, x in zip(box.offset, box.extent, strict=True)] for box in found)
    return Box(start, tuple(end - begin for begin, end in zip(start, map(max, zip(*stops, strict=True)), strict=True)))


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return the rest of ``box`` outside ``others``, as disjoint boxes."""
    left = [box] if box.volume else []
    for other in others:
        left = [rest for part in left for rest in _without(part, other)]
    return left


def _without(box: Box, other: Box) -> Iterator[Box]:
    common = intersect(box, other)
    if common is None:
        yield box
        return
    offset, extent = list(box.offset), list(box.extent)
    for axis in range(len(offset)):
        before = common.offset[axis] - offset[axis]
        after = extent[axis] - before - common.extent[axis]
        for start, size in ((offset[axis], before), (common.offset[axis] + common.extent[axis], after)):
            if size > 0:
                yield Box((*offset[:axis], start, *offset[axis + 1 :]), (*extent[:axis], size, *extent[axis + 1 :]))
        offset[axis], extent[axis] = common.offset[axis], common.extent[axis]


def split(box: Box, limit: int) -> Iterator[Box]:
    """Cut ``box`` into boxes of at most ``limit`` elements (at least 1), contiguous in C order and in that order."""
    if not box.volume:
        return
    inner, axis = 1, len(box.extent)
    while axis and inner * box.extent[axis - 1] <= limit:
        axis -= 1
        inner *= box.extent[axis]
    if not axis:
        yield box
        return
    axis -= 1
    rows = max(1, limit // inner)
    for outer in np.ndindex(*box.extent[:axis]):
        head = tuple(start + index for start, index in zip(box.offset, outer, strict=False))
        for begin in range(0, box.extent[axis], rows):
            yield Box(
                (*head, box.offset[axis] + begin, *box.offset[axis + 1 :]),
                ((1,) * axis) + (min(rows, box.extent[axis] - begin), *box.extent[axis + 1 :]),
            )


def route(wanted: Iterable[Box], sources: Mapping[H, Box | None]) -> tuple[dict[H, list[Box]], list[Box]]:
    """Return the boxes to take from each source for the wanted boxes of one tensor, and the boxes that no source has.

    sources: the box of this tensor that each source holds (None: nothing), in order of preference.
    """
    left = [box for box in wanted if box.volume]
    routes: dict[H, list[Box]] = {}
    for source, held in sources.items():
        if held is None or not left:
            continue
        shared = [common for box in left if (common := intersect(box, held)) is not None]
        if shared:
            routes[source] = shared
            left = [part for box in left for part in subtract(box, [held])]
    return routes, left


def view(array: AnyArray, at: Box, box: Box) -> AnyArray:
    """Return a view of the part ``box`` of ``array``, which holds the region ``at``; ValueError if it is outside."""
    inside = Box(tuple(map(int.__sub__, box.offset, at.offset)), box.extent)
    if not inside.fits(at.extent):
        raise ValueError(f"{box} does not lie inside {at}")
    inner = (slice(start, start + size) for start, size in zip(inside.offset, inside.extent, strict=True))
    index: tuple[Any, ...] = (*inner, ...)
    return cast(AnyArray, array[index])


class Arena:
    """Memory for ``boxes``: for each tensor name its dtype (a key of ``DTYPES``) and the box of it that is stored.

    allocate: returns the memory, whose content is overwritten; nbytes: size of the boxes without padding; boxes: the
    stored box of each tensor; arrays: a writable array of each box, by tensor name.
    """

    def __init__(self, boxes: Mapping[str, tuple[str, Box]], *, allocate: Allocate = anonymous) -> None:
        starts, end, self.nbytes = {}, 0, 0
        for name, (dtype, box) in boxes.items():
            starts[name] = end
            nbytes = box.volume * DTYPES[dtype].itemsize
            self.nbytes += nbytes
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = allocate(max(end, 1))
        self.boxes: Mapping[str, Box] = {name: box for name, (_, box) in boxes.items()}
        self.arrays: Mapping[str, AnyArray] = {
            name: np.ndarray(box.extent, dtype=DTYPES[dtype], buffer=memory, offset=starts[name])
            for name, (dtype, box) in boxes.items()
        }

    @property
    def tensors(self) -> Mapping[str, AnyArray]:
        """The array of each stored box, by tensor name: read-only views, no copy."""
        views = {}
        for name, array in self.arrays.items():
            views[name] = array.view()
            views[name].flags.writeable = False
        return MappingProxyType(views)

    def is_like(self, other: Arena) -> bool:
        """Return whether both arenas store the same boxes of the same tensors, with equal element sizes."""
        return self.boxes == other.boxes and all(
            array.itemsize == other.arrays[name].itemsize for name, array in self.arrays.items()
        )

    def read(self, tensor: str, box: Box) -> memoryview:
        """Return the bytes of ``box`` of ``tensor`` in C order: a view if they are contiguous, otherwise a copy.

        Raises StaleHandle if the box is not stored here.
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
        """Copy ``data``, the bytes of ``box`` in C order, into the arena. Raises ValueError if the size differs."""
        target = view(self.arrays[tensor], self.boxes[tensor], box)
        target[...] = np.frombuffer(data, dtype=target.dtype).reshape(box.extent)
