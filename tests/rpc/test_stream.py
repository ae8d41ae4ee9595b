"""Messages over a byte stream, without any I/O."""

import struct
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.rpc.columns import LARGE
from asyncflow.rpc.framing import Inbox, Outbox

MOST = 1 << 22


def sent(outbox):
    out = bytearray()
    while (piece := outbox.next()) is not None:
        out += piece
    return out


def receive(inbox, data, steps=()):
    """Put ``data`` into the inbox in pieces of these sizes (the rest at once), as a socket would."""
    messages, at, steps = [], 0, iter(steps)
    while at < len(data):
        room = inbox.room()
        step = min(next(steps, len(data)), len(room), len(data) - at)
        room[:step] = data[at : at + step]
        messages += inbox.took(step)
        at += step
    return [[bytes(part) for part in message] for message in messages]


part_sizes = st.one_of(st.integers(0, 40), st.sampled_from([LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, (1 << 20) + 7]))
message_sizes = st.lists(st.lists(part_sizes, max_size=5), min_size=1, max_size=4)
step_sizes = st.lists(st.one_of(st.integers(1, 30), st.integers(1, 1 << 17)), max_size=30)


def parts_of(sizes):
    return [bytes([number % 251]) * size for number, size in enumerate(sizes)]


@settings(max_examples=100, deadline=None)
@given(message_sizes, step_sizes)
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(sizes, steps):
    outbox, inbox = Outbox(), Inbox(most=MOST)
    messages = [parts_of(of) for of in sizes]
    for key, message in enumerate(messages):
        outbox.push(key, message)
    assert receive(inbox, sent(outbox), steps) == messages


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), step_sizes)
def test_whatever_comes_is_messages_or_a_protocol_error(data, steps):
    inbox = Inbox(most=1 << 16)
    try:
        for message in receive(inbox, data, steps):
            assert sum(map(len, message)) <= 1 << 16
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 3),
        struct.pack("<QI", 12, 1 << 31),
        struct.pack("<QIQ", 12, 1, 1 << 40),
        struct.pack("<QIQ", 12, 1, 5),
        struct.pack("<QIQQ", 20, 2, 1 << 63, 1 << 63),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_is_kept(head):
    with pytest.raises(ProtocolError):
        receive(Inbox(most=1 << 20), head + bytes(16))


def test_large_parts_are_sent_from_where_they_lie_and_received_where_they_stay():
    outbox, inbox = Outbox(), Inbox(most=MOST)
    large = bytearray(1 << 20)
    outbox.push("key", [b"small", large])
    block, *pieces = iter(outbox.next, None)
    assert all(piece.obj is large for piece in pieces)
    assert sum(map(len, pieces)) == len(large)
    receive(inbox, block)
    room = inbox.room()
    assert len(room) == 1 << 20
    (message,) = inbox.took(len(room))
    assert message[1].obj is room.obj


@pytest.mark.parametrize("step", [7, 1 << 16])
def test_a_stream_keeps_nothing_of_a_message_that_it_gave(step):
    outbox, inbox = Outbox(), Inbox(most=MOST)
    outbox.push("key", [b"small", bytes(1 << 17)])
    stream, came = sent(outbox), []
    while stream:
        room = inbox.room()
        count = min(step, len(room), len(stream))
        room[:count] = stream[:count]
        del stream[:count]
        came += inbox.took(count)
    kept = weakref.ref(came[0][1].obj)
    del room, came
    assert kept() is None


@settings(max_examples=100, deadline=None)
@given(message_sizes, st.sets(st.integers(0, 3)))
def test_what_lies_unsent_is_counted_whatever_was_taken_back_or_said_again(sizes, back):
    outbox = Outbox()
    for key, of in enumerate(sizes):
        outbox.push(key, parts_of(of))
        outbox.push(key, parts_of(of))
        if key in back:
            outbox.withdraw(key)
    left = [of for key, of in enumerate(sizes) if key not in back]
    lies = sum(map(sum, left))
    assert outbox.unsent == lies
    while (piece := outbox.next()) is not None:
        assert outbox.unsent <= lies <= outbox.unsent + len(piece)
        lies = outbox.unsent
    assert outbox.unsent == 0
    outbox.push("large", [bytes(LARGE)] * 9)
    outbox.next()
    outbox.close()
    assert outbox.unsent == 0


def test_a_message_can_be_taken_back_until_its_first_byte_was_asked_for():
    outbox = Outbox()
    for key in "ab":
        outbox.push(key, [key.encode()])
    assert outbox.withdraw("b")
    assert not outbox.withdraw("b")
    block = outbox.next()
    assert not outbox.withdraw("a")
    assert receive(Inbox(most=MOST), block) == [[b"a"]]
    assert outbox.idle
