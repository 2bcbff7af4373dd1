"""What ``serve`` says of certificates and tokens before anything starts, and how secrets stay out of sight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.certificates import Authority, write_key
from triton_vision.cli.main import main
from triton_vision.server import SetupError, conceal, launch
from triton_vision.server.certificates import Certificates
from triton_vision.server.security import ADMIN_APIS, Security, is_local, parse_admin_apis, read_token

TOKEN = "a-token-of-27-characters=:,"
ECHO = (
    "import os, sys; print(sys.argv[1:]); print(open('/proc/self/cmdline').read()); print(sorted(os.environ.values()))"
)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


# -- certificates -----------------------------------------------------------------------------------------------------


def test_a_good_certificate_is_accepted_and_its_names_are_known(authority: Authority) -> None:
    pair = authority.issue("server", "triton.example", "127.0.0.1")
    certificates = Certificates(pair.certificate, pair.key, authority.certificate)
    assert certificates.check() == []
    assert certificates.names() == ("triton.example", "127.0.0.1")
    assert "--grpc-use-ssl-mutual=true" in certificates.options()
    assert "--grpc-use-ssl=true" in Certificates(pair.certificate, pair.key).options()


def test_a_chain_is_judged_by_the_servers_own_certificate(authority: Authority) -> None:
    pair = authority.issue("server", "localhost")
    with pair.certificate.open("ab") as file:
        file.write(authority.certificate.read_bytes())
    assert Certificates(pair.certificate, pair.key).names() == ("localhost",)


def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    pair = authority.issue("server", "localhost", days=-1)
    with pytest.raises(SetupError, match="has expired: renew it"):
        Certificates(pair.certificate, pair.key).check()


def test_what_is_about_to_fail_is_warned_of(authority: Authority) -> None:
    pair = authority.issue("server", days=3)
    expiry, names = Certificates(pair.certificate, pair.key).check()
    assert "expires in 3 days" in expiry
    assert "names no host" in names


def test_a_certificate_for_callers_is_no_servers(authority: Authority) -> None:
    pair = authority.issue("caller", "localhost", client=True)
    with pytest.raises(SetupError, match=r"callers will not accept the certificate .*purpose"):
        Certificates(pair.certificate, pair.key).check()


def test_certificate_and_key_must_belong_together(authority: Authority) -> None:
    one, other = authority.issue("one", "localhost"), authority.issue("other", "localhost")
    with pytest.raises(SetupError, match="does not belong to the certificate"):
        Certificates(one.certificate, other.key).check()


def test_a_key_that_everybody_may_read_is_refused(authority: Authority) -> None:
    pair = authority.issue("server", "localhost")
    pair.key.chmod(0o644)
    with pytest.raises(SetupError, match=r"is open to every user of this machine: chmod 600"):
        Certificates(pair.certificate, pair.key).check()
    pair.key.chmod(0o440)  # as orchestrators mount secrets
    assert Certificates(pair.certificate, pair.key).check() == []


def test_files_that_are_something_else(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("server", "localhost")
    locked, text = tmp_path / "locked.key", tmp_path / "text"
    write_key(locked, ec.generate_private_key(ec.SECP256R1()), passphrase=b"secret")
    text.touch(mode=0o600)
    text.write_text("something else")
    for certificates, words in (
        (Certificates(pair.certificate, tmp_path / "none"), "cannot be read: no such file"),
        (Certificates(tmp_path / "none", pair.key), "cannot be read: no such file"),
        (Certificates(text, pair.key), "holds no certificate"),
        (Certificates(pair.certificate, text), "holds no private key"),
        (Certificates(pair.certificate, locked), "has a passphrase"),
        (Certificates(pair.certificate, pair.key, text), "holds no certificate"),
        (Certificates(pair.certificate, pair.key, pair.certificate), "holds no authority's certificate"),
        (Certificates(pair.certificate, pair.key, Authority(tmp_path, "old", -1).certificate), "has expired"),
    ):
        with pytest.raises(SetupError, match=words) as caught:
            certificates.check()
        assert "\n" not in str(caught.value)


# -- tokens -----------------------------------------------------------------------------------------------------------


def secret(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    file = folder / "token"
    file.touch(mode=0o600)
    file.write_bytes(content)
    file.chmod(mode)
    return file


def test_a_token_comes_from_its_file_before_its_variable(tmp_path: Path) -> None:
    environment = {"TRITON_VISION_ADMIN_TOKEN": "of-the-environment"}
    assert read_token("admin", None, environment) == "of-the-environment"
    file = secret(tmp_path, TOKEN.encode() + b"\n")
    assert read_token("admin", file, environment) == TOKEN
    assert read_token("admin", None, {**environment, "TRITON_VISION_ADMIN_TOKEN_FILE": str(file)}) == TOKEN
    assert read_token("shm", None, environment) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"two words", "must be ASCII"),
        (b"two\nlines", "must be ASCII"),
        ("schlüssel".encode(), "must be ASCII"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_what_is_no_token(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(SetupError, match=words) as caught:
        read_token("inference", secret(tmp_path, content), {})
    said = str(caught.value).replace(str(tmp_path), "")
    assert not [word for word in ("two", "schl") if word in said]


def test_a_token_file_must_be_there_and_be_private(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--shm-token-file .* cannot be read: no such file"):
        read_token("shm", tmp_path / "none", {})
    with pytest.raises(SetupError, match=r"is open to every user"):
        read_token("shm", secret(tmp_path, TOKEN.encode(), 0o644), {})
    with pytest.raises(SetupError, match=r"\$TRITON_VISION_SHM_TOKEN is empty"):
        read_token("shm", None, {"TRITON_VISION_SHM_TOKEN": " "})


def test_tokens_that_do_not_protect() -> None:
    with pytest.raises(SetupError, match="the admin and the inference token are the same"):
        Security(tokens={"admin": TOKEN, "inference": TOKEN}).check("127.0.0.1")
    assert "could be guessed" in Security(tokens={"admin": "short"}).check("127.0.0.1")[0]
    assert "travel in the clear on 0.0.0.0" in Security(tokens={"admin": TOKEN}).check("0.0.0.0")[0]
    assert Security(tokens={"admin": TOKEN}).check("127.0.0.1") == []


def test_shared_memory_is_either_open_or_has_a_token() -> None:
    with pytest.raises(SetupError, match="--shm-open opens the shared memory that the shm token guards"):
        Security(tokens={"shm": TOKEN}, shm_open=True).check("127.0.0.1")
    (closed,) = [option for option in Security(shm_open=True).masked() if option.startswith("--grpc")]
    assert closed == "--grpc-restricted-protocol=model-repository,trace,logging:keeper=***"
    assert Security(shm_open=True).summary() == ["open: shared-memory, to everybody who reaches a port"]


def test_what_the_admin_token_guards() -> None:
    assert parse_admin_apis("statistics, model-config,trace") == (*ADMIN_APIS, "statistics", "model-config")
    with pytest.raises(SetupError, match="--admin-apis inference: name one or several of"):
        parse_admin_apis("inference")


def test_secrets_are_shown_nowhere() -> None:
    security = Security(tokens={"admin": TOKEN, "inference": TOKEN + "2"})
    for shown in (repr(security), *security.summary(), *security.masked(), *security.options()):
        assert TOKEN not in shown
    assert f"--grpc-restricted-protocol=inference:inference={TOKEN}2" in security.secrets()


# -- the command line -------------------------------------------------------------------------------------------------


def test_dry_run_shows_stars_and_where_what_listens(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "repository"
    (repository / "same" / "1").mkdir(parents=True)
    (repository / "same" / "1" / "model.py").write_text("")
    (repository / "same" / "config.pbtxt").write_text('backend: "python"')
    pair = authority.issue("server", "localhost")
    monkeypatch.setenv("TRITON_VISION_INFERENCE_TOKEN", TOKEN)
    tls = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    code = main(["serve", "--repository", str(repository), "--host", "0.0.0.0", "--expose", *tls, "--dry-run"])
    shown = capsys.readouterr().out
    assert code == 0
    assert TOKEN not in shown
    assert "tls: gRPC is encrypted, for localhost; HTTP stays in the clear and listens on 127.0.0.1 only" in shown
    assert "tokens: inference for inference" in shown
    for part in (
        "--grpc-address=0.0.0.0",
        "--http-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        "--grpc-use-ssl=true",
        "--grpc-restricted-protocol=inference:inference=***",
        "--http-restricted-api=inference:triton-grpc-protocol-inference=***",
        "--grpc-restricted-protocol=model-repository,trace,logging,shared-memory:keeper=***",
        "--http-restricted-api=model-repository,trace,logging,shared-memory:triton-grpc-protocol-keeper=***",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-key", "a.key"], "--tls-cert and --tls-key go together"),
        (["--tls-ca", "ca.pem"], "--tls-ca needs a certificate of the server's own"),
        (["--admin-apis", "statistics"], "there is none: give --admin-token-file"),
        (["--admin-token-file", "/nowhere/token"], "cannot be read"),
        (["--tls-cert", "/nowhere/a.pem", "--tls-key", "/nowhere/a.key"], "cannot be read"),
    ],
)
def test_options_that_cannot_work_together(
    tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--repository", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


# -- hidden arguments -------------------------------------------------------------------------------------------------


def spawn(launcher: Path, *hidden: str) -> tuple[str, bool]:
    command = [sys.executable, "-I", "-S", "-c", ECHO, "--plain=1"]
    process, is_hidden = conceal.spawn(
        [sys.executable, "-I", "-S", str(launcher), str(os.getpid())],
        command,
        hidden,
        {"PATH": os.defpath, "KEPT": "kept"},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return output, is_hidden


def test_hidden_arguments_reach_the_program_and_nobody_else() -> None:
    output, is_hidden = spawn(Path(launch.__file__), f"--one={TOKEN}", f"--two={TOKEN}2")
    arguments, command_line, environment = output.splitlines()
    assert is_hidden
    assert arguments == str(["--plain=1", f"--one={TOKEN}", f"--two={TOKEN}2"])
    assert "--one=hidden\0--two=hidden" in command_line
    assert TOKEN not in command_line
    assert "'kept'" in environment
    assert TOKEN not in environment


def test_without_secrets_nothing_is_traced() -> None:
    output, is_hidden = spawn(Path(launch.__file__))
    assert is_hidden
    assert output.startswith("['--plain=1']")


def test_where_tracing_is_forbidden_the_program_starts_all_the_same(tmp_path: Path) -> None:
    launcher = tmp_path / "launch.py"
    launcher.write_text(Path(launch.__file__).read_text().replace("PTRACE_TRACEME = 0", "PTRACE_TRACEME = -1"))
    output, is_hidden = spawn(launcher, f"--one={TOKEN}")
    assert not is_hidden
    assert output.startswith(str(["--plain=1", f"--one={TOKEN}"]))


def test_where_its_memory_may_not_be_touched_neither_runs_it_with_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(conceal, "_swap", denied)
    output, is_hidden = spawn(Path(launch.__file__), f"--one={TOKEN}")
    assert not is_hidden
    assert output.startswith(str(["--plain=1", f"--one={TOKEN}"]))


def test_a_program_that_is_not_there_says_so() -> None:
    process, _ = conceal.spawn(
        [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())],
        ["/nowhere/program"],
        [f"--one={TOKEN}"],
        dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 127
    assert output == "error: cannot run /nowhere/program: No such file or directory\n"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("LocalHost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("127.evil", False),
        ("127.0.0.1.example.org", False),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
    ],
)
def test_only_loopback_is_local(host: str, local: bool) -> None:
    assert is_local(host) is local
