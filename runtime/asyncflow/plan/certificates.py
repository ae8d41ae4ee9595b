"""The certificate authority of one job, and the certificates with which its processes authenticate each other.

All keys and signatures are derived from a seed of 32 random bytes: the key of the authority, the key of each process
and the signatures (deterministic ECDSA, RFC 6979). A certificate that is made again is therefore identical to the byte;
only the seed has to be stored. Anyone who knows the seed can act as any process of that job, but not of another job.

A certificate identifies its process by a URI, ``asyncflow://JOB/ROLE/INDEX``, and for HTTPS by the DNS name
``ROLE-INDEX``. It names no host, since the addresses of pods are reused. It belongs to a *period* of two days, and is
valid from one hour before the period until five days after it. A clock may therefore be wrong by an hour, and the
process that renews certificates may be down for five days.

Invariant: the ``cryptography`` package makes keys and signatures, and ``ssl`` checks them; this module does neither.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from asyncflow.identity import ProcessIdentity

SEED_BYTES: Final = 32
PERIOD_S: Final = 2 * 86_400
_EARLY_S: Final = 3_600
_LATE_S: Final = 5 * 86_400
_SERIAL_BYTES: Final = 16
_KEY_BYTES: Final = 48
"""Bytes from which a private key is computed: 16 more than its size, so that the remainder is almost uniform."""
_SINCE: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NEVER_EXPIRES: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""The end of a certificate that does not expire (RFC 5280, 4.1.2.5). An authority is used until its job ends, and is
valid from 1970, the year in which the clock of a machine without the time starts."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """The certificate of one process and its private key, both in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def period_of(now: float) -> int:
    """Return the period in which the time ``now`` lies (Unix seconds)."""
    return int(now // PERIOD_S)


def derived(seed: bytes, purpose: str, *, length: int = SEED_BYTES) -> bytes:
    """Return ``length`` secret bytes for ``purpose``, which reveal neither the seed nor other secrets (RFC 5869)."""
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=None, info=f"asyncflow/{purpose}".encode()).derive(seed)


class Authority:
    """The certificate authority of ``job``, a name that no other job ever has (its UID on a cluster).

    seed: ``SEED_BYTES`` random bytes. Raises ValueError for any other number of bytes.
    """

    def __init__(self, *, seed: bytes, job: str) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed must have {SEED_BYTES} bytes, not {len(seed)}")
        self.job = job
        self._seed = seed
        self._key = _private_key(seed, f"{job}/authority")
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"asyncflow {job}"[:64])])
        public = self._key.public_key()
        builder = _builder(seed, f"{job}/authority", subject=self._name, issuer=self._name, public=public)
        builder = builder.not_valid_before(_SINCE).not_valid_after(_NEVER_EXPIRES)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        self.certificate: bytes = self._signed(builder)
        """The authority's own certificate in PEM, with which processes check the other certificates."""

    def __repr__(self) -> str:
        return f"Authority({self.job})"

    def leaf(self, role: str, index: int, *, period: int) -> Leaf:
        """Return the certificate of process ``index`` of ``role`` for ``period``."""
        purpose = f"{self.job}/{role}/{index}/{period}"
        key = _private_key(self._seed, purpose)
        public = key.public_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role}-{index}"[:64])])
        identity = ProcessIdentity(self.job, role, index)
        names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(str(identity))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        begin = datetime.datetime.fromtimestamp(period * PERIOD_S, datetime.UTC)
        builder = _builder(self._seed, purpose, subject=name, issuer=self._name, public=public)
        builder = builder.not_valid_before(begin - datetime.timedelta(seconds=_EARLY_S))
        builder = builder.not_valid_after(begin + datetime.timedelta(seconds=PERIOD_S + _LATE_S))
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return Leaf(
            certificate=self._signed(builder.add_extension(issuer, critical=False)),
            key=key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def secret(self, purpose: str) -> str:
        """Return a secret that this job uses for ``purpose`` (a bearer token, a password): 64 hexadecimal digits."""
        return derived(self._seed, f"{self.job}/secret/{purpose}").hex()

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        signed = builder.sign(self._key, hashes.SHA256(), ecdsa_deterministic=True)
        return signed.public_bytes(serialization.Encoding.PEM)


def _private_key(seed: bytes, purpose: str) -> ec.EllipticCurvePrivateKey:
    number = int.from_bytes(derived(seed, f"{purpose}/key", length=_KEY_BYTES))
    return ec.derive_private_key(number % (ec.SECP256R1().group_order - 1) + 1, ec.SECP256R1())


def _builder(
    seed: bytes, purpose: str, *, subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Return a builder with the fields that all certificates have.

    The highest bit of the serial number is 0, since serial numbers are positive.
    """
    serial = int.from_bytes(derived(seed, f"{purpose}/serial", length=_SERIAL_BYTES)) >> 1 or 1
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    return builder.serial_number(serial)


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Return the key usage: to sign certificates (``signs``), or to sign TLS handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
