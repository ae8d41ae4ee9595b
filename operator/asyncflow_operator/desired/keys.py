"""Key and token of a job, derived from the operator's one secret: nobody ever has to read a Secret.

The operator may create Secrets and nothing else, so it cannot look whether a Secret is the job's own. The name says it:
its mark is derived from the master secret and the owner's uid, as the keys are. Nobody else can know the name before
the operator has made the Secret, so one of that name is the job's, and a person's Secret is never mistaken for it. It
is immutable. Whoever may delete Secrets and create them can still put another one in its place, which pods that start
later would mount; such a person can do the same to any workload of that namespace.

Invariants: a key is a function of the master secret and the owner's uid, so that making the Secret again changes
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

_MARK_DIGITS: Final = 16
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def make_keys(family: Family, *, master: bytes) -> Manifest:
    """Return the Secret with the key (``key``) and the bearer token (``token``) of a family."""
    said = {"key": key(master, family.owner), "token": token(master, family.owner)}
    data = {name: base64.b64encode(text.encode()).decode() for name, text in said.items()}
    body = {"type": "Opaque", "immutable": True, "data": data}
    return stamped(make_object("v1", "Secret", family, name=secret_name(master, family.owner), body=body))


def secret_name(master: bytes, owner: Owner) -> str:
    """Return the name of the Secret of a job or of a queue that stands alone."""
    return keys_secret(owner.name, _derived(master, owner, "name").hex()[:_MARK_DIGITS])


def key(master: bytes, owner: Owner) -> str:
    """Return the key as ``asyncflow.net.keys`` reads it: 40 characters of Z85."""
    return z85(_derived(master, owner, "key"))


def token(master: bytes, owner: Owner) -> str:
    """Return the bearer token of the driver's POST routes, 64 hexadecimal digits."""
    return _derived(master, owner, "token").hex()


def z85(raw: bytes) -> str:
    """Write bytes, a multiple of four of them, in ZeroMQ's base 85 (rfc.zeromq.org/spec/32)."""
    words = struct.unpack(f">{len(raw) // 4}I", raw)
    return "".join(_Z85[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


def _derived(master: bytes, owner: Owner, purpose: Literal["key", "token", "name"]) -> bytes:
    return hmac.digest(master, f"asyncflow/{purpose}/{owner.kind}/{owner.uid}".encode(), hashlib.sha256)
