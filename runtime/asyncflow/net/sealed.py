"""Seals for the bytes of one connection: AES-128-GCM under keys that this connection alone has.

Both peers hold the job's key. The caller says hello, the answerer welcomes it and proves that it holds the key, then
the caller does. From both nonces and the job's key each direction gets its own key (HKDF), so that nothing recorded
from another connection opens here. The nonce of a seal is its number: what is replayed, left out, reordered or changed
does not open.

Invariants: no nonce is used twice with a key; nothing that is not sealed by a holder of the job's key is given out, and
of who has not proved that it is one, a few bytes are read. Who learns the job's key later can read what was recorded:
there is no forward secrecy.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from asyncflow.errors import ProtocolError

TAG = 16
HELLO_SIZE = 20
WELCOME_SIZE = HELLO_SIZE + TAG
PROOF_SIZE = TAG
_SEALED, _PLAIN = b"AFs1", b"AFp1"
_NONCE = 16
_PROOF = b"\xff" * 12
_HINT = "Do both sides hold the key of this job?"


class Seal:
    """One direction of a connection: the sender seals, the receiver opens, in the same order."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # only those who seal pay for it

        self._gcm = AESGCM(key)
        self._number = 0

    def seal(self, data: bytes | memoryview) -> bytearray:
        """Give ``data`` sealed, which makes it longer by ``TAG``."""
        sealed = bytearray(len(data) + TAG)
        self._gcm.encrypt_into(self._next(), data, None, sealed)
        return sealed

    def open(self, sealed: memoryview, into: memoryview) -> None:
        """Open the next seal into memory of its size less ``TAG``; ProtocolError where it is not the one expected."""
        from cryptography.exceptions import InvalidTag

        try:
            self._gcm.decrypt_into(self._next(), sealed, None, into)
        except InvalidTag:
            raise ProtocolError("bytes came that the peer did not seal, or not now", hint=_HINT) from None

    def proof(self, of: bytes) -> bytes:
        """Give a tag that only this key makes."""
        return self._gcm.encrypt(_PROOF, b"", of)

    def _next(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "big")


class Handshake:
    """The beginning of one connection. secret: derived from the job's key; None for connections in plain text.

    The caller sends ``hello`` and answers the ``welcome`` with a proof; who has proved nothing is not listened to.
    outgoing, incoming: the seals of what is sent and what comes, None in plain text.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._magic = _PLAIN if secret is None else _SEALED
        self._said = b""
        self.hello = self._magic + os.urandom(_NONCE)
        self.outgoing: Seal | None = None
        self.incoming: Seal | None = None

    def welcome(self, hello: bytes) -> bytes:
        """Answer a caller. ProtocolError for a stranger."""
        self._check(hello)
        self._said = hello + self._magic + os.urandom(_NONCE)
        if self._secret is not None:
            self.incoming, self.outgoing = self._seals(self._secret)
        return self._said[HELLO_SIZE:] + self._proof(self.outgoing)

    def proved(self, proof: bytes) -> None:
        """Take in what the caller made of the welcome. ProtocolError where it does not hold the key."""
        self._expect(self._proof(self.incoming), proof)

    def welcomed(self, welcome: bytes) -> bytes:
        """Take in the welcome, and give the caller's proof. ProtocolError where the answerer does not hold the key."""
        self._check(welcome)
        self._said = self.hello + welcome[:HELLO_SIZE]
        if self._secret is not None:
            self.outgoing, self.incoming = self._seals(self._secret)
        self._expect(self._proof(self.incoming), welcome[HELLO_SIZE:])
        return self._proof(self.outgoing)

    def _check(self, came: bytes) -> None:
        if came[:4] != self._magic:
            what = "is no part of this protocol"
            if came[:4] in (_SEALED, _PLAIN):
                what = "expects sealed messages" if came[:4] == _SEALED else "expects messages in plain text"
            raise ProtocolError(f"the peer {what}", hint=_HINT)

    def _proof(self, seal: Seal | None) -> bytes:
        return bytes(TAG) if seal is None else seal.proof(self._said)

    def _expect(self, proof: bytes, came: bytes) -> None:
        if not hmac.compare_digest(proof, came):
            raise ProtocolError("the peer does not hold the key", hint=_HINT)

    def _seals(self, secret: bytes) -> tuple[Seal, Seal]:
        """Give the seals of the caller's and the answerer's direction (HKDF of RFC 5869, one block)."""
        extracted = hmac.digest(self._said, secret, hashlib.sha256)
        purposes = (b"asyncflow stream: caller", b"asyncflow stream: answerer")
        of_caller, of_answerer = (hmac.digest(extracted, info + b"\x01", hashlib.sha256)[:16] for info in purposes)
        return Seal(of_caller), Seal(of_answerer)
