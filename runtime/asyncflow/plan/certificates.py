"""The certificate authority of one job, and the certificates with which its processes know each other.

Everything follows from a seed of 32 random bytes: the key of the authority, the key of each process and all signatures
(ECDSA of RFC 6979, which draws nothing at random). So a certificate that is made again is the same to the byte, nothing
has to be read back from where it was put, and only the seed has to be kept. Who knows the seed can be any process of
that job, and of no other.

A certificate names the process that holds it by a URI, ``asyncflow://JOB/ROLE/INDEX``, and for HTTPS by the DNS name
``ROLE-INDEX``, and no host: addresses of pods are used again by others. It belongs to a *period* of two days, is valid
an hour before that begins and five days after it has ended. So a clock may be wrong by an hour, and whoever renews
certificates may be away for five days.

Invariant: keys and signatures are made by the ``cryptography`` package and checked by ``ssl``, never here.
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
"""Bytes that become a private key: 16 more than one has, so that the remainder is as good as uniform."""
_SINCE: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_FOR_EVER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""The end of a certificate that has none (RFC 5280, 4.1.2.5): an authority ends with its job, and is valid by any clock
before, since a machine that has lost the time begins in 1970."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """The certificate of one process and the private key to it, both in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def period_of(now: float) -> int:
    """Return the period in which the time ``now`` lies (Unix seconds)."""
    return int(now // PERIOD_S)


def derived(seed: bytes, purpose: str, *, length: int = SEED_BYTES) -> bytes:
    """Return ``length`` secret bytes for ``purpose``, which say nothing about the seed or other purposes (RFC 5869)."""
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=None, info=f"asyncflow/{purpose}".encode()).derive(seed)


class Authority:
    """The certificate authority of ``job``, a name that no other job ever has (its UID on a cluster).

    seed: ``SEED_BYTES`` random bytes. Raises ValueError where they are not so many.
    """

    def __init__(self, *, seed: bytes, job: str) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
        self.job = job
        self._seed = seed
        self._key = _private_key(seed, f"{job}/authority")
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"asyncflow {job}"[:64])])
        public = self._key.public_key()
        builder = _builder(seed, f"{job}/authority", subject=self._name, issuer=self._name, public=public)
        builder = builder.not_valid_before(_SINCE).not_valid_after(_FOR_EVER)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        self.certificate: bytes = self._signed(builder)
        """The authority's own certificate in PEM, which whoever checks the others has."""

    def __repr__(self) -> str:
        return f"Authority({self.job})"

    def leaf(self, role: str, index: int, *, period: int) -> Leaf:
        """Return the certificate of process ``index`` of ``role`` for ``period``."""
        purpose = f"{self.job}/{role}/{index}/{period}"
        key = _private_key(self._seed, purpose)
        public = key.public_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role}-{index}"[:64])])
        who = ProcessIdentity(self.job, role, index)
        names = [x509.UniformResourceIdentifier(who.uri), x509.DNSName(str(who))]
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
    """Return what all certificates begin with. The highest bit of a serial number is 0, since it is positive."""
    serial = int.from_bytes(derived(seed, f"{purpose}/serial", length=_SERIAL_BYTES)) >> 1 or 1
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    return builder.serial_number(serial)


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Return what a key is for: to sign certificates, or what is said in a handshake."""
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
