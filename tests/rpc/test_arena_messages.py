"""Messages whose large parts lie in an arena, without any I/O."""

import contextlib
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.rpc import shm
from asyncflow.rpc.columns import LARGE
from asyncflow.rpc.framing import Inbox, Outbox
from asyncflow.rpc.shm import PAGE, Incoming, Outgoing

MOST = 1 << 22
THERE = 1 << 63

part_sizes = st.one_of(st.integers(0, 40), st.sampled_from([LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, (1 << 20) + 7]))
message_sizes = st.lists(st.lists(part_sizes, max_size=4), max_size=4)
sizes = st.sampled_from([PAGE, 30 * PAGE, 100 * PAGE, 1000 * PAGE])


class Way:
    """One direction, with what ``Connection`` does. wire: bytes that were sent; came: messages, which may be let go."""

    def __init__(self, size: int) -> None:
        file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size)
        self.outgoing, self.incoming = Outgoing(file), Incoming(os.dup(file))
        self.outbox = Outbox(put=self.outgoing.put)
        self.inbox = Inbox(most=MOST, take=self.incoming.take)
        self.wire = bytearray()
        self.came: list[list[memoryview]] = []

    def send(self, key: int, parts: list[bytes]) -> None:
        self.outbox.push(key, parts)
        while (piece := self.outbox.next()) is not None:
            self.wire += piece

    def receive(self, most: int = 1 << 16) -> None:
        room = self.inbox.room()
        count = min(most, len(room), len(self.wire))
        room[:count] = self.wire[:count]
        del self.wire[:count]
        self.came += self.inbox.took(count)

    def receive_all(self, step: int = 1 << 16) -> None:
        while self.wire:
            self.receive(step)

    def close(self) -> None:
        self.outgoing.close()
        self.incoming.close()


def parts_of(sizes: list[int]) -> list[bytes]:
    return [os.urandom(8) * (size // 8) + bytes(size % 8) for size in sizes]


@settings(max_examples=150, deadline=None)
@given(
    sizes,
    message_sizes,
    st.lists(st.tuples(st.sampled_from(["send", "let go"]), st.sampled_from([0, 1, 7, 8, 100, 1 << 16])), max_size=40),
)
def test_messages_come_out_as_they_went_whoever_keeps_them_for_how_long(size, messages, steps):
    way = Way(size)
    sent = [parts_of(sizes) for sizes in messages]
    expected, begun = list(sent), 0
    for what, count in steps:
        if what == "send" and begun < len(sent):
            way.send(begun, sent[begun])
            begun += 1
        elif way.came:
            assert [bytes(part) for part in way.came.pop(0)] == expected.pop(0)
        if count:
            way.receive(count)
    for key in range(begun, len(sent)):
        way.send(key, sent[key])
    way.receive_all()
    assert [[bytes(part) for part in message] for message in way.came] == expected
    way.close()
    assert [[bytes(part) for part in message] for message in way.came] == expected


def test_large_parts_do_not_go_over_the_wire_and_need_no_answer():
    way = Way(10 << 20)
    large = os.urandom(3 << 20)
    for key in range(20):
        way.send(key, [b"small", large])
        assert len(way.wire) < 100
        way.receive()
        assert [bytes(part) for part in way.came.pop()] == [b"small", large]
    way.close()


@pytest.mark.parametrize("step", [1, 1 << 16])
def test_room_is_there_again_as_soon_as_nobody_looks_at_a_message(step):
    way = Way(100 * PAGE)
    way.send(0, [b"small", bytes(40 * PAGE)])
    assert len(way.wire) < 100
    way.receive_all(step)
    assert way.outgoing.put(memoryview(bytes(99 * PAGE))) is None
    way.came.clear()
    assert way.outgoing.put(memoryview(bytes(99 * PAGE))) == 1
    way.close()


def test_what_finds_no_room_goes_over_the_wire_and_no_other():
    way = Way(100 * PAGE)
    messages = [parts_of([10, 60 * PAGE]), parts_of([LARGE]), parts_of([60 * PAGE, 7, LARGE])]
    went = []
    for key, message in enumerate(messages):
        before = len(way.wire)
        way.send(key, message)
        went.append((len(way.wire) - before) // PAGE)
    assert went == [0, 0, 60]
    way.receive_all(1000)
    assert [[bytes(part) for part in message] for message in way.came] == messages
    way.close()


def test_without_memory_for_an_arena_large_parts_go_over_the_wire(monkeypatch):
    monkeypatch.setattr(shm, "MOST_FILLED", 0)
    way = Way(1 << 20)
    message = parts_of([10, 3 * LARGE + 5])
    way.send(0, message)
    assert len(way.wire) > 3 * LARGE
    way.receive_all(1000)
    assert [bytes(part) for part in way.came[0]] == message
    way.close()


def block(*words: int, small: bytes = b"") -> bytes:
    made = struct.pack(f"<I{len(words)}Q", len(words), *words) + small
    return struct.pack("<Q", len(made)) + made


def there(page: int, size: int) -> int:
    return THERE | page << 40 | size


@pytest.mark.parametrize(
    "lie",
    [
        block(there(0, LARGE)),
        block(there(1, 0)),
        block(there(250, LARGE)),
        block(there(256, 1)),
        block(there(1, 1 << 20)),
        block(there((1 << 23) - 1, LARGE)),
        block(there(1, (1 << 40) - 1)),
        block(there(7, LARGE), there(7, LARGE)),
        block(there(7, LARGE), 10),
        block(there(7, LARGE), small=b"more"),
        block(*[there(page, 200 * PAGE) for page in range(1, 7)]),
        block(there(1, LARGE), MOST - LARGE + 1),
        block(MOST + 1),
        block(THERE - 1),
        block(1 << 63, 1 << 63),
        struct.pack("<Q", 1 << 62 | 12),
        struct.pack("<Q", 3),
    ],
)
@pytest.mark.parametrize("step", [1 << 16, 1])
def test_a_peer_that_lies_about_places_and_sizes_is_found_out(lie, step):
    way = Way(256 * PAGE)
    way.wire += lie
    with pytest.raises(ProtocolError):
        way.receive_all(step)
    assert way.came == []
    way.close()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(block, part_sizes, part_sizes),
            st.builds(
                lambda *places: block(*[there(*place) for place in places]),
                *[st.tuples(st.integers(0, 70), st.integers(0, 1 << 18))] * 2,
            ),
        ),
        max_size=20,
    ),
    st.integers(1, 1 << 17),
)
def test_whatever_comes_is_messages_or_a_protocol_error(chunks, step):
    way = Way(64 * PAGE)
    way.wire += b"".join(chunks)
    with contextlib.suppress(ProtocolError):
        way.receive_all(step)
    assert all(sum(map(len, message)) <= MOST for message in way.came)
    way.close()
    assert all(len(bytes(part)) == len(part) for message in way.came for part in message)
