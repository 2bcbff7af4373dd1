"""The certificate files of a server: read and tried before anything starts, so that what is wrong is said in words.

Triton itself says nothing of a certificate that has expired or that nobody signed; its callers find out.
"""

from __future__ import annotations

import re
import socket
import ssl
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_vision.server.errors import ServerStartError, SetupError

WARN_DAYS = 14
DAY_S = 86_400
PEM_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class Certificates:
    """What the gRPC endpoint shows its callers, and what it wants of them; paths to PEM files.

    Attributes:
        certificate: the server's, followed by those between it and its root, if there are any.
        key: its private key, without a passphrase.
        ca: the authority that signs callers' certificates; with one, a caller has to show such a certificate.
    """

    certificate: Path
    key: Path
    ca: Path | None = None

    def options(self) -> list[str]:
        """tritonserver's options."""
        mutual = self.ca is not None
        options = [
            f"--grpc-use-ssl{'-mutual' if mutual else ''}=true",
            f"--grpc-server-cert={self.certificate.absolute()}",
            f"--grpc-server-key={self.key.absolute()}",
        ]
        return [*options, f"--grpc-root-cert={self.ca.absolute()}"] if self.ca is not None else options

    def check(self) -> list[str]:
        """Reads and tries the files; returns warnings, each one sentence.

        Raises:
            SetupError: a file cannot be used, others may read the key, or the certificate is not valid today.
        """
        refuse_if_open("--tls-key", self.key)
        pem, key = _read("--tls-cert", self.certificate), _read("--tls-key", self.key)
        if not PEM_CERTIFICATE.search(pem):
            raise SetupError(f"--tls-cert {self.certificate} holds no certificate in PEM form")
        if "PRIVATE KEY-----" not in key:
            raise SetupError(f"--tls-key {self.key} holds no private key in PEM form")
        if "ENCRYPTED" in key:
            raise SetupError(
                f"--tls-key {self.key} has a passphrase, which Triton cannot take: write it without one "
                "(openssl pkey -in OLD -out NEW)"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except ssl.SSLError as error:
            if "MISMATCH" in (error.reason or ""):
                raise SetupError(
                    f"the key {self.key} does not belong to the certificate {self.certificate}: "
                    "give the two that were made together, the server's own certificate first in its file"
                ) from None
            raise SetupError(
                f"{self.certificate} and {self.key} cannot be used as certificate and key: {_words(error)}"
            ) from None
        own = self._look(context, pem)
        if self.ca is not None:
            self._check_ca(self.ca)
        return self._warnings(own)

    def names(self) -> tuple[str, ...]:
        """The hosts and addresses that the certificate is for; for a certificate that ``check`` has passed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return _names(self._look(context, _read("--tls-cert", self.certificate)))

    def seen_at(self, address: str, timeout: float = 5.0) -> None:
        """Connects to the server's gRPC endpoint and compares the certificate that it shows with this one.

        Args:
            address: ``HOST:PORT``.

        Raises:
            ServerStartError: there is no TLS at that address, or another certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # It is not the name that matters here: the certificate has to be this very one.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        try:
            with (
                socket.create_connection((host.strip("[]"), int(port)), timeout) as plain,
                context.wrap_socket(plain) as secure,
            ):
                shown = secure.getpeercert(binary_form=True)
        except OSError as error:  # ssl.SSLError is one
            raise ServerStartError(f"Triton started, but {address} makes no TLS connection: {_words(error)}") from None
        if shown != _first_der(_read("--tls-cert", self.certificate)):
            raise ServerStartError(f"Triton started, but {address} shows another certificate than {self.certificate}")

    def _look(self, server: ssl.SSLContext, pem: str) -> dict[str, Any]:
        """What the certificate says of itself: a caller that trusts it alone meets it, in memory."""
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            client.load_verify_locations(cadata=_first_der(pem))
            return _meet(server, client)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code == 10:  # X509_V_ERR_CERT_HAS_EXPIRED
                raise SetupError(f"the certificate {self.certificate} has expired: renew it") from None
            if error.verify_code == 9:  # X509_V_ERR_CERT_NOT_YET_VALID
                raise SetupError(
                    f"the certificate {self.certificate} is not valid yet: check it, and this machine's clock"
                ) from None
            raise SetupError(
                f"callers will not accept the certificate {self.certificate}: {error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            raise SetupError(f"the certificate {self.certificate} cannot be used: {_words(error)}") from None

    def _check_ca(self, ca: Path) -> None:
        _read("--tls-ca", ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(cafile=ca)
        except ssl.SSLError:
            raise SetupError(f"--tls-ca {ca} holds no certificate in PEM form") from None
        authorities = context.get_ca_certs()
        if not authorities:
            raise SetupError(f"--tls-ca {ca} holds no authority's certificate: give the one that signed the callers'")
        if all(_seconds_left(one) <= 0 for one in authorities):
            raise SetupError(f"the authority in {ca} has expired, so no caller could be accepted: renew it")

    def _warnings(self, own: dict[str, Any]) -> list[str]:
        warnings, days = [], _seconds_left(own) / DAY_S
        if days < WARN_DAYS:
            warnings.append(
                f"the certificate {self.certificate} expires in {days:.0f} days: renew it, and start serve again"
            )
        if not _names(own):
            warnings.append(
                f"the certificate {self.certificate} names no host or address (subjectAltName): "
                "callers that check it, as gRPC's do, will refuse it"
            )
        return warnings


def refuse_if_open(option: str, path: Path) -> None:
    """Raises SetupError if every user of the machine may read or change a secret's file, or if it is not there."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SetupError(f"{option} {path} cannot be read: {_words(error)}") from None
    # The group may read: that is how orchestrators hand secrets to a container's user.
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise SetupError(f"{option} {path} is open to every user of this machine: chmod 600 {path}")


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SetupError(f"{option} {path} cannot be read: {_words(error)}") from None


def _first_der(pem: str) -> bytes:
    match = PEM_CERTIFICATE.search(pem)
    assert match is not None
    return ssl.PEM_cert_to_DER_cert(match[0])


def _meet(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """A handshake of the two in memory; returns what the client knows of the server's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server)
    for side in (theirs, ours, theirs):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return theirs.getpeercert() or {}


def _names(certificate: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(name) for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))


def _seconds_left(certificate: dict[str, Any]) -> float:
    return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()


def _words(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else (error.strerror or str(error)).lower()
