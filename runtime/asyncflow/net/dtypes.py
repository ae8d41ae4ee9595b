"""What the values of a column may be: dtypes by name, how each lies in memory, and Python values as bytes.

Invariant: what is not in ``DTYPES`` crosses no socket; bytes that came become a Python value of their dtype, or an
error, and never run.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from asyncflow.errors import ProtocolError

BFLOAT16 = "bfloat16"
"""Name of the dtype that numpy lacks: its values travel and lie in memory as their uint16 bits."""
TEXT, BYTES, OBJECT = "text", "bytes", "object"
"""Dtypes of Python values, which lie as uint8: UTF-8, the bytes themselves, and msgpack of plain data."""

_PLAIN = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _PLAIN}
DTYPES["bool"] = np.dtype(np.bool_)
_NAMES = {stored: name for name, stored in DTYPES.items()}
DTYPES[BFLOAT16] = np.dtype("<u2")
DTYPES |= dict.fromkeys((TEXT, BYTES, OBJECT), np.dtype(np.uint8))
"""The dtypes that may cross a socket, by name, and how their values lie in memory."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def name_of(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.name``, which numpy makes of pieces each time."""
    return _NAMES.get(dtype) or dtype.name


def to_bytes(row: Any, dtype: str) -> bytes:
    """Return the bytes of a Python value. Raises ValueError where it is none of ``dtype``."""
    if dtype == OBJECT:
        try:
            return _pack(row)
        except (TypeError, OverflowError, RecursionError) as wrong:
            hint = "numbers up to 64 bits, str, bytes, lists and dicts of them"
            raise ValueError(f"an object row must be plain data ({hint}): {wrong}") from wrong
    if dtype == TEXT and isinstance(row, str):
        return row.encode()
    if dtype == BYTES and isinstance(row, bytes | bytearray | memoryview):
        return bytes(row)
    raise ValueError(f"a row of dtype {dtype} cannot be a {type(row).__name__}")


def from_bytes(data: bytes, dtype: str) -> Any:
    """Return the Python value. Raises ProtocolError where the bytes are none of ``dtype``."""
    if dtype == BYTES:
        return data
    try:
        return data.decode() if dtype == TEXT else _unpack(data)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as wrong:
        raise ProtocolError(f"{len(data)} bytes are no {dtype}: {wrong}", where="column") from wrong
