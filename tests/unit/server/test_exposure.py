"""What each Triton release's known defects keep ``serve`` from opening."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from triton_vision.cli.main import main
from triton_vision.server import SetupError, releases
from triton_vision.server.certificates import Certificates
from triton_vision.server.exposure import limit
from triton_vision.server.releases import DEFECTS, RELEASES, find_defects, read_server_version
from triton_vision.server.security import Security

EVERYWHERE = "0.0.0.0"
TLS = Certificates(Path("a.pem"), Path("a.key"))
MUTUAL = Certificates(Path("a.pem"), Path("a.key"), Path("ca.pem"))


def signals(version: str, endpoint: str) -> list[str]:
    return [defect.signal for defect in find_defects(version) if endpoint in defect.over]


def test_defects_end_with_the_release_that_fixed_them() -> None:
    assert signals("2.51.0", "gRPC") == ["SIGSEGV", "SIGFPE"]
    assert signals("2.54.0dev", "gRPC") == ["SIGSEGV", "SIGFPE"]
    assert signals("2.57.0", "gRPC") == ["SIGFPE"]
    assert signals("2.38.0", "gRPC") == ["SIGFPE"]
    assert signals("2.59.0", "HTTP") == ["SIGFPE", "SIGSEGV", "SIGSEGV"]
    assert signals("2.59.1", "HTTP") == ["SIGSEGV"]
    assert signals("2.69.0", "HTTP") == []
    assert find_defects("") == find_defects("unknown") == []
    assert all(defect.source for defect in DEFECTS)


def test_the_documented_defects_are_those_in_the_code() -> None:
    assert releases.defect_table() in (ROOT / "docs" / "security.md").read_text()


def test_the_embedded_servers_version_is_known() -> None:
    assert read_server_version(Path("/nowhere"), embedded=True) == RELEASES[-1].server


@pytest.mark.parametrize("version", ["2.71.0", "", "9.99.0"])
def test_a_release_without_fixed_defects_opens_everything(version: str) -> None:
    security = Security(shm_open=True)
    limited, warnings = limit(security, EVERYWHERE, version)
    assert limited is security
    assert [line for line in warnings if "owner truncates" not in line] == []


def test_grpc_that_strangers_can_crash_stays_at_home() -> None:
    with pytest.raises(SetupError) as caught:
        limit(Security(), EVERYWHERE, "2.51.0")
    said = str(caught.value)
    for words in ("cancelled and abandoned calls", "2.59.1 or newer", "127.0.0.1", "--tls-ca", "--expose"):
        assert words in said
    with pytest.raises(SetupError):
        limit(Security(tls=TLS), EVERYWHERE, "2.51.0")
    for security, host, expose in (
        (Security(), "127.0.0.1", False),
        (Security(), EVERYWHERE, True),
        (Security(tls=MUTUAL), EVERYWHERE, False),  # no strangers
    ):
        limited, warnings = limit(security, host, "2.51.0", expose)
        assert limited == security
        assert len(warnings) == 4
        assert (
            warnings[0] == "callers can crash Triton 2.51.0 over gRPC by cancelled and abandoned calls; fixed in 2.57.0"
        )


def test_http_alone_stays_at_home_where_it_alone_can_be_crashed() -> None:
    limited, warnings = limit(Security(), EVERYWHERE, "2.61.0")
    assert limited.hosts(EVERYWHERE) == {"http": "127.0.0.1", "grpc": EVERYWHERE, "metrics": EVERYWHERE}
    assert "HTTP listens on 127.0.0.1 only" in warnings[-1]
    assert limit(Security(), EVERYWHERE, "2.61.0", True)[0].hosts(EVERYWHERE)["http"] == EVERYWHERE


def test_only_what_is_open_is_warned_of() -> None:
    assert [line for line in limit(Security(http=False), "::1", "2.51.0")[1] if "over HTTP" in line] == []
    for security in (Security(shm_open=True), Security(tokens={"shm": "x" * 20})):
        assert "over shared memory" in limit(security, "localhost", "2.51.0")[1][-1]


def test_serve_refuses_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_SERVER_HOME", str(tmp_path))  # which has none, so it is the embedded one
    assert main(["serve", "--repository", str(tmp_path), "--host", EVERYWHERE]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: everyone who reaches gRPC on 0.0.0.0 could crash Triton 2.51.0 by ")
    assert error.count("\n") == 1
