"""Conversion of users' values to columns and back; reading returns exactly the values that were put.

Arrays and tensors (numpy and torch, including bfloat16) stay arrays. Strings, bytes and plain objects (dicts, lists,
tuples, numbers, None, arrays in them) keep their types. Rows of one column have the same dtype and the same dimensions
after the first; a column whose rows all have one shape is returned stacked, as a view.

Invariants: ``decode(encode(values))`` equals ``values``. Decoding only creates these types. A value that could not be
returned equal is refused before it is sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from asyncflow.errors import ProtocolError, Refused
from asyncflow.rpc.columns import BFLOAT16, BYTES, DTYPES, OBJECT, TEXT, Array, Jagged, name_of

Values: TypeAlias = Array | list[Any]
"""A column as users read it: one array if all rows have one shape, otherwise a list of rows."""

_ARRAY_EXT, _TUPLE_EXT = 1, 2
_WIDEST = 1 << 63
_NUMBERS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}
_pack = msgspec.msgpack.Encoder().encode


def encode_columns(columns: Mapping[str, Any]) -> dict[str, Jagged]:
    """Return every column as a ``Jagged``. Raises Refused if one cannot be converted."""
    return {name: encode(values, where=f"column {name}") for name, values in columns.items()}


def encode(values: Any, *, where: str = "column") -> Jagged:
    """Return the column of ``values``: an array or tensor whose first dimension is the rows, or one value a row."""
    if isinstance(values, Jagged):
        return values
    if is_array(values) and not _nested(values):
        return _regular(*plain_array(values, where), where=where)
    if not is_array(values) and not isinstance(values, list | tuple):
        raise Refused(f"a {type(values).__name__} is not a column", where=where, hint="Pass an array or a list")
    return _of_rows(list(values), where)


def decode(column: Jagged) -> Values:
    """Return the rows of ``column``. bfloat16, which numpy lacks, is returned as float32 (see ``decode_torch``)."""
    if (read := _READERS.get(column.dtype)) is not None:
        data, bounds = column.values.tobytes(), column.offsets.tolist()
        return [read(data[a:b]) for a, b in itertools.pairwise(bounds)]
    return _shaped(column, _widened(column.values) if column.dtype == BFLOAT16 else column.values)


def decode_torch(column: Jagged) -> Any:
    """Return the rows of ``column`` as ``decode`` does, arrays as tensors that share their memory."""
    import torch

    if column.dtype in (TEXT, BYTES, OBJECT):
        return decode(column)
    shaped = _shaped(column, column.values)

    def tensor(array: Array) -> torch.Tensor:
        if column.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return [tensor(row) for row in shaped] if isinstance(shaped, list) else tensor(shaped)


def is_array(value: Any) -> bool:
    """Return whether ``value`` is a numpy array or number, or a torch tensor, without importing torch."""
    return isinstance(value, np.ndarray | np.generic) or (hasattr(value, "detach") and hasattr(value, "numpy"))


def _nested(values: Any) -> bool:
    return bool(getattr(values, "is_nested", False)) or (isinstance(values, np.ndarray) and values.dtype.kind == "O")


def _of_rows(rows: list[Any], where: str) -> Jagged:
    kinds = {type(row) for row in rows}
    if not rows:
        raise Refused("an empty list has no dtype", where=where, hint="Pass an array of shape (0, ...)")
    if all(is_array(row) for row in rows):
        return _jagged([plain_array(row, where) for row in rows], where)
    if kinds == {bytes}:
        return _of_bytes(rows, BYTES)
    if kinds == {str}:
        try:
            return _of_bytes([row.encode() for row in rows], TEXT)
        except UnicodeEncodeError as wrong:
            raise Refused(f"a text is not Unicode: {wrong}", where=where, hint="Pass bytes") from wrong
    if len(kinds) == 1 and (dtype := _NUMBERS.get(kinds.pop())) is not None:
        try:
            return _regular(np.array(rows, DTYPES[dtype]), dtype, where=where)
        except OverflowError as wrong:
            raise Refused("an integer does not fit int64", where=where) from wrong
    if any(is_array(row) for row in rows):
        names = ", ".join(sorted({type(row).__name__ for row in rows}))
        raise Refused(f"rows of one column are {names}", where=where, hint="Pass arrays for all of them, or for none")
    return _of_bytes([pack_object(row, where=where) for row in rows], OBJECT)


def _of_bytes(rows: list[bytes], dtype: str) -> Jagged:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Jagged.trusted(np.frombuffer(b"".join(rows), np.uint8), lengths, dtype)


def _regular(array: Array, dtype: str, *, where: str) -> Jagged:
    """Return a column whose rows are ``array[0]``, ``array[1]``, ..."""
    if array.ndim == 0:
        raise Refused("a single number has no rows", where=where, hint="Pass one value for each row")
    inner = array.shape[2:] if array.ndim > 1 else None
    _check_inner(inner, where)
    lengths = np.full(array.shape[0], math.prod(array.shape[1:]), np.int64)
    return Jagged.trusted(np.ascontiguousarray(array).reshape(-1), lengths, dtype, inner)


def _jagged(rows: list[tuple[Array, str]], where: str) -> Jagged:
    arrays, dtypes = [row for row, _ in rows], {dtype for _, dtype in rows}
    inners = {row.shape[1:] if row.ndim else None for row in arrays}
    if len(dtypes) > 1:
        raise Refused(f"its rows have dtypes {', '.join(sorted(dtypes))}", where=where, hint="Convert them to one")
    if len(inners) > 1:
        shapes = ", ".join(sorted({str(row.shape) for row in arrays}))
        hint = "Rows of one column may differ in their first dimension only; flatten them, or use another column"
        raise Refused(f"rows of one column have shapes {shapes}", where=where, hint=hint)
    (inner,), (dtype,) = inners, dtypes
    _check_inner(inner, where)
    lengths = np.fromiter((row.size for row in arrays), np.int64, len(arrays))
    return Jagged.trusted(np.concatenate([row.reshape(-1) for row in arrays]), lengths, dtype, inner)


def _check_inner(inner: tuple[int, ...] | None, where: str) -> None:
    if inner and not all(inner):
        hint = "Only the first dimension of a row may be 0"
        raise Refused(f"rows of shape (..., {', '.join(map(str, inner))}) hold nothing", where=where, hint=hint)


def plain_array(values: Any, where: str) -> tuple[Array, str]:
    """Return ``values`` as a numpy array, and the name of their dtype."""
    if not isinstance(values, np.ndarray | np.generic):
        import torch

        tensor: torch.Tensor = values.detach().cpu()
        try:
            if tensor.dtype == torch.bfloat16:
                return tensor.contiguous().view(torch.int16).numpy().view(np.uint16), BFLOAT16
            values = tensor.numpy(force=True)
        except (RuntimeError, TypeError) as wrong:
            what = f"a {tensor.layout} tensor of {tensor.dtype} cannot be a column"
            raise Refused(what, where=where, hint="Pass a dense tensor of a dtype that numpy has") from wrong
    array, name = np.asarray(values), name_of(values.dtype)
    if name == BFLOAT16:
        return np.ascontiguousarray(array).view(np.uint16), BFLOAT16
    if name not in DTYPES or name in (TEXT, BYTES, OBJECT):
        names = ", ".join(sorted(DTYPES.keys() - {TEXT, BYTES, OBJECT}))
        raise Refused(f"values of dtype {name} cannot be a column", where=where, hint=f"It may hold {names}")
    return array.astype(DTYPES[name], copy=False), name


def _shaped(column: Jagged, values: Array) -> Values:
    if column.inner is None:
        return values
    count, per_item = len(column), math.prod(column.inner)
    lengths = column.lengths
    if count == 0 or bool((lengths == lengths[0]).all()):
        return values.reshape(count, (int(lengths[0]) // per_item) if count else 0, *column.inner)
    return [values[a:b].reshape(-1, *column.inner) for a, b in itertools.pairwise(column.offsets.tolist())]


def _widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack_object(value: Any, *, where: str = "object") -> bytes:
    """Encode a plain object as msgpack. Raises Refused for any other value."""
    try:
        return _pack(_plain(value, where))
    except RecursionError:
        raise Refused("an object contains itself, or is nested too deep", where=where) from None
    except (OverflowError, UnicodeEncodeError) as wrong:
        raise Refused(f"an object cannot be sent: {wrong}", where=where) from wrong


def unpack_object(data: bytes) -> Any:
    """Decode the bytes of ``pack_object``. Raises ProtocolError for invalid bytes."""
    try:
        return _unpack(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as wrong:
        raise ProtocolError(f"no plain object: {wrong}", where="column") from wrong


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as wrong:
        raise ProtocolError(f"{len(data)} bytes are no text: {wrong}", where="column") from wrong


_READERS: dict[str, Callable[[bytes], Any]] = {TEXT: _text, BYTES: bytes, OBJECT: unpack_object}
"""The functions that decode a row of Python values, by dtype."""


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int and -_WIDEST <= value < 2 * _WIDEST:
        return value
    if kind is list:
        return [_plain(item, where) for item in value]
    if kind is dict and all(type(key) in (str, int, bytes) for key in value):
        return {key: _plain(item, where) for key, item in value.items()}
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE_EXT, _pack([_plain(item, where) for item in value]))
    if isinstance(value, np.generic):
        return _plain(value.item(), where)
    if is_array(value):
        array, dtype = plain_array(value, where)
        return msgspec.msgpack.Ext(_ARRAY_EXT, _pack([dtype, list(array.shape), array.tobytes()]))
    hint = "It may contain None, truth values, 64-bit integers, floats, strings, bytes, arrays, lists, tuples, dicts"
    raise Refused(f"an object contains {value!r:.80} of type {kind.__name__}", where=where, hint=hint)


def _ext(code: int, data: memoryview) -> Any:
    if code == _TUPLE_EXT:
        return tuple(_unpack_list(data))
    if code != _ARRAY_EXT:
        raise ValueError(f"extension {code} is unknown")
    dtype, shape, raw = _unpack_array(data)
    if dtype not in DTYPES or min(shape, default=0) < 0:
        raise ValueError(f"an array of dtype {dtype!r} and shape {shape}")
    array = np.frombuffer(bytearray(raw), DTYPES[dtype]).reshape(shape)
    return _widened(array) if dtype == BFLOAT16 else array


_unpack: Callable[[bytes | memoryview], Any] = msgspec.msgpack.Decoder(ext_hook=_ext).decode
_unpack_list: Callable[[memoryview], list[Any]] = msgspec.msgpack.Decoder(list[Any], ext_hook=_ext).decode
_unpack_array: Callable[[memoryview], tuple[str, Sequence[int], bytes]] = msgspec.msgpack.Decoder(
    tuple[str, list[int], bytes]
).decode
