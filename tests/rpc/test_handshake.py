"""What each side of a connection says first, without any I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc import framing
from asyncflow.rpc.addresses import ANYBODY

CALLER = ProcessIdentity("job-7", "rollout", 3)


def heard(hello: bytes) -> ProcessIdentity | None:
    """Return whom a server takes for the caller."""
    size = framing.rest_of_hello(hello[: framing.HEAD_SIZE])
    assert len(hello) == framing.HEAD_SIZE + size
    return framing.caller(hello[framing.HEAD_SIZE :])


@pytest.mark.parametrize("caller", [CALLER, ProcessIdentity("a" * 128, "controller", 10**9 - 1), None])
def test_a_server_hears_who_calls(caller: ProcessIdentity | None) -> None:
    assert heard(framing.hello(caller)) == caller


def test_who_dialled_another_server_goes_no_further() -> None:
    one, other = b"1" * 8, b"2" * 8
    framing.check_welcome(framing.welcome(one), dialled=one)
    framing.check_welcome(framing.welcome(one), dialled=ANYBODY)
    for answers in (other, ANYBODY):
        with pytest.raises(ProtocolError, match="another server is at this address now"):
            framing.check_welcome(framing.welcome(answers), dialled=one)


def test_what_is_no_part_of_the_protocol_is_said_to_be_none() -> None:
    with pytest.raises(ProtocolError, match="no part of this protocol"):
        framing.rest_of_hello(b"GET /")
    with pytest.raises(ProtocolError, match="no part of this protocol"):
        framing.check_welcome(b"HTTP/1.1 400", dialled=ANYBODY)


def test_a_caller_that_speaks_tls_to_a_server_without_is_named() -> None:
    with pytest.raises(ProtocolError, match="speaks TLS, and this process has no certificate"):
        framing.rest_of_hello(b"\x16\x03\x01\x02\x00")


@given(st.binary(min_size=framing.HEAD_SIZE, max_size=300))
def test_whatever_bytes_come_they_are_a_name_or_a_protocol_error(came: bytes) -> None:
    for said in (came, b"AFh4" + came):
        try:
            rest = framing.rest_of_hello(said[: framing.HEAD_SIZE])
            found = framing.caller(said[framing.HEAD_SIZE :][:rest])
        except ProtocolError:
            continue
        assert found is None or framing.hello(found)


def test_a_name_that_is_too_long_to_be_said_is_refused() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        framing.hello(ProcessIdentity("j" * 300, "rollout", 0))
