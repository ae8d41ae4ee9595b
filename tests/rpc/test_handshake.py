"""Tests of what each side of a connection says first, without any I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc import framing
from asyncflow.rpc.addresses import ANY_SERVER
from asyncflow.rpc.framing import Inbox

CALLER = ProcessIdentity("job-7", "rollout", 3)


def heard(hello: bytes) -> ProcessIdentity | None:
    """Return whom a server takes for the caller."""
    return framing.caller(parts_of(hello))


def parts_of(greeting: bytes) -> list[memoryview]:
    inbox = Inbox(most=framing.LONGEST_GREETING)
    inbox.room()[: len(greeting)] = greeting
    (parts,) = inbox.took(len(greeting))
    return parts


@pytest.mark.parametrize("caller", [CALLER, ProcessIdentity("a" * 128, "controller", 10**9 - 1), None])
def test_a_server_hears_who_calls(caller: ProcessIdentity | None) -> None:
    assert heard(framing.hello(caller)) == caller


def test_who_dialled_another_server_goes_no_further() -> None:
    one, other = b"1" * 8, b"2" * 8
    framing.check_welcome(parts_of(framing.welcome(one)), dialled=one)
    framing.check_welcome(parts_of(framing.welcome(one)), dialled=ANY_SERVER)
    for answers in (other, ANY_SERVER):
        with pytest.raises(ProtocolError, match="another server is at this address now"):
            framing.check_welcome(parts_of(framing.welcome(answers)), dialled=one)


def test_what_is_no_part_of_the_protocol_is_said_to_be_none() -> None:
    for parts in ([], [memoryview(b"AFh5")], [memoryview(b"AFh4"), memoryview(b"")]):
        with pytest.raises(ProtocolError, match="does not speak this protocol"):
            framing.caller(parts)
        with pytest.raises(ProtocolError, match="does not speak this protocol"):
            framing.check_welcome(parts, dialled=ANY_SERVER)


def test_a_caller_that_speaks_tls_to_a_server_without_is_named() -> None:
    with pytest.raises(ProtocolError, match="speaks TLS, and this process has no certificate"):
        parts_of(b"\x16\x03\x01\x02\x00\x01\x00\x01")


@given(st.lists(st.binary(max_size=300), max_size=2))
def test_whatever_bytes_come_they_are_a_name_or_a_protocol_error(came: list[bytes]) -> None:
    for parts in (came, [b"AFh5", *came]):
        try:
            found = framing.caller([memoryview(part) for part in parts])
        except ProtocolError:
            continue
        assert found is None or framing.hello(found)


def test_a_name_that_is_too_long_to_be_said_is_refused() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        framing.hello(ProcessIdentity("j" * 300, "rollout", 0))


@pytest.mark.parametrize("uri", [b"no name", b"\xff", b"spiffe://job/rollout"])
def test_who_calls_itself_by_what_is_no_name_is_not_taken_for_who_says_nothing(uri: bytes) -> None:
    magic, _ = parts_of(framing.hello(None))
    with pytest.raises(ProtocolError, match="holds an invalid name"):
        framing.caller([magic, memoryview(uri)])


@pytest.mark.parametrize(("frames", "there"), [(2, 1), (0, 1)])
def test_an_answer_with_other_frames_than_it_says_is_an_error_of_its_call(frames: int, there: int) -> None:
    parts = [framing.encode(framing.Answer(7, frames)), b"body", *[b"frame"] * there]
    call, error = framing.read_answer([memoryview(part) for part in parts], where="test")
    assert call == 7
    assert isinstance(error, ProtocolError)
    assert f"a reply of {frames} frames came in 3 parts" in str(error)
