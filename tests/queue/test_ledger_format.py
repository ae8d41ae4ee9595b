"""Every record as ledgers of this format have it: what was written once is read for ever, by the names that it had."""

import typing

import msgspec
import pytest

from asyncflow.queue.ledger import events as ev

PARTITION = {"partition": "p"}
TASK = {
    "partition": "p",
    "name": "t",
    "needs": ["x"],
    "writes": ["y"],
    "groups": True,
    "order": "fifo",
    "kind": "gang",
    "shared_tokens": True,
    "lease_s": 9.0,
    "clears": True,
}
STRUCTS = {
    ev.RowRecord: {"row": 7, "state": 2, "lost": True, "moved": 5, "works": [["t", 1, 0, "w"]]},
    ev.GroupRecord: {"serial": 3, "step": 1, "oldest": 0, "newest": 2, "outcome": "tfd", "rows": [], "instead_of": 4},
}
RECORDS = {
    "start": {"epoch": 3},
    "at": {"at": 1.5},
    "unit": {"epoch": 4, "unit": 1, "incarnation": "i"},
    "lost": {"epoch": 4, "unit": 1},
    "gone": PARTITION | {"rows": [7]},
    "leave": {"epoch": 4, "unit": 1},
    "moved": {"location": 5, "rows": [7]},
    "task": {"spec": TASK, "controller": 2},
    "dtype": PARTITION | {"column": "x", "dtype": "int64"},
    "put": PARTITION
    | {"purpose": "train", "serials": [3], "size": 1, "rows": [7], "step": 1, "oldest": 2, "newest": 4},
    "skip": PARTITION | {"serials": [3]},
    "lease": {"lease": 9, "partition": "p", "task": "t", "worker": "w", "ticket": "n", "rows": [7], "whole": False},
    "done": {"lease": 9, "rows": [7]},
    "back": {"lease": 9, "rows": [7], "reason": "why"},
    "drop": PARTITION | {"rows": [7], "reason": "why"},
    "step": PARTITION | {"step": 1, "groups": 2, "size": 3},
    "begin": PARTITION | {"attempt": 1, "step": 2, "world": 3},
    "slot": PARTITION
    | {"step": 1, "slot": 0, "bound": [3], "ranks": [[7], [8]], "last": True}
    | {"groups": 2, "samples": 4, "response_tokens": 5},
    "exchange": PARTITION | {"serials": [3, 4]},
    "rank": PARTITION | {"step": 1, "rank": 2},
    "commit": PARTITION | {"step": 1},
    "clear": PARTITION,
    "set": PARTITION | {"field": "closed", "value": 1},
    "client": PARTITION | {"client": b"a client", "number": 2},
    "rows": PARTITION | {"rows": [7]},
    "reset": PARTITION | {"task": "t", "rows": 2},
    "peek": PARTITION | {"rows": 2},
    "snapshot": {"epoch": 3, "units": [["unit", 4, 1, "i"]], "leaving": [4], "completed": [9]},
    "snapshot_partition": {"name": "p", "purpose": None, "schema": {"x": "int64"}, "creator": 1, "expected": 2}
    | {"closed": None, "resets": 3, "peeked": 4, "returned": 5, "cleared": 6, "forgotten": 7, "attempts": [1]}
    | {"ended": [1, 2, 3], "clients": {b"a client": 2}, "used": [[0, 3]], "skipped": [[3, 4]], "reasons": {"why": 5}},
    "snapshot_groups": PARTITION | {"groups": [list(STRUCTS[ev.GroupRecord].values())]},
}


LATER = {ev.Declared: 1, ev.RowsPut: 3, ev.Leased: 1, ev.SnapshotPartition: 2, ev.GroupRecord: 1}
"""How many of its fields a record may lack, at the end, as it did before there were these."""


@pytest.mark.parametrize("kind", [*typing.get_args(ev.Event), *STRUCTS])
def test_a_record_is_read_as_it_was_once_written(kind):
    tag = kind.__struct_config__.tag
    fields = RECORDS[tag] if tag else STRUCTS[kind]
    written = [tag, *fields.values()] if tag else [*fields.values()]
    for lacking in range(LATER.get(kind, 0) + 1):
        encoded = msgspec.msgpack.encode(written[: len(written) - lacking])
        assert type(msgspec.msgpack.decode(encoded, type=ev.Event if tag else kind)) is kind
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=kind)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(read))[: len(written)] == written
    assert kind.__struct_fields__[: len(fields)] == tuple(fields)
