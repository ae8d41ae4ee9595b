"""Secrets of a job, a queue without a job, or a publisher: certificates, and tokens that only some of its pods need.

All contents are derived from the operator's master secret and the owner's UID (``plan.certificates``). Therefore only
the master secret has to be stored, no Secret is read, and writing a Secret again changes no byte. Their names are:

    OWNER-tls-ROLE-MARK   certificates and private keys of the processes of one role, up to ``LEAVES`` in a Secret, as
                          INDEX.crt and INDEX.key, of which a pod mounts those of its own index; for an external role,
                          its one certificate, as the three files that ``rpc.tls`` reads
    OWNER-keys-MARK       the bearer token of the driver's control service, and the password of the store

The mark is derived from the master secret. No one can know the name before the operator has created the Secret, so a
Secret of that name belongs to the owner and is never confused with a user's Secret. A user who may delete and create
Secrets can still replace it, and pods that start afterwards would mount the replacement; but such a user can do the
same to every workload of the namespace.

Invariants: a Secret is a function of the master secret, the kind and UID of the owner, and the part, so a job that is
created again under the same name has different ones. No Secret contains the key of the authority. Nothing here is
printed or logged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncflow.api.names import (
    CERTIFICATE_FILES,
    CLIENT,
    FOLLOWER,
    LABEL_ROLE,
    OPERATOR,
    STORE_SECRET,
    TOKEN_FILE,
    VIEWER,
    secret,
)
from asyncflow.plan.certificates import Authority, Leaf
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest, Owner

LEAVES: Final = 256
"""Most certificates in one Secret: about 250 KB of the allowed 1 MiB."""
KEYS: Final = "keys"
"""Part with the bearer token and the password of the store."""
EXTERNAL_ROLES: Final = (CLIENT, VIEWER, FOLLOWER)
"""Roles of users and their own processes, which have a certificate but no pod of this operator."""
_MARK_DIGITS: Final = 16
_TOKEN: Final = TOKEN_FILE.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretPart:
    """One Secret of an owner.

    role: the role of its certificates, or ``KEYS``; first: the lowest index; leaves: number of certificates from
    ``first`` on; period: the period of the certificates (``plan.certificates``).
    """

    role: str
    first: int = 0
    leaves: int = 0
    period: int = 0

    @property
    def name(self) -> str:
        """The name of the part, unique within its owner: ``rollout``, ``rollout-1``."""
        return part_name(self.role, self.first)


def part_name(role: str, index: int) -> str:
    """Return the name of the part that contains the certificate of process ``index`` of ``role``."""
    return role if index < LEAVES else f"{role}-{index // LEAVES}"


@dataclass(frozen=True, slots=True)
class OwnerSecrets:
    """Secrets of ``owner``. master: the secret that they are derived from."""

    owner: Owner
    master: bytes = field(repr=False)

    def name(self, part: str) -> str:
        """Return the name of the Secret of a part."""
        mark = self._derived(f"name/{part}").hex()[:_MARK_DIGITS]
        return secret(self.owner.name, part if part == KEYS else f"tls-{part}", mark)

    def make(self, family: Family, part: SecretPart) -> Manifest:
        """Return the Secret of a part."""
        authority = self._authority()
        if part.role == KEYS:
            files = {name: authority.secret(name).encode() for name in (_TOKEN, STORE_SECRET)}
        elif part.role in EXTERNAL_ROLES:
            files = _files(authority, authority.leaf(part.role, 0, period=part.period))
        else:
            files = {CERTIFICATE_FILES[0]: authority.certificate}
            for index in range(part.first, part.first + part.leaves):
                leaf = authority.leaf(part.role, index, period=part.period)
                files |= {f"{index}.crt": leaf.certificate, f"{index}.key": leaf.key}
        data = {name: base64.b64encode(content).decode() for name, content in files.items()}
        labels = {} if part.role == KEYS else {LABEL_ROLE: part.role}
        made = make_object(
            "v1", "Secret", family, name=self.name(part.name), labels=labels, body={"type": "Opaque", "data": data}
        )
        return stamped(made)

    def operator(self, period: int) -> Mapping[str, bytes]:
        """Return the files of the certificate with which the operator calls the driver's control service."""
        authority = self._authority()
        return _files(authority, authority.leaf(OPERATOR, 0, period=period))

    def _authority(self) -> Authority:
        return Authority(seed=self._derived("tls"), job=self.owner.uid)

    def _derived(self, purpose: str) -> bytes:
        text = f"asyncflow/{purpose}/{self.owner.kind}/{self.owner.uid}"
        return hmac.digest(self.master, text.encode(), hashlib.sha256)


def _files(authority: Authority, leaf: Leaf) -> dict[str, bytes]:
    return dict(zip(CERTIFICATE_FILES, (authority.certificate, leaf.certificate, leaf.key), strict=True))
