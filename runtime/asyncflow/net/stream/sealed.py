"""Seals for one direction of one connection: AES-128-GCM under a key that nothing else has.

The nonce of a seal is its number: what is replayed, left out, reordered or changed does not open.

Invariants: no nonce is used twice with a key; nothing that does not open is given out.
"""

from __future__ import annotations

from asyncflow.errors import ProtocolError

TAG = 16
KEY = 16


class Seal:
    """The sender seals, the receiver opens, in the same order. key: ``KEY`` bytes."""

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag  # only those who seal pay for it
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._wrong = InvalidTag
        self._gcm = AESGCM(key)
        self._number = 0

    def seal(self, data: bytes | memoryview, *, behind: int = 0) -> bytearray:
        """Return ``data`` sealed, which makes it longer by ``TAG``, behind so many bytes that are zero."""
        sealed = bytearray(behind + len(data) + TAG)
        self._gcm.encrypt_into(self._next(), data, None, memoryview(sealed)[behind:])
        return sealed

    def open(self, sealed: memoryview, into: memoryview) -> None:
        """Open the next seal into memory of its size less ``TAG``; ProtocolError where it is not the one expected."""
        try:
            self._gcm.decrypt_into(self._next(), sealed, None, into)
        except self._wrong:
            raise ProtocolError("bytes came that the peer did not seal, or not now") from None

    def _next(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "big")
