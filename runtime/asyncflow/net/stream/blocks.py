"""How messages lie in a byte stream.

A message of parts is one *block* (how many parts, the size of each, the bytes of the small ones), behind its length,
then each large part. Large parts are neither joined nor copied: they are sent from
where they lie and received where they stay.
"""

from __future__ import annotations

import functools
import struct

MAX_PARTS = 1 << 17
LENGTH = struct.Struct("<Q")
COUNT = struct.Struct("<I")


@functools.lru_cache(64)
def table_of(count: int) -> struct.Struct:
    """Return the beginning of the block of ``count`` parts: their number, and the size of each."""
    return struct.Struct(f"<I{count}Q")
