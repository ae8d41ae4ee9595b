"""The certificate authority of one control plane, and kubeconfigs with certificates that it signs.

Kubernetes takes the user from the common name of a client certificate, and the groups from its organisations. A test
can therefore act as any user, and RBAC decides as in production. Invariant: no key leaves the folder.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Final

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE: Final = datetime.timedelta(days=7)
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)
_SERVER_NAMES: Final = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
_PRIVATE: Final = 0o600


class Authority:
    """The authority of one cluster; ``folder`` contains its keys and the certificates that it signed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.crt"
        self.ca_key = folder / "ca.key"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "asyncflow-test-ca")])
        self.ca.write_bytes(_pem(self._signed(self._name, self._key.public_key(), authority=True)))
        _keep(self.ca_key, self._key)

    def server(self, name: str, *, addresses: tuple[str, ...]) -> tuple[Path, Path]:
        """Return certificate and key of a server, valid for ``addresses`` and for the names of the API server."""
        names: list[x509.GeneralName] = [x509.DNSName(each) for each in _SERVER_NAMES]
        names += [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
        return self._issue(name, user=name, groups=(), names=names)

    def client(self, name: str, *, user: str, groups: tuple[str, ...]) -> tuple[Path, Path]:
        """Return certificate and key of ``user`` in ``groups``, in files named after ``name``."""
        return self._issue(name, user=user, groups=groups, names=[])

    def kubeconfig(self, name: str, *, server: str, user: str, groups: tuple[str, ...]) -> Path:
        """Return a kubeconfig file, named after ``name``, that authenticates as ``user`` in ``groups``."""
        certificate, key = self.client(name, user=user, groups=groups)
        path = self.folder / f"{name}.kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "plane", "cluster": {"server": server, "certificate-authority": str(self.ca)}}],
            "users": [{"name": name, "user": {"client-certificate": str(certificate), "client-key": str(key)}}],
            "contexts": [{"name": "plane", "context": {"cluster": "plane", "user": name}}],
            "current-context": "plane",
        }
        path.touch(_PRIVATE)
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def signing_key(self, name: str) -> tuple[Path, Path]:
        """Return a public and a private key for signing service account tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        public, private = self.folder / f"{name}.pub", self.folder / f"{name}.key"
        encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(encoding, form))
        _keep(private, key)
        return public, private

    def _issue(
        self, name: str, *, user: str, groups: tuple[str, ...], names: list[x509.GeneralName]
    ) -> tuple[Path, Path]:
        certificate, private = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        attributes.append(x509.NameAttribute(NameOID.COMMON_NAME, user))
        certificate.write_bytes(_pem(self._signed(x509.Name(attributes), key.public_key(), names=names)))
        _keep(private, key)
        return certificate, private

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        names: list[x509.GeneralName] | None = None,
        authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        building = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if authority:
            building = building.add_extension(_usage(signs=True), critical=True)
        else:
            uses = [ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH]
            building = building.add_extension(_usage(signs=False), critical=True)
            building = building.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if names:
            building = building.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return building.sign(self._key, hashes.SHA256())


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _keep(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(_PRIVATE)
    none = serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, none)
    )
