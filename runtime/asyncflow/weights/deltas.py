"""Differences between two contents of one region: which elements changed, and their new values.

At a small learning rate few elements of a low-precision version differ from the previous version, most of them by one
unit in the last place, and they are spread over the whole tensor. A difference is encoded as the number of changed
elements and the number of gap bytes (two uint32, little endian), then three streams:

* gaps: the number of unchanged elements before each changed one (uint8; 255: no changed one after 255 elements yet).
* steps: the change of the element's bits as an integer (int8; -128 means that the third stream has its new value).
* new values.

Invariants: ``restored(old, difference(old, new)) == new``. A difference is shorter than the new bytes. For any input
bytes, ``restored`` returns as many bytes as ``old`` has, or raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HEAD = struct.Struct("<II")
_UNSIGNED: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
_SIGNED: Mapping[int, np.dtype[Any]] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_MORE = 255
_ELSEWHERE = -128
_SAMPLE = 1024
_WORTH = 0.8


def difference(old: memoryview, new: memoryview, *, itemsize: int) -> bytes | None:
    """Return the difference that turns ``old`` into ``new``, elements of ``itemsize`` bytes; None if it is not shorter.

    A sample of the elements is compared first; if too many of them differ, the rest is not compared.
    """
    before, after = (np.frombuffer(data, _UNSIGNED[itemsize]) for data in (old, new))
    stride = max(1, before.size // _SAMPLE)
    sample = before[::stride] != after[::stride]
    if np.count_nonzero(sample) > _WORTH * sample.size:
        return None
    places = np.flatnonzero(before != after)
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // _MORE + 1)
    where = np.full(ends[-1] if ends.size else 0, _MORE, np.uint8)
    where[ends - 1] = gaps % _MORE
    values = after[places]
    steps = (values - before[places]).view(_SIGNED[itemsize])
    far = (steps <= _ELSEWHERE) | (steps > 127)
    short = np.where(far, _ELSEWHERE, steps).astype(np.int8)
    nbytes = _HEAD.size + where.size + short.size + values[far].nbytes
    if nbytes >= new.nbytes:
        return None
    delta: bytes = _HEAD.pack(places.size, where.size) + where.tobytes() + short.tobytes() + values[far].tobytes()
    return delta


def restored(old: memoryview, delta: memoryview, *, itemsize: int) -> memoryview:
    """Apply ``delta``, made by ``difference``, to ``old``. Raises ValueError if it is not a valid difference."""
    result = np.frombuffer(old, _UNSIGNED[itemsize]).copy()
    if delta.nbytes < _HEAD.size:
        raise ValueError(f"{delta.nbytes} bytes are too short for a difference")
    count, codes = _HEAD.unpack_from(delta)
    streams = np.frombuffer(delta, np.uint8, offset=_HEAD.size)
    if count + codes > streams.size:
        raise ValueError(f"{streams.size} bytes do not hold {codes} gaps and {count} steps")
    places = _places(streams[:codes])
    if places.size != count or (count and places[-1] >= result.size):
        raise ValueError(f"the gaps are not those of {count} of {result.size} elements")
    steps = streams[codes : codes + count].view(np.int8)
    far = steps == _ELSEWHERE
    rest = streams[codes + count :]
    if rest.size != itemsize * np.count_nonzero(far):
        raise ValueError(f"{rest.size} bytes are not {np.count_nonzero(far)} new values")
    result[places] += steps.astype(_SIGNED[itemsize]).view(_UNSIGNED[itemsize])
    result[places[far]] = np.frombuffer(rest, _UNSIGNED[itemsize])
    whole: memoryview = result.view(np.uint8).data
    return whole


def _places(gaps: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the positions that the gaps encode, in ascending order."""
    last = gaps != _MORE
    if gaps.size and not last[-1]:
        raise ValueError("the gaps end in the middle of one")
    places: NDArray[np.int64] = np.cumsum(gaps + last, dtype=np.int64)[last] - 1
    return places
