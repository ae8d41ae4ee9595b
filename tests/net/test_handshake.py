"""What each side of a handshake believes, without any I/O."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.net.keys import Keys
from asyncflow.net.stream.handshake import HELLO_SIZE, PROOF_SIZE, WELCOME_SIZE, Handshake
from asyncflow.net.stream.sealed import TAG
from asyncflow.net.stream.server import ANYBODY

OURS, THEIRS = Keys(secret=b"a" * 40), Keys(secret=b"b" * 40)
SHARE = slice(20, 52)


def shake(caller, answerer, *, spoil=lambda name, said: said, dialled=ANYBODY, answers=ANYBODY):
    """Shake hands, with what goes over the wire in the hands of ``spoil``; give the seals of both."""
    first, second = Handshake(caller, server=dialled), Handshake(answerer, server=answers)
    hello = spoil("hello", first.hello())
    welcome = spoil("welcome", second.welcome(hello))
    second.proved(spoil("proof", first.welcomed(welcome)))
    return (first.outgoing, first.incoming), (second.outgoing, second.incoming)


def opens(sealed, reader):
    opened = bytearray(len(sealed) - TAG)
    reader.open(memoryview(sealed), memoryview(opened))
    return bytes(opened)


def test_peers_that_hold_the_key_read_each_other_and_no_connection_has_the_seals_of_another():
    (to_answerer, from_answerer), (to_caller, from_caller) = shake(OURS, OURS)
    for sender, reader in ((to_answerer, from_caller), (to_caller, from_answerer)):
        for text in (b"first", b"second"):
            assert opens(sender.seal(text), reader) == text
    other = shake(OURS, OURS)
    with pytest.raises(ProtocolError):
        opens(to_answerer.seal(b"third"), other[1][1])


def test_what_one_side_sealed_does_not_open_as_what_the_other_sealed():
    (to_answerer, from_answerer), _ = shake(OURS, OURS)
    with pytest.raises(ProtocolError):
        opens(to_answerer.seal(b"mine"), from_answerer)


@pytest.mark.parametrize(("caller", "answerer"), [(OURS, THEIRS), (OURS, None), (None, OURS)])
def test_peers_of_other_keys_or_none_refuse_each_other(caller, answerer):
    with pytest.raises(ProtocolError, match="key"):
        shake(caller, answerer)


def test_without_keys_nothing_is_sealed_and_only_the_magic_counts():
    assert shake(None, None) == ((None, None), (None, None))
    with pytest.raises(ProtocolError, match="no part of this protocol"):
        Handshake(None).welcome(b"GET / HTTP/1.1\r\n".ljust(HELLO_SIZE))


@pytest.mark.parametrize("keys", [OURS, None])
def test_who_dialled_another_server_goes_no_further(keys):
    one, other = b"1" * 8, b"2" * 8
    shake(keys, keys, dialled=one, answers=one)
    shake(keys, keys, dialled=ANYBODY, answers=one)
    for answers in (other, ANYBODY):
        with pytest.raises(ProtocolError, match="another server is at this address now"):
            shake(keys, keys, dialled=one, answers=answers)


@given(st.sampled_from([("hello", HELLO_SIZE), ("welcome", WELCOME_SIZE), ("proof", PROOF_SIZE)]), st.data())
def test_a_handshake_of_which_a_bit_was_changed_fails(which, data):
    name, size = which
    bit = data.draw(st.integers(0, 8 * size - 1))

    def spoil(said_name, said):
        if said_name != name:
            return said
        assert len(said) == size
        return (int.from_bytes(said, "big") ^ 1 << bit).to_bytes(size, "big")

    with pytest.raises(ProtocolError):
        shake(OURS, OURS, spoil=spoil)


def test_nothing_is_computed_for_who_does_not_hold_the_key(monkeypatch):
    made = []
    monkeypatch.setattr(Handshake, "_greeting", lambda self: made.append(self))
    with pytest.raises(ProtocolError):
        Handshake(OURS).welcome(b"AFs3".ljust(HELLO_SIZE, b"x"))
    assert not made


def test_what_was_recorded_of_one_connection_is_of_no_use_in_another():
    recorded = {}

    def keep(name, said):
        recorded[name] = said
        return said

    shake(OURS, OURS, spoil=keep)
    again = Handshake(OURS)
    welcome = again.welcome(recorded["hello"])  # it costs a welcome, and that is all
    assert welcome[SHARE] != recorded["welcome"][SHARE]
    for proof in (recorded["proof"], recorded["welcome"][-PROOF_SIZE:], welcome[-PROOF_SIZE:], bytes(PROOF_SIZE)):
        with pytest.raises(ProtocolError):
            again.proved(proof)
    caller = Handshake(OURS)
    caller.hello()
    with pytest.raises(ProtocolError):
        caller.welcomed(recorded["welcome"])


def test_a_hello_sent_back_is_no_welcome():
    caller = Handshake(OURS)
    with pytest.raises(ProtocolError):
        caller.welcomed(caller.hello())


def test_who_sits_between_two_peers_without_the_key_cannot_put_his_share_in():
    mine = X25519PrivateKey.generate().public_key().public_bytes_raw()

    def put_in(name, said):
        return said if name == "proof" else said[: SHARE.start] + mine + said[SHARE.stop :]

    for where in ("hello", "welcome"):
        with pytest.raises(ProtocolError):
            shake(OURS, OURS, spoil=lambda name, said, where=where: put_in(name, said) if name == where else said)


def test_a_share_that_makes_the_secret_known_is_refused():
    caller = Handshake(OURS)
    caller.hello()
    welcome = Handshake(OURS).welcome(Handshake(OURS).hello())
    with pytest.raises(ProtocolError, match="share"):
        caller.welcomed(welcome[: SHARE.start] + bytes(32) + welcome[SHARE.stop :])


def test_who_learns_the_key_later_cannot_open_what_was_recorded():
    said = {}

    def keep(name, text):
        said[name] = text
        return text

    (to_answerer, _), _ = shake(OURS, OURS, spoil=keep)
    sealed = to_answerer.seal(b"confidential")
    thief = Handshake(OURS)
    thief.hello()  # a share of his own: the private half of the recorded one is nowhere
    thief._said = said["hello"][:-PROOF_SIZE]
    with pytest.raises(ProtocolError, match="hold the key"):
        thief.welcomed(said["welcome"])
    with pytest.raises(ProtocolError):
        opens(sealed, thief.outgoing)


def test_the_private_halves_are_gone_when_the_handshake_has_ended():
    first, second = Handshake(OURS), Handshake(OURS)
    second.proved(first.welcomed(second.welcome(first.hello())))
    assert first._share is None
    assert second._share is None


@given(st.binary(max_size=HELLO_SIZE + 9), st.sampled_from([OURS, None]))
def test_whatever_bytes_come_the_answer_is_a_protocol_error(came, keys):
    caller = Handshake(OURS)
    caller.hello()
    for take in (Handshake(OURS).welcome, caller.welcomed, Handshake(OURS).proved):
        with pytest.raises(ProtocolError):
            take(came)
    with pytest.raises(ProtocolError):
        Handshake(keys).welcome(b"AFs3" + came if keys is None else b"AFp3" + came)


def test_a_step_out_of_turn_ends_the_handshake():
    with pytest.raises(ProtocolError, match="before the hello"):
        Handshake(OURS).proved(bytes(PROOF_SIZE))
    with pytest.raises(ProtocolError, match="ended"):
        Handshake(OURS).welcomed(Handshake(OURS).welcome(Handshake(OURS).hello()))
