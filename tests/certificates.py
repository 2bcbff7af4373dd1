"""An authority of the tests' own, and certificates of it: right ones and each kind of wrong one."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


class Pair:
    """A certificate and its key, as PEM files."""

    def __init__(self, folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_key(self.key, key)


class Authority:
    """Signs certificates into a folder.

    Args:
        folder: where the files go.
        name: the authority's own name; its certificate is ``NAME.pem``.
        days: until it expires; below 0 it has.
    """

    def __init__(self, folder: Path, name: str = "authority", days: float = 30) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._key, days).issuer_name(self._name)
        certificate = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str, days: float = 30, client: bool = False) -> Pair:
        """A certificate ``NAME.pem`` with the key ``NAME.key``.

        Args:
            hosts: the names and addresses that it is for.
            days: until it expires; below 0 it has expired that many days ago.
            client: whether it is for a caller; else for a server, and for nothing but a server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        builder = _builder(subject, key, days).issuer_name(self._name)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        return Pair(self._folder, name, builder.sign(self._key, hashes.SHA256()), key)


def write_key(file: Path, key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> None:
    """Writes a private key that its owner alone may read."""
    protection: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        protection = serialization.BestAvailableEncryption(passphrase)
    form = serialization.PrivateFormat.PKCS8
    file.touch(mode=0o600)
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, protection))


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    begin, end = (now - DAY, now + days * DAY) if days >= 0 else (now + (days - 30) * DAY, now + days * DAY)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
