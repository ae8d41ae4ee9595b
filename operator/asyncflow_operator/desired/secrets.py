"""Secrets of a job, a lone queue or a publisher: certificates, and what else only some of its pods may know.

Everything follows from the operator's master secret and the owner's UID (``plan.certificates``), so nothing but the
master secret has to be kept, nothing is read back, and making a Secret again changes no byte. There are three sorts:

    OWNER-tls-ROLE-MARK     certificates and private keys of the processes of one role, ``LEAVES`` a Secret, as
                            INDEX.crt and INDEX.key: a pod mounts those of its own index
    OWNER-tls-PERSON-MARK   the certificate of a person, as the three files that ``rpc.tls`` reads
    OWNER-keys-MARK         the bearer token of the driver's control service, and the password of the store

The mark is derived from the master secret. Nobody else can know the name before the operator has made the Secret, so
one of that name is the owner's, and a person's Secret is never mistaken for it. Whoever may delete Secrets and create
them can still put another one in its place, which pods that start later would mount; such a person can do the same to
any workload of that namespace.

Invariants: a Secret is a function of the master secret, kind and UID of the owner, and part, so a job that is made
again under the same name has others; the key of the authority is in none of them; nothing here is printed or logged.
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
"""Certificates in one Secret: 250 KB, of the 1 MiB that one may have."""
KEYS: Final = "keys"
"""Part with the bearer token and the password of the store."""
PEOPLE: Final = (CLIENT, VIEWER, FOLLOWER)
"""Roles of people and of what they run, which have a certificate and no pod of this operator."""
_MARK_DIGITS: Final = 16
_TOKEN: Final = TOKEN_FILE.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretPart:
    """One Secret of an owner.

    role: whose certificates it has, or ``KEYS``; first: the lowest index; leaves: certificates, from ``first`` on;
    period: that of the certificates (``plan.certificates``).
    """

    role: str
    first: int = 0
    leaves: int = 0
    period: int = 0

    @property
    def name(self) -> str:
        """The name of the part among those of its owner: ``rollout``, ``rollout-1``."""
        return part_name(self.role, self.first)


def part_name(role: str, index: int) -> str:
    """Return the name of the part in which the certificate of process ``index`` of ``role`` is."""
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
            said = {name: authority.secret(name).encode() for name in (_TOKEN, STORE_SECRET)}
        elif part.role in PEOPLE:
            said = _files(authority, authority.leaf(part.role, 0, period=part.period))
        else:
            said = {CERTIFICATE_FILES[0]: authority.certificate}
            for index in range(part.first, part.first + part.leaves):
                leaf = authority.leaf(part.role, index, period=part.period)
                said |= {f"{index}.crt": leaf.certificate, f"{index}.key": leaf.key}
        data = {name: base64.b64encode(content).decode() for name, content in said.items()}
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
        said = f"asyncflow/{purpose}/{self.owner.kind}/{self.owner.uid}"
        return hmac.digest(self.master, said.encode(), hashlib.sha256)


def _files(authority: Authority, leaf: Leaf) -> dict[str, bytes]:
    return dict(zip(CERTIFICATE_FILES, (authority.certificate, leaf.certificate, leaf.key), strict=True))
