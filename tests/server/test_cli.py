"""``triton-vision classify`` and ``bench`` against a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.conftest import COMMAND, SAMPLES
from triton_vision.server import TritonServer


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two photos, a text file, an empty file, a hidden file, one photo further down."""
    for name in ("coffee.jpg", "cat.jpg"):
        shutil.copy(SAMPLES / name, tmp_path / name)
    (tmp_path / "deeper").mkdir()
    shutil.copy(SAMPLES / "rocket.jpg", tmp_path / "deeper" / "größe.jpg")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "nothing.png").touch()
    (tmp_path / ".hidden").write_text("no")
    return tmp_path


def test_a_folder_prints_labels_and_refusals_and_exits_1(server: TritonServer, folder: Path) -> None:
    done = run("classify", folder, "--url", server.grpc_address, "--model", "ensemble_lite", "--top-k", 1)
    rows = {line.split()[0].rsplit("/", 1)[1]: line for line in done.stdout.splitlines()}
    assert done.returncode == 1, done.stderr
    assert set(rows) == {"coffee.jpg", "cat.jpg", "größe.jpg", "notes.txt", "nothing.png"}
    assert "espresso" in rows["coffee.jpg"]
    assert "cat" in rows["cat.jpg"].split("  ", 1)[1]
    assert "missile" in rows["größe.jpg"]
    assert "REFUSED  unsupported_format: " in rows["notes.txt"]
    assert "REFUSED  empty: " in rows["nothing.png"]


def test_json_has_one_object_a_line(server: TritonServer, folder: Path) -> None:
    done = run("classify", f"{folder}/*.*", "--url", server.grpc_address, "--model", "ensemble_lite", "--json")
    rows = {Path(row["source"]).name: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1
    assert rows["coffee.jpg"]["predictions"][0]["class_id"] == 967
    assert len(rows["coffee.jpg"]["predictions"]) == 5
    assert rows["nothing.png"]["error"]["reason"] == "empty"


def test_good_photos_exit_0(server: TritonServer) -> None:
    done = run("classify", *SAMPLES.glob("*.jpg"), "--url", server.grpc_address, "--model", "ensemble_lite")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 4
    assert done.stderr == ""


def test_models_lists_what_the_server_has(server: TritonServer) -> None:
    done = run("models", "--url", server.grpc_address)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["ensemble_lite", "1", "READY"] in rows
    assert rows == sorted(rows)
    objects = [json.loads(line) for line in run("models", "--url", server.grpc_address, "--json").stdout.splitlines()]
    assert [row[0] for row in rows] == [found["name"] for found in objects]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        none = run("models", "--url", f"127.0.0.1:{closed.getsockname()[1]}", "--timeout", 5)
    assert (none.returncode, none.stdout, len(none.stderr.splitlines())) == (2, "", 1)


def test_no_server_no_model_and_no_file_are_three_plain_sentences(server: TritonServer, tmp_path: Path) -> None:
    photo = SAMPLES / "cat.jpg"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        no_server = run("classify", photo, "--url", nobody, "--timeout", 5)
    no_model = run("classify", photo, "--url", server.grpc_address, "--model", "nonesuch")
    no_file = run("classify", tmp_path / "missing.jpg", "--url", server.grpc_address)
    wrong_port = run("classify", photo, "--url", server.http_address)
    said = [done.stderr for done in (no_server, no_model, no_file, wrong_port)]
    for done, words in zip(
        (no_server, no_model, no_file, wrong_port),
        (f"no server answers at {nobody}", "serves no model 'nonesuch'", "missing.jpg", "does not speak gRPC"),
        strict=True,
    ):
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert len(set(said)) == 4
    assert re.search(r"; it has .*\bensemble_lite\b.* \(--model NAME\)$", no_model.stderr.strip())


def test_a_reader_that_leaves_early_is_no_error(server: TritonServer, folder: Path) -> None:
    command = " ".join(COMMAND)
    script = f"{command} classify {folder} --url {server.grpc_address} --model ensemble_lite | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["serve", "--dry-run"], ["bench"], ["--help"]])
def test_output_that_cannot_be_written_is_one_sentence(
    server: TritonServer, arguments: list[str], unbuffered: str
) -> None:
    more = {
        "serve": ["--repository", server.repository, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"],
        "bench": [SAMPLES, "--url", server.grpc_address, "--model", "ensemble_lite", "--seconds", "0.5"],
    }
    command = [*COMMAND, *arguments, *map(str, more.get(arguments[0], []))]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    for end in (">/dev/full", *([">&-"] if arguments == ["bench"] else [])):
        script = f"{shlex.join(command)} {end}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
        said = [line for line in done.stderr.splitlines() if not line.startswith("left out")]
        assert done.returncode == 2
        assert said == [
            "error: standard output is closed"
            if end == ">&-"
            else "error: cannot write to standard output: No space left on device"
        ]


def test_bench_prints_rate_and_latency(server: TritonServer) -> None:
    done = run(
        "bench",
        SAMPLES / "*.jpg",
        "--url",
        server.grpc_address,
        "--model",
        "ensemble_lite",
        "--seconds",
        1,
        "--callers",
        2,
    )
    assert done.returncode == 0, done.stderr
    assert "images/s with 2 callers; latency P50" in done.stdout
    for wrong in (("--url", "http://x:1"), ("--seconds", "inf"), ("--callers", 0)):
        failed = run("bench", SAMPLES / "*.jpg", *wrong)
        assert failed.returncode == 2
        assert len(failed.stderr.splitlines()) == 1


def test_bench_leaves_out_what_is_no_image(server: TritonServer) -> None:
    """As the README calls it: the samples' folder holds a text about them."""
    options = ["--model", "ensemble_lite", "--url", server.grpc_address, "--seconds", "2"]
    done = run("bench", SAMPLES, *options)
    assert done.returncode == 0, done.stderr
    assert "images/s" in done.stdout
    assert "left out: 1 of 5 files" in done.stderr
    nothing = run("bench", SAMPLES / "README.md", *options)
    assert nothing.returncode == 2
    assert "no image is left" in nothing.stderr


def test_a_file_name_neither_breaks_a_row_nor_commands_the_terminal(server: TritonServer, tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "cat.jpg", tmp_path / "new\nline\x1b[31m.jpg")
    done = run("classify", tmp_path, "--url", server.grpc_address, "--model", "ensemble_lite", "--top-k", 1)
    assert len(done.stdout.splitlines()) == 1
    assert "\x1b" not in done.stdout


def test_a_proxy_in_the_environment_is_for_other_hosts(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    photo = SAMPLES / "coffee.jpg"
    done = run("classify", photo, "--url", server.grpc_address, "--model", "ensemble_lite", "--top-k", 1)
    assert done.returncode == 0, done.stderr
    assert "espresso" in done.stdout


@pytest.mark.parametrize("command", ["prepare", "serve", "classify", "models", "bench"])
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "usage: triton-vision" in done.stdout
