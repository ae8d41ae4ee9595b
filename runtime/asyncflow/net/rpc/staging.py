"""Where what comes lies until it is known where it stays, and what becomes of memory that was freed.

Invariant: a process that receives asks the kernel for new pages only where it grows.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20


def staging() -> memoryview:
    """Make memory for inboxes of this process, which from now on uses freed memory again for what comes."""
    _keep_freed()
    return memoryview(bytearray(1 << 16))


@functools.cache
def _keep_freed() -> None:
    """Let the allocator keep what was freed: to get each page anew from the kernel takes as long as to receive it.

    Threads that come later share one arena, since of those of their own they give back whole heaps.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
