"""Fuzz every decoder of the queue with atheris, for longer than `make test` does.

    python hack/fuzz.py --seconds 60           # all targets, one after another
    python hack/fuzz.py batch --seconds 600    # one

A target fails if it raises any other error than the one that it expects. `make fuzz` installs atheris, which no test
needs.
"""

import argparse
import contextlib
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from asyncflow.errors import LedgerCorrupt, ProtocolError
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.log import pack, read_ledger
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table import replication
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.values import decode, encode_columns, pack_object, unpack_object
from asyncflow.rpc import framing, shm
from asyncflow.rpc.columns import OBJECT, TEXT, BatchHeader, Jagged, decode_batch, encode_batch
from asyncflow.rpc.framing import Inbox
from asyncflow.rpc.shm import Incoming

MOST = 1 << 20
LONGEST = 4096
LIMITS = ("-rss_limit_mb=2048", "-timeout=10", "-print_final_stats=1")
REQUESTS = [
    msgspec.msgpack.Decoder(kind)
    for module in (calls, unit_calls)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
]
_header = msgspec.msgpack.Decoder(BatchHeader)
_shared = shm.new_arena()
_pieces = msgspec.msgpack.Decoder(list[bytes])


def header(data: bytes) -> None:
    """The header of a message."""
    for decoder in (framing.to_server, framing.to_client):
        try:
            found = decoder(data)
            if isinstance(found, framing.Call):
                framing.fits(found, 2 + found.frames)
        except framing.MALFORMED:
            continue


def request(data: bytes) -> None:
    """The body of a message, decoded as every type of request and reply."""
    for decoder in REQUESTS:
        try:
            decoder.decode(data)
        except framing.MALFORMED:
            continue


def stream(data: bytes) -> None:
    """Bytes on a plain stream, in chunks whose length comes from the first byte."""
    for message in _messages(Inbox(most=MOST), data):
        assert sum(map(len, message)) <= len(data)


def places(data: bytes) -> None:
    """Messages from a peer that shares memory: as in ``stream``, with parts in the shared memory."""
    incoming = Incoming(os.dup(_shared))
    kept = list(_messages(Inbox(most=MOST, take=incoming.take), data))
    incoming.close()
    assert all(sum(len(bytes(part)) for part in message) <= MOST for message in kept)


def _messages(inbox: Inbox, data: bytes) -> Iterator[list[memoryview]]:
    """Yield the messages up to the first malformed one."""
    step = 1 + (data[0] if data else 0)
    with contextlib.suppress(ProtocolError):
        for at in range(1, len(data), step):
            piece = data[at : at + step]
            while piece:
                room = inbox.room()
                fits = min(len(room), len(piece))
                room[:fits] = piece[:fits]
                yield from inbox.took(fits)
                piece = piece[fits:]


def batch(data: bytes) -> None:
    """A batch: a list of its header and its frames."""
    try:
        head, *frames = _pieces.decode(data)
        parsed = _header.decode(head)
    except (*framing.MALFORMED, ValueError):
        return
    try:
        columns = decode_batch(parsed, frames, max_bytes=MOST)
    except ProtocolError:
        return
    for column in columns.values():
        assert len(column) == parsed.rows
        value(column)


def value(column: Jagged) -> None:
    """The values of a column."""
    try:
        assert len(decode(column)) == len(column)
    except ProtocolError:
        return


def plain(data: bytes) -> None:
    """An object, by itself and as a row of a column."""
    with contextlib.suppress(ProtocolError):
        unpack_object(data)
    for dtype in (OBJECT, TEXT):
        value(Jagged(np.frombuffer(data, np.uint8), np.array([0, len(data) // 2, len(data)]), dtype))


def ledger(data: bytes) -> None:
    """A ledger's file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "000000000001.wal").write_bytes(data)
        with contextlib.suppress(LedgerCorrupt):
            list(read_ledger(Path(folder)))


def handshake(data: bytes) -> None:
    """Bytes of an unknown peer instead of a hello or a welcome."""
    for take in (framing.caller, partial(framing.check_welcome, dialled=b"a server")):
        for parts in _messages(Inbox(most=MOST), data):
            with contextlib.suppress(ProtocolError):
                take(parts)


def feed(data: bytes) -> None:
    """The feed of a replica controller: a list of items, applied to its state, and as a snapshot that replaces it."""
    try:
        items = _pieces.decode(data)
    except framing.MALFORMED:
        return
    state, draft = QueueState(1), QueueState(1)
    with contextlib.suppress(LedgerCorrupt):
        for item in items:
            replication.take(state, replication.decode(item))
    with contextlib.suppress(LedgerCorrupt):
        for item in items:
            replication.take(draft, replication.decode(item))
        replication.install(state, draft)
        assert state.rows is draft.rows


def lease(data: bytes) -> None:
    """The name of a lease."""
    assert 0 <= calls.controller_of(data.decode("utf-8", "replace")) < 1 << 64 - calls.LEASE_BITS


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (header, request, stream, places, batch, plain, ledger, handshake, feed, lease)
}


def seeds() -> dict[str, list[bytes]]:
    """Return valid inputs for each target, which atheris mutates."""
    call = framing.encode(framing.Call(1, "queue.claim", 1.0, 0))
    claim = framing.encode(calls.ClaimRows("p", "t", "w", "k", 8, None, None, [], 0.1))
    admitted = framing.encode([unit_calls.EntryResult([True])])
    columns = {"a": np.arange(6).reshape(2, 3), "b": ["x", "yy"], "c": [{"d": (1, np.ones(2))}, None], "e": [1.5, 2.5]}
    head, frames = encode_batch(encode_columns(columns))
    pieces = msgspec.msgpack.encode([framing.encode(head), *map(bytes, frames)])
    records = b"".join(
        map(pack, (ev.ControllerStarted(1), ev.RowsPut("p", "open", [1 << 32], 1, [7]), ev.RowsCleared("p", [7])))
    )
    cells = unit_calls.Cells(dtypes={"a": "<i8"}, sizes={"a": [8]})
    held = unit_calls.Held(row=7, columns={"a": 8}, partial={"b": 8}, tokens=1, tags={"key": "x"})
    items = [
        ev.Declared(TaskSpec(partition="p", name="t", needs=["a"]), 1),
        ev.RowsPut("p", "open", [1 << 32, (1 << 32) + 1], 1, [7, 8]),
        replication.RowsHeld([held]),
        ev.SnapshotPartition("q", "train", {"a": "<i8"}, 0, None, None, *[0] * 5, [0], [0, 0, 0], {}, []),
        ev.SnapshotGroups("q", [ev.GroupRecord(0, 1, 0, 1, "", [ev.RowRecord(9, 0, False, 0, [])])]),
        ev.RowsCleared("p", [7]),
    ]
    fed = msgspec.msgpack.encode([replication.encode(item) for item in items])
    session = unit_calls.Session(1, 2, 3)
    move = framing.encode(unit_calls.AskMove(session, [7, -1], 2, 16))
    admit = framing.encode(unit_calls.AdmitCells(0, [unit_calls.NewCells("8", [7], cells, [], "")]))
    return {
        "header": [call],
        "request": [claim, move, admit, admitted],
        "stream": [b"\x07" + struct.pack("<QI2Q", 25, 2, 3, 2) + b"abcde"],
        "places": [b"\xff" + struct.pack("<QIQ", 12, 1, 1 << 63 | 9 << 40 | 1 << 16)],
        "batch": [pieces],
        "plain": [pack_object(value) for value in columns["c"]],
        "ledger": [records],
        "handshake": [b"\xff" + framing.hello(None), b"\xff" + framing.welcome(b"a server")],
        "feed": [fed],
        "lease": [b"880000100000000"],
    }


def run_all(names: list[str], seconds: int) -> int:
    """Run each target in its own process, since atheris never returns; return the number of failures."""
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for number, seed in enumerate(seeds()[name]):
                (Path(folder) / f"seed{number}").write_bytes(seed)
            words = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", *LIMITS]
            command = [sys.executable, __file__, name, "--here", folder, *words]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next(
            (line for line in result.stderr.splitlines() if "number_of_executed_units" in line), "no statistics"
        )
        print(f"{name:<8} {'ok' if result.returncode == 0 else 'FAILED'}  {line.split()[-1]} inputs")
        if result.returncode:
            print(result.stderr[-4000:])
            failed += 1
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    if not options.here:
        return run_all([options.target] if options.target else list(TARGETS), options.seconds)
    import atheris

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], options.here, *words], TARGETS[options.target])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
