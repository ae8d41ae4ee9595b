"""The beginning of a connection: each side learns that the other holds the job's key, the caller which server answers,
and both get new keys.

    caller                                                     answerer
    hello = magic, nonce, share, mac                  ->       goes on if the mac is right
                          <-       welcome = magic, nonce, share, server, answerer's proof
    caller's proof                                    ->       listens if it is right

``server`` says which one answers (``hosts.server_of``): who dialled another one goes no further, who named none takes
whichever answers.

``secret`` is derived from the job's key, within a host from the name of the place too. A nonce is 16 random bytes. A
share is the public half of a new X25519 key, whose other half never leaves the process and is dropped when the
handshake ends. The mac is HMAC-SHA256 under the secret, of what stands before it in the hello. From the hello and the
welcome without its proof, each side computes

    root    = HMAC-SHA256(secret, X25519 of both shares)                           HKDF-Extract of RFC 5869
    derived = HMAC-SHA256(root, purpose, SHA-256(hello, welcome), 1)               HKDF-Expand, one block

with four purposes: the proof of the caller and of the answerer (16 bytes each, compared in constant time), and the key
that seals what either sends (AES-128-GCM, see ``sealed``).

What it gives. Who does not hold the key is told nothing and can say nothing: a wrong mac ends the connection before
anything is computed for it, and of who has not proved to hold the key, now, no more is read than a hello and a proof.
All that either side said goes into the proofs and the keys: changed, replayed or mixed from two connections, it ends
the connection. Each connection and each direction has keys that nothing else has. Forward secrecy: who records what is
said and learns the job's key later cannot read it, since the private halves of the shares are gone.

What it does not give. Holders of the key are not told apart: each may pose as any other, to any other, as any
``server`` too, so who has stolen the key can put himself between two peers from then on. That there is a connection,
when, and how many bytes go is for all to see. A recorded hello may be sent again: it costs the answerer one welcome,
with which nobody can do anything. Keys are not changed while a connection lasts. Memory is not wiped. Who can compute
discrete logarithms on X25519 (a quantum computer) and learns the job's key can read what was recorded.

Without the job's key (on loopback) hello, welcome and proof are a magic and zeros, ``server`` apart, nothing is sealed,
and anybody who knows the magic may speak. ``server`` is no more than a claim then: it guards against accidents, such as
a port that is used again, and not against intent. A side with a key and one without refuse each other.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING

from asyncflow.errors import ProtocolError
from asyncflow.net.stream.sealed import KEY, Seal
from asyncflow.net.stream.server import ANYBODY, SERVER_SIZE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from asyncflow.net.keys import Keys

_SEALED, _PLAIN = b"AFs3", b"AFp3"
_NONCE, _SHARE = 16, 32
PROOF_SIZE = 16
_GREETING = len(_SEALED) + _NONCE + _SHARE
_SAID = _GREETING + SERVER_SIZE
HELLO_SIZE, WELCOME_SIZE = _GREETING + PROOF_SIZE, _SAID + PROOF_SIZE
_NOTHING = bytes(PROOF_SIZE)
_PURPOSES = (b"answerer proves", b"caller proves", b"caller seals", b"answerer seals")
_HINT = "Do both sides hold the key of this job?"


class Handshake:
    """One connection's. keys: of the job, None for plain text; place: where it is, if hands may be shaken only there;
    server: which one is dialled, or which one answers.

    The caller sends ``hello`` and answers the welcome by ``welcomed``; the other answers by ``welcome`` and ``proved``.
    outgoing, incoming: the seals of what is sent and what comes, None in plain text.
    """

    def __init__(self, keys: Keys | None, *, place: str = "", server: bytes = ANYBODY) -> None:
        self._secret = None if keys is None else keys.derived(f"streams{place}")
        self._magic = _PLAIN if keys is None else _SEALED
        self._server = server
        self._share: X25519PrivateKey | None = None
        self._said = b""
        self._proof: bytes | None = None
        self.outgoing: Seal | None = None
        self.incoming: Seal | None = None

    def hello(self) -> bytes:
        """Begin, as the caller."""
        self._said = self._greeting()
        return self._said + self._mac(self._said)

    def welcome(self, hello: bytes) -> bytes:
        """Answer a caller. ProtocolError for a stranger."""
        self._check(hello)
        self._expect(self._mac(hello[:_GREETING]), hello[_GREETING:])
        said = self._greeting() + self._server
        mine, self._proof, self.incoming, self.outgoing = self._agreed(hello[:_GREETING], said, theirs=hello)
        return said + mine

    def proved(self, proof: bytes) -> None:
        """Take in what the caller made of the welcome. ProtocolError where it does not hold the key."""
        if self._proof is None:
            raise ProtocolError("a proof came before the hello")
        self._expect(self._proof, proof)

    def welcomed(self, welcome: bytes) -> bytes:
        """Take in the welcome, and give the caller's proof.

        ProtocolError where the answerer does not hold the key, or is not the one that was dialled.
        """
        self._check(welcome)
        theirs, mine, self.outgoing, self.incoming = self._agreed(self._said, welcome[:_SAID], theirs=welcome)
        self._expect(theirs, welcome[_SAID:])
        if self._server not in (ANYBODY, welcome[_GREETING:_SAID]):
            raise ProtocolError("another server is at this address now", hint="The one that was dialled is gone")
        return mine

    def _greeting(self) -> bytes:
        """Return magic, nonce and a new share."""
        if self._secret is None:
            return self._magic.ljust(_GREETING, b"\0")
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._share = X25519PrivateKey.generate()
        return self._magic + os.urandom(_NONCE) + self._share.public_key().public_bytes_raw()

    def _check(self, came: bytes) -> None:
        if came[:4] != self._magic:
            what = "is no part of this protocol"
            if came[:4] in (_SEALED, _PLAIN):
                what = "expects sealed messages" if came[:4] == _SEALED else "expects messages in plain text"
            raise ProtocolError(f"the peer {what}", hint=_HINT)

    def _mac(self, said: bytes) -> bytes:
        return _NOTHING if self._secret is None else hmac.digest(self._secret, said, hashlib.sha256)[:PROOF_SIZE]

    def _expect(self, proof: bytes, came: bytes) -> None:
        if not hmac.compare_digest(proof, came):
            raise ProtocolError("the peer does not hold the key", hint=_HINT)

    def _agreed(self, hello: bytes, welcome: bytes, *, theirs: bytes) -> tuple[bytes, bytes, Seal | None, Seal | None]:
        """Return the proofs of answerer and caller, and the seals of what caller and answerer send."""
        share, self._share = self._share, None
        if self._secret is None:
            return _NOTHING, _NOTHING, None, None
        if share is None:
            raise ProtocolError("a handshake has ended already")
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            shared = share.exchange(X25519PublicKey.from_public_bytes(theirs[_GREETING - _SHARE : _GREETING]))
        except ValueError:
            raise ProtocolError("the peer's share is none", hint=_HINT) from None
        root = hmac.digest(self._secret, shared, hashlib.sha256)
        said = hashlib.sha256(hello + welcome).digest()
        derived = [hmac.digest(root, purpose + said + b"\x01", hashlib.sha256) for purpose in _PURPOSES]
        answerer, caller = (proof[:PROOF_SIZE] for proof in derived[:2])
        of_caller, of_answerer = (Seal(key[:KEY]) for key in derived[2:])
        return answerer, caller, of_caller, of_answerer
