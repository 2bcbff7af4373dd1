"""Which addresses a Triton release with known defects may listen on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triton_vision.server.errors import SetupError
from triton_vision.server.releases import Defect, find_defects
from triton_vision.server.security import LOOPBACK, Security, is_local


def limit(security: Security, host: str, version: str, expose: bool = False) -> tuple[Security, list[str]]:
    """Keeps strangers from what they could crash.

    A defect that no release has fixed refuses nothing: the operator could do nothing about it.

    Args:
        security: how the server is to be closed.
        host: the address that it is to listen on.
        version: the server's; empty where it is not known, and nothing is refused.
        expose: whether the operator has said that it may be crashed.

    Returns:
        The same, with HTTP kept on this machine where only HTTP can be crashed; and warnings, each one sentence.

    Raises:
        SetupError: strangers could crash it over gRPC.
    """
    defects = [defect for defect in find_defects(version) if _open(defect, security)]
    name = f"Triton {version}"
    warnings = [
        f"callers can crash {name} over {' and '.join(defect.over)} by {defect.cause}"
        + (f"; fixed in {defect.fixed}" if defect.fixed else "")
        for defect in defects
    ]
    if is_local(host) or expose:
        return security, warnings
    known = security.tls is not None and security.tls.ca is not None  # callers are not strangers then
    over_grpc = [defect for defect in defects if defect.fixed and "gRPC" in defect.over]
    if over_grpc and not known:
        raise SetupError(
            f"everyone who reaches gRPC on {host} could crash {name} by {', or by '.join(d.cause for d in over_grpc)}: "
            f"serve with {_newest(over_grpc)} or newer, on {LOOPBACK}, or to callers with a certificate only "
            "(--tls-ca); or accept the risk with --expose (docs/security.md)"
        )
    over_http = [defect for defect in defects if defect.fixed and "HTTP" in defect.over]
    if over_http and security.hosts(host)["http"] == host:
        warnings.append(f"HTTP listens on {LOOPBACK} only, since everyone could crash {name} over it (--expose)")
        security = replace(security, local_http=True)
    return security, warnings


def _open(defect: Defect, security: Security) -> bool:
    """Whether a caller reaches what the defect is in."""
    reach = {"gRPC": True, "HTTP": security.http, "shared memory": security.shm_open or "shm" in security.tokens}
    return any(reach[endpoint] for endpoint in defect.over)


def _newest(defects: Sequence[Defect]) -> str:
    return max((defect.fixed for defect in defects), key=lambda version: tuple(map(int, version.split("."))))
