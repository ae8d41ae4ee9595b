"""Messages whose large parts go through an arena, without any I/O."""

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.net import arena as arenas
from asyncflow.net.arena import Arena
from asyncflow.net.arena_stream import boxes
from asyncflow.net.frames import LARGE
from asyncflow.net.staging import staging

MOST = 1 << 22
MESSAGE, SHARED, HERE, GIVEN_BACK = (kind << 62 for kind in range(4))

part_sizes = st.one_of(st.integers(0, 40), st.sampled_from([LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, (1 << 20) + 7]))
message_sizes = st.lists(st.lists(part_sizes, max_size=4), max_size=4)
halves = st.sampled_from([4096, 1 << 16, 3 << 16, 4 << 20])


class Side:
    """One side of a connection, which does with its boxes what ``Flow`` does. wire: bytes that it has sent."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.inbox, self.outbox = boxes(arena, most=MOST, staging=staging())
        self.wire = bytearray()
        self.came: list[list[bytes]] = []

    def flush(self) -> None:
        while not self.outbox.idle and (views := self.outbox.views()):
            for view in views:
                self.wire += view
            self.outbox.sent(sum(map(len, views)))

    def receive(self, sender: "Side", most: int) -> None:
        room = self.inbox.room()
        count = min(most, len(room), len(sender.wire))
        room[:count] = sender.wire[:count]
        del sender.wire[:count]
        self.came += [[bytes(part) for part in message] for message in self.inbox.took(count)]
        if self.outbox.due:
            self.flush()


def sides(half: int) -> tuple[Side, Side]:
    file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 2 * half)
    return Side(Arena(file, half=half, calls=True)), Side(Arena(os.dup(file), half=half, calls=False))


def close(*both: Side) -> None:
    for side in both:
        side.arena.close()


def parts_of(sizes: list[int]) -> list[bytes]:
    return [os.urandom(8) * (size // 8) + bytes(size % 8) for size in sizes]


@settings(max_examples=150, deadline=None)
@given(
    halves,
    message_sizes,
    message_sizes,
    st.lists(st.tuples(st.booleans(), st.sampled_from([1, 7, 8, 100, 1 << 16])), max_size=40),
    st.booleans(),
)
def test_messages_come_out_as_they_went_in_both_ways_at_once_and_nobody_waits_for_ever(
    half, calls, answers, steps, scarce
):
    caller, answerer = sides(half)
    if scarce:
        answerer.arena._fills = False
    sent = [[parts_of(sizes) for sizes in of] for of in (calls, answers)]
    for side, messages in ((caller, sent[0]), (answerer, sent[1])):
        for key, message in enumerate(messages):
            side.outbox.push(key, message)
            side.flush()
    for who, count in steps:
        receiver, sender = (caller, answerer) if who else (answerer, caller)
        receiver.receive(sender, count)
    while caller.wire or answerer.wire:
        caller.receive(answerer, 1 << 16)
        answerer.receive(caller, 1 << 16)
    assert [answerer.came, caller.came] == sent
    assert not caller.outbox.stuck
    assert not answerer.outbox.stuck
    close(caller, answerer)


def test_large_parts_do_not_go_over_the_wire_and_are_the_readers_own():
    caller, answerer = sides(1 << 20)
    large = bytearray(os.urandom(3 << 20))
    caller.outbox.push("key", [b"small", large])
    went = 0
    caller.flush()
    while caller.wire or answerer.wire:
        went += len(caller.wire)
        answerer.receive(caller, 1 << 16)
        caller.receive(answerer, 1 << 16)
    assert went < 1000
    assert answerer.came == [[b"small", bytes(large)]]
    close(caller, answerer)


def test_what_came_does_not_change_when_its_sender_writes_over_the_arena():
    caller, answerer = sides(1 << 20)
    caller.outbox.push("key", [bytes(LARGE)])
    caller.flush()
    room = answerer.inbox.room()
    room[: len(caller.wire)] = caller.wire
    ((part,),) = answerer.inbox.took(len(caller.wire))
    caller.arena.fill(slice(0, 1 << 20), memoryview(b"\xff" * (1 << 20)))
    assert bytes(part) == bytes(LARGE)
    part[:] = b"\x01" * LARGE
    assert bytes(part) == b"\x01" * LARGE
    close(caller, answerer)


def block(*sizes: int) -> bytes:
    made = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return struct.pack("<Q", len(made)) + made


def record(both: int) -> bytes:
    return struct.pack("<Q", both)


@pytest.mark.parametrize(
    "lie",
    [
        block(LARGE) + record(SHARED | LARGE + 1),
        block(LARGE) + record(SHARED | 1 << 40),
        block(LARGE) + record(SHARED),
        block(LARGE) + record(HERE),
        block(LARGE) + record(HERE | LARGE + 1),
        block(LARGE) + record(MESSAGE | 12),
        block(1 << 20) + record(SHARED | 1 << 19),
        block(1 << 20) + 5 * record(SHARED | 1 << 16),
        block(1 << 20) + record(SHARED | 200_000) + record(SHARED | 100_000),
        record(SHARED | LARGE),
        record(HERE | LARGE),
        record(GIVEN_BACK),
        record(GIVEN_BACK | 64),
        record(GIVEN_BACK | (1 << 62) - 1),
        record(MESSAGE | 1 << 40),
        record(MESSAGE | 3),
        block(MOST + 1),
        block(1 << 63, 1 << 63),
    ],
)
def test_a_peer_that_lies_about_sizes_is_found_out(lie):
    caller, answerer = sides(1 << 18)
    caller.wire += lie
    with pytest.raises(ProtocolError):
        answerer.receive(caller, len(lie))
    close(caller, answerer)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                lambda kind, count: record(kind | count), st.sampled_from([0, SHARED, HERE, GIVEN_BACK]), part_sizes
            ),
            st.builds(block, part_sizes, part_sizes),
        ),
        max_size=20,
    ),
    st.integers(1, 1 << 17),
)
def test_whatever_comes_is_messages_or_a_protocol_error(pieces, step):
    caller, answerer = sides(1 << 18)
    caller.wire += b"".join(pieces)
    try:
        while caller.wire:
            answerer.receive(caller, step)
    except ProtocolError:
        pass
    assert all(sum(map(len, message)) <= MOST for message in answerer.came)
    close(caller, answerer)


def test_without_memory_for_a_ring_large_parts_go_over_the_wire(monkeypatch):
    monkeypatch.setattr(arenas, "MOST_FILLED", 0)
    caller, answerer = sides(1 << 18)
    messages = [parts_of([10, 3 * LARGE + 5]), parts_of([LARGE])]
    for key, message in enumerate(messages):
        caller.outbox.push(key, message)
    caller.flush()
    while caller.wire:
        answerer.receive(caller, 1000)
    assert answerer.came == messages
    close(caller, answerer)
