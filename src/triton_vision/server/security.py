"""Who may call what: TLS for gRPC, and tokens for groups of Triton's APIs.

Triton's TLS covers gRPC alone, so with it HTTP and metrics, which stay in the clear, listen on this machine only. Its
"restricted" APIs want a header with a secret; the same header opens them over gRPC and over HTTP. What changes the
server for everybody, or reaches into its memory, is restricted even where the operator gave no token: then only the
keeper, which makes up a secret for each run, can use it.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triton_vision.server.certificates import Certificates, refuse_if_open
from triton_vision.server.errors import SetupError

LOOPBACK = "127.0.0.1"
# Triton puts this before the name of a gRPC header by itself; over HTTP the name is ours to choose.
PREFIX = "triton-grpc-protocol-"
# All that Triton can restrict, by its own names.
APIS = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
    "logging",
)  # fmt: skip
# What changes the server for everybody. Reading (health, metadata, configuration, statistics) stays open.
ADMIN_APIS = ("model-repository", "trace", "logging")
MORE_ADMIN_APIS = ("statistics", "model-config", "metadata", "health")
ROLES = ("admin", "shm", "inference")
# Roles without which nobody has any business at what they guard.
CLOSED = ("admin", "shm")
SHORT = 16
GUESSABLE = "take a random one (openssl rand -hex 32)"


def header(role: str) -> str:
    """The header in which a caller sends the token of a role, over gRPC and HTTP alike."""
    return PREFIX + role


def variable(role: str) -> str:
    """The environment variable that may hold the token of a role; with ``_FILE`` behind it, the one of its file."""
    return f"TRITON_VISION_{role.upper()}_TOKEN"


def read_token(role: str, file: str | Path | None, environment: Mapping[str, str]) -> str | None:
    """The token of a role; None if there is none.

    Args:
        file: where it lies; None looks into the environment, for the file's path and then for the token itself.

    Raises:
        SetupError: the file cannot be read or everybody may read it, or the token is empty or cannot be a header.
    """
    option = f"--{role}-token-file"
    if file is None and environment.get(f"{variable(role)}_FILE"):
        option, file = f"${variable(role)}_FILE", environment[f"{variable(role)}_FILE"]
    if file is not None:
        path = Path(file)
        refuse_if_open(option, path)
        try:
            text, source = path.read_text(encoding="utf-8"), f"{option} {path}"
        except UnicodeDecodeError:
            raise SetupError(f"{option} {path} is not text: put the token alone into it, as ASCII text") from None
        except OSError as error:
            raise SetupError(f"{option} {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    elif variable(role) in environment:
        text, source = environment[variable(role)], f"${variable(role)}"
    else:
        return None
    token = text.strip()
    if not token:
        raise SetupError(f"{source} is empty: put the token into it, or leave it out")
    if not re.fullmatch(r"[!-~]+", token):
        raise SetupError(
            f"the token in {source} must be ASCII letters, digits and signs, without a space or a line end"
        )
    return token


@dataclass(frozen=True)
class Security:
    """How one server is closed.

    Attributes:
        tls: gRPC's certificates; None serves gRPC in the clear.
        tokens: role (``admin``, ``shm``, ``inference``) -> its token. Without one, what ``admin`` and ``shm`` guard is
            closed to all but the keeper, and inference is open.
        admin_apis: what the admin token guards, by Triton's names.
        http: whether HTTP serves callers. If not, under TLS, it still answers the keeper's own questions at the start,
            since gRPC may want a certificate of the keeper that nobody gave it; to all others it is closed.
        metrics: whether there is a metrics endpoint.
        shm_open: whether everybody may use the shared-memory API.
        local_http: whether HTTP listens on this machine only, whatever the host.
    """

    tls: Certificates | None = None
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    admin_apis: tuple[str, ...] = ADMIN_APIS
    http: bool = True
    metrics: bool = True
    shm_open: bool = False
    local_http: bool = False
    _keeper: str = field(default_factory=lambda: secrets.token_hex(32), repr=False, compare=False)

    def check(self, host: str) -> list[str]:
        """Looks at all of it before anything starts; returns warnings, each one sentence.

        Args:
            host: the address that the server is to listen on.

        Raises:
            SetupError: something cannot work, or would not protect.
        """
        warnings = self.tls.check() if self.tls is not None else []
        if self.shm_open and "shm" in self.tokens:
            raise SetupError("--shm-open opens the shared memory that the shm token guards: give one of the two")
        roles: dict[str, str] = {}
        for role, token in self.tokens.items():
            if token in roles:
                raise SetupError(
                    f"the {roles[token]} and the {role} token are the same, so the one opens what the other guards: "
                    "give each its own"
                )
            roles[token] = role
            if len(token) < SHORT:
                warnings.append(f"the {role} token has {len(token)} characters and could be guessed: {GUESSABLE}")
        if self.tokens and self.tls is None and not is_local(host):
            warnings.append(f"tokens travel in the clear on {host}: add --tls-cert and --tls-key")
        return warnings

    def hosts(self, host: str) -> dict[str, str]:
        """Endpoint (``http``, ``grpc``, ``metrics``) -> the address that it listens on."""
        plain = host if self.tls is None else LOOPBACK
        return {"http": LOOPBACK if self.local_http else plain, "grpc": host, "metrics": plain}

    @property
    def asks_over_http(self) -> bool:
        """Whether the keeper asks its server over HTTP, since gRPC may demand a certificate of it."""
        return self.tls is not None

    def options(self) -> list[str]:
        """tritonserver's options, but for those that hold a secret."""
        options = self.tls.options() if self.tls is not None else []
        if not self.http and not self.asks_over_http:
            options.append("--allow-http=false")
        if not self.metrics:
            options.append("--allow-metrics=false")
        return options

    def secrets(self) -> list[str]:
        """tritonserver's options that hold a secret."""
        return [f"{prefix}={secret}" for prefix, secret in self._restrictions()]

    def masked(self) -> list[str]:
        """The same, fit to be shown."""
        return [f"{prefix}=***" for prefix, _ in self._restrictions()]

    def headers(self) -> dict[str, str]:
        """What the keeper sends with its own questions."""
        return {**{header(role): token for role, token in self.tokens.items()}, header("keeper"): self._keeper}

    def summary(self) -> list[str]:
        """What is closed and what is not, each one line for an operator."""
        lines = []
        if self.tls is not None:
            names = ", ".join(self.tls.names()) or "no host"
            callers = f"; callers need a certificate signed by {self.tls.ca}" if self.tls.ca is not None else ""
            plain = [
                f"HTTP stays in the clear and listens on {LOOPBACK} only" if self.http else "HTTP is closed",
                f"metrics listen on {LOOPBACK} only" if self.metrics else "metrics are off",
            ]
            lines.append(f"tls: gRPC is encrypted, for {names}{callers}; {', '.join(plain)}")
        if self.tokens:
            lines.append(
                "tokens: "
                + "; ".join(f"{role} for {', '.join(self._apis(role))}" for role in ROLES if role in self.tokens)
            )
        if self.shm_open:
            lines.append("open: shared-memory, to everybody who reaches a port")
        return lines

    def _apis(self, role: str) -> Sequence[str]:
        return {"admin": self.admin_apis, "shm": ("shared-memory",), "inference": ("inference",)}[role]

    def _restrictions(self) -> list[tuple[str, str]]:
        """Options up to the secret, and the secret."""
        guards: list[tuple[str, Sequence[str], str]]
        guards = [(role, self._apis(role), token) for role, token in self.tokens.items()]
        ownerless = [role for role in CLOSED if role not in self.tokens and not (role == "shm" and self.shm_open)]
        if ownerless:
            guards.append(("keeper", [api for role in ownerless for api in self._apis(role)], self._keeper))
        restrictions = [
            (f"--grpc-restricted-protocol={','.join(apis)}:{role}", secret) for role, apis, secret in guards
        ]
        if not self.http:
            guards = [("keeper", APIS, self._keeper)] if self.asks_over_http else []
        restrictions += [
            (f"--http-restricted-api={','.join(apis)}:{header(role)}", secret) for role, apis, secret in guards
        ]
        return restrictions


def parse_admin_apis(text: str) -> tuple[str, ...]:
    """What the admin token guards: Triton's names, separated by commas, beside those that it always guards.

    Raises:
        SetupError: one of them is none of these.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*ADMIN_APIS, *MORE_ADMIN_APIS):
            raise SetupError(f"--admin-apis {name}: name one or several of {', '.join(MORE_ADMIN_APIS)}")
    return (*ADMIN_APIS, *dict.fromkeys(name for name in names if name not in ADMIN_APIS))


def is_local(host: str) -> bool:
    """Whether what listens on a host is reached from this machine only."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
