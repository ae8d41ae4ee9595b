"""The job's key: who holds it may speak, everybody else is refused in the handshake.

A job has one secret, 40 printable characters in one file of mode 0600 that every role can read. Nothing uses it as it
is: each purpose has a secret of its own, derived from it.

Invariant: the key is never shown, neither whole nor in part.
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

from asyncflow.errors import ManifestError

_LENGTH = 40
_PRINTABLE = range(0x21, 0x7F)


class Keys:
    """The key of a job. secret: its 40 characters."""

    def __init__(self, *, secret: bytes) -> None:
        if len(secret) != _LENGTH or any(byte not in _PRINTABLE for byte in secret):
            raise ValueError(f"a key has {_LENGTH} printable characters")
        self._secret = secret

    def __repr__(self) -> str:
        return f"Keys({self.domain})"

    @property
    def domain(self) -> str:
        """A name for the job's key that tells nothing about it."""
        return self.derived("name")[:8].hex()

    def derived(self, purpose: str) -> bytes:
        """Return 32 bytes for ``purpose`` that only holders of this key can make, and that tell nothing about it."""
        return hashlib.blake2b(purpose.encode(), key=self._secret, digest_size=32).digest()

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read the key that ``generate`` wrote; ManifestError where the file is missing or holds something else."""
        try:
            return cls(secret=path.read_text("ascii").strip().encode("ascii"))
        except (OSError, ValueError) as error:
            hint = f"The file holds {_LENGTH} characters, as `Keys.generate` writes them"
            raise ManifestError(
                f"the job's key cannot be read: {type(error).__name__}", where=str(path), hint=hint
            ) from error

    @classmethod
    def generate(cls, path: Path) -> Keys:
        """Make a new key and write it to ``path``, readable only by its owner; FileExistsError if there is one."""
        secret = base64.b85encode(os.urandom(32))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
        return cls(secret=secret)
