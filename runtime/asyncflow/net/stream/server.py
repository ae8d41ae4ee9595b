"""Which server it is that answers, as addresses and welcomes say it: bytes drawn at random."""

from __future__ import annotations

import os

SERVER_SIZE = 8
ANYBODY = bytes(SERVER_SIZE)
"""Stands for whichever server answers; no server is called so."""


def new_server() -> bytes:
    """Return what no other server is called."""
    return os.urandom(SERVER_SIZE)
