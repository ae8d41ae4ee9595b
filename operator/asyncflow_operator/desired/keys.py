"""Key and token of a job, derived from the operator's one secret: nobody ever has to read a Secret.

Invariants: a key is a function of the master secret and the owner's uid, so that applying the Secret again changes
nothing, and a job that is made again under the same name has other keys; nothing here is printed or logged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from typing import Final, Literal

from asyncflow.api.names import keys_secret
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest, Owner

_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def make_keys(family: Family, *, master: bytes) -> Manifest:
    """Give the Secret with the key (``key``) and the bearer token (``token``) of a family."""
    said = {"key": key(master, family.owner), "token": token(master, family.owner)}
    data = {name: base64.b64encode(text.encode()).decode() for name, text in said.items()}
    return stamped(
        make_object("v1", "Secret", family, name=keys_secret(family.name), body={"type": "Opaque", "data": data})
    )


def key(master: bytes, owner: Owner) -> str:
    """Give the key as ``asyncflow.net.keys`` reads it: 40 characters of Z85."""
    return z85(_derived(master, owner, "key"))


def token(master: bytes, owner: Owner) -> str:
    """Give the bearer token of the driver's POST routes, 64 hexadecimal digits."""
    return _derived(master, owner, "token").hex()


def z85(raw: bytes) -> str:
    """Write bytes, a multiple of four of them, in ZeroMQ's base 85 (rfc.zeromq.org/spec/32)."""
    words = struct.unpack(f">{len(raw) // 4}I", raw)
    return "".join(_Z85[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


def _derived(master: bytes, owner: Owner, purpose: Literal["key", "token"]) -> bytes:
    return hmac.digest(master, f"asyncflow/{purpose}/{owner.kind}/{owner.uid}".encode(), hashlib.sha256)
