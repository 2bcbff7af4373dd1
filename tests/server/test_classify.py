"""``triton-vision classify`` as people use it: in pipes, on a terminal, interrupted, and with servers that die."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.conftest import COMMAND, SAMPLES, jpeg
from tests.server.guarded import Serve
from triton_vision.cli.connection import INFERENCE_HEADER
from triton_vision.server import TritonServer

F_SETPIPE_SZ = 1031  # fcntl's name for it came with Python 3.10.1
LITE = ("--model", "ensemble_lite", "--top-k", "1")
# Makes standard error its terminal, as a shell does, and becomes the command.
ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A folder with more images than anybody waits for: 9,000 names of one."""
    folder = tmp_path / "many"
    folder.mkdir()
    (tmp_path / "one.jpg").write_bytes(jpeg(1, (80, 60)))
    for number in range(9_000):
        (folder / f"{number:05}.jpg").symlink_to("../one.jpg")
    return folder


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """40 images and one text file."""
    folder = tmp_path / "few"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.jpg").write_bytes(jpeg(number, (80, 60)))
    (folder / "text.txt").write_text("no image")
    return folder


def classify(*arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, "classify", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
        cwd=cwd,
    )


@contextmanager
def started(command: Sequence[object], **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is killed at the end, if it has not ended by then."""
    with subprocess.Popen([*map(str, command)], **streams) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def test_lists_from_stdin_and_files(server: TritonServer, few: Path, tmp_path: Path) -> None:
    odd = few / 'new\nline, "quoted".jpg'
    os.rename(few / "00.jpg", odd)
    bad = os.fsencode(few) + b"/caf\xe9.jpg"
    os.rename(few / "01.jpg", bad)
    names = [os.fsencode(odd), bad, os.fsencode(few / "02.jpg"), os.fsencode(few / "gone.jpg"), os.fsencode(few)]
    done = classify("-0", "-", "--json", "--url", server.grpc_address, *LITE, stdin=b"\0".join(names))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stderr
    assert rows[0]["source"] == str(odd)
    assert [len(row.get("predictions", ())) for row in rows] == [1, 1, 1, 0, 0]
    assert "No such file" in rows[3]["error"]["detail"]
    assert rows[4]["error"] == {"reason": "unreadable", "detail": "a folder; a list names files"}

    (tmp_path / "list").write_text("02.jpg\n03.jpg\n02.jpg\n")
    listed = classify("04.jpg", "--files-from", tmp_path / "list", "--url", server.grpc_address, *LITE, cwd=few)
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [b"04.jpg", b"02.jpg", b"03.jpg", b"02.jpg"]


def test_an_empty_list_is_no_error_and_an_image_is_no_list(server: TritonServer) -> None:
    empty = classify("-", "--csv", "--url", server.grpc_address, *LITE)
    assert (empty.returncode, empty.stdout, empty.stderr) == (
        0,
        b"source,rank,label,class_id,score,reason,detail\n",
        b"",
    )
    image = classify("-", "--url", server.grpc_address, *LITE, stdin=(SAMPLES / "cat.jpg").read_bytes())
    assert image.returncode == 2
    assert b"an image itself cannot be given this way" in image.stderr


def test_a_slow_list_is_answered_while_it_comes(server: TritonServer, few: Path) -> None:
    command = [*COMMAND, "classify", "-", "--url", server.grpc_address, *LITE]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for name in ("05.jpg", "06.jpg"):
            process.stdin.write(f"{few / name}\n".encode())
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0], "the list is not at its end, and nothing is answered"
            assert name.encode() in os.read(process.stdout.fileno(), 65536)
        process.stdin.close()
        assert process.wait(60) == 0


def test_csv_into_a_file(server: TritonServer, few: Path) -> None:
    file = few / "rows.csv"
    done = classify(few, "--csv", "--output", file, "--url", server.grpc_address, "--model", "ensemble_lite")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    rows = list(csv.DictReader(io.StringIO(file.read_text(), newline="")))
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5"] * 40 + [""]
    assert rows[0]["source"] == str(few / "00.jpg")
    assert rows[-1]["reason"] == "unsupported_format"
    # Nor is a file an image that the shell has opened for the rows.
    with open(few / "stdout.csv", "wb") as out:
        command = [*COMMAND, "classify", str(few), "--csv", "--url", server.grpc_address, *LITE]
        assert subprocess.run(command, stdout=out, timeout=120, check=False).returncode == 1
    sources = {row["source"] for row in csv.DictReader(io.StringIO((few / "stdout.csv").read_text(), newline=""))}
    assert str(file) in sources
    assert str(few / "stdout.csv") not in sources


def test_what_does_not_fit_together(server: TritonServer, few: Path, tmp_path: Path) -> None:
    photo = few / "00.jpg"
    for arguments, words in (
        ((), "give at least one file"),
        (("-", "--files-from", "-"), "only once"),
        (("-0", photo), "-0 is about lists"),
        (("--files-from", tmp_path / "gone"), "gone: No such file"),
        ((photo, "--header", "novalue"), "is not NAME=VALUE"),
        ((photo, "--tls-cert", "x"), "--tls-key, both"),
        ((photo, "--tls-ca", tmp_path / "gone.pem"), "gone.pem: No such file"),
        ((photo, "--token-file", tmp_path / "gone"), "gone: No such file"),
        ((photo, "--top-k", "0"), "top_k"),
        ((photo, "--output", tmp_path / "gone" / "x"), "cannot write"),
        ((tmp_path / "gone.jpg",), "there is no "),
    ):
        done = classify(*arguments, "--url", server.grpc_address, "--model", "ensemble_lite")
        assert done.returncode == 2, arguments
        assert words in done.stderr.decode(), arguments
        assert done.stderr.count(b"\n") == 1, done.stderr
        assert done.stdout == b""
    assert sorted(os.listdir(tmp_path)) == ["few"]


def test_the_second_server_answers_where_the_first_is_not_there(server: TritonServer, few: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        done = classify(few / "00.jpg", "--url", nobody, "--url", server.grpc_address, *LITE)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_ends_it(server: TritonServer, many: Path) -> None:
    command = [*COMMAND, "classify", str(many), "--url", server.grpc_address, *LITE]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "hung up")]
)
def test_a_signal_ends_it_with_whole_rows_and_a_line(
    server: TritonServer, many: Path, tmp_path: Path, number: signal.Signals, word: str
) -> None:
    file = tmp_path / "rows.jsonl"
    command = [*COMMAND, "classify", str(many), "--json", "--output", str(file), "--url", server.grpc_address, *LITE]
    with started(command, stderr=subprocess.PIPE) as process:
        part = tmp_path / "rows.jsonl.part"
        deadline = time.monotonic() + 60
        while not part.exists() or not part.stat().st_size:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(10) == 128 + number
    assert not file.exists()
    text = part.read_text()
    assert text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert said == (
        f"{word}: {len(rows)} of 9000 images done, the last one {rows[-1]['source']}; their rows are in {part}\n"
    )
    assert [Path(row["source"]).name for row in rows] == [f"{number:05}.jpg" for number in range(len(rows))]


def test_a_server_that_takes_calls_and_never_answers_can_be_left(few: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [*COMMAND, "classify", str(few), "--url", url]
        with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            out, said = process.communicate(timeout=20)
            assert time.monotonic() - began < 5
            connection.close()
    assert (process.returncode, out) == (130, b"")
    assert said in (b"interrupted: 0 of 41 images done\n", b"interrupted\n")


def test_rows_that_nobody_reads_do_not_stop_ctrl_c(server: TritonServer, many: Path) -> None:
    command = [*COMMAND, "classify", str(many), "--json", "--url", server.grpc_address, "--model", "ensemble_lite"]
    read, write = os.pipe()
    try:
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)  # filled by the first few images
        with started([*command, "--top-k", "20"], stdout=write, stderr=subprocess.PIPE) as process:
            os.close(write)
            deadline = time.monotonic() + 60
            while select.select([read], [], [], 60)[0] and not blocked_in_poll(process.pid):
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=20)[1].decode()
        assert process.returncode == 130
        rows = b"".join(iter(lambda: os.read(read, 65536), b""))
    finally:
        os.close(read)
    assert rows.endswith(b"\n")
    assert re.match(rf"interrupted: {len(rows.splitlines())} of 9000 images done, ", said)


def blocked_in_poll(pid: int) -> bool:
    time.sleep(0.05)
    return "poll" in Path(f"/proc/{pid}/wchan").read_text()


def test_a_server_that_dies_midway(repository: Path, many: Path) -> None:
    with TritonServer(repository) as doomed:
        command = [*COMMAND, "classify", str(many), "--url", doomed.grpc_address, "--timeout", "10", *LITE]
        # Unbuffered: what is read ahead would be missing from the rest.
        with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            os.kill(doomed.pid, signal.SIGKILL)
            out, said = process.communicate(timeout=60)
    rows = (first + out).decode()
    count = len(rows.splitlines())
    assert process.returncode == 2
    assert rows.endswith("\n")
    last = rows.splitlines()[-1].split()[0]
    assert said.decode().startswith("error: ")
    assert said.decode().endswith(f"; {count} of 9000 images done, the last one {last}\n")
    assert said.count(b"\n") == 1


def test_tls_and_the_token_that_serve_asks_for(repository: Path, few: Path, tmp_path: Path) -> None:
    lite = tmp_path / "repository"
    lite.mkdir()
    for name in ("preprocess_lite", "efficientnet_lite0", "postprocess", "ensemble_lite"):
        (lite / name).symlink_to(repository / name)
    folder = tmp_path / "served"
    folder.mkdir()
    served = Serve(lite, Authority(tmp_path), folder)
    try:
        encrypted = (few / "00.jpg", "--url", served.localhost(), "--tls-ca", served.ca, "--timeout", "10", *LITE)
        done = classify(*encrypted, "--token-file", folder / "inference")
        assert done.returncode == 0, done.stderr
        token = (folder / "inference").read_text().strip()
        assert classify(*encrypted, "--header", f"{INFERENCE_HEADER}={token}").returncode == 0
        for without in (encrypted, (few / "00.jpg", "--url", served.grpc, "--timeout", "10", *LITE)):
            refused = classify(*without)
            assert (refused.returncode, refused.stdout) == (2, b"")
            assert refused.stderr.startswith(b"error: ")
            assert refused.stderr.count(b"\n") == 1
        served.process.terminate()
        assert served.process.wait(15) == 0
    finally:
        served.process.kill()
        served.process.communicate()


class Screen:
    """A terminal, 100 columns wide, and the command that runs on it."""

    def __init__(self, command: list[str], stdout: int | None) -> None:
        self.ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        self.text = ""

    def until(self, pattern: str) -> None:
        """Reads until the pattern has appeared, or the command has ended."""
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, self.text[-2000:]
            if not self._read(deadline):
                pytest.fail(f"it has ended without {pattern}: {self.text[-2000:]}")

    def end(self) -> int:
        deadline = time.monotonic() + 120
        while self._read(deadline):
            pass
        return self.process.wait(10)

    def _read(self, deadline: float) -> bool:
        if not select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            content = os.read(self.ours, 65536)
        except OSError:  # nobody has the other side open
            return False
        self.text += content.decode()
        return bool(content)


@contextmanager
def on_terminal(*arguments: object, stdout: int | None = None) -> Iterator[Screen]:
    screen = Screen([*COMMAND, "classify", *map(str, arguments)], stdout)
    try:
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        os.close(screen.ours)


def test_a_bar_on_the_terminal_while_rows_go_to_a_file(server: TritonServer, many: Path, tmp_path: Path) -> None:
    with (
        open(tmp_path / "rows.csv", "wb") as rows,
        on_terminal(many, "--csv", "--url", server.grpc_address, *LITE, stdout=rows.fileno()) as screen,
    ):
        screen.until(r"\r  \[\.{20}\] [1-9]\d* of 9000, [\d.]+/s, 0 refused, [\d:]+ left\x1b\[K")
        os.write(screen.ours, b"\x03")  # Ctrl-C, typed
        assert screen.end() == 130
    assert re.search(r"\r\x1b\[Kinterrupted: \d+ of 9000 images done, the last one \S+\.jpg\r\n$", screen.text)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    done = int(re.findall(r"interrupted: (\d+)", screen.text)[0])
    assert len(lines) == 1 + done
    assert all(line.count(",") == 6 for line in lines)
    assert all(len(shown) < 100 for shown in re.findall(r"\r([^\r]*)\x1b\[K", screen.text))


def test_rows_above_the_bar_and_a_summary(server: TritonServer, few: Path) -> None:
    with on_terminal(few, few / "*.jpg", "--url", server.grpc_address, *LITE) as screen:
        code = screen.end()
    assert code == 1
    # What a person sees: without the lines that were drawn and cleared again.
    seen = re.sub(r"\r[^\r\n]*\x1b\[K", "", screen.text).replace("\r\n", "\n").splitlines()
    assert [Path(line.split()[0]).name for line in seen[:41]] == sorted(os.listdir(few))
    assert re.fullmatch(r"41 images in 0:\d\d, [\d.]+/s, 1 refused", "".join(seen[41:])) or seen[41:] == []


def test_no_bar_where_none_is_wanted(server: TritonServer, few: Path) -> None:
    with on_terminal(few, "--no-progress", "--url", server.grpc_address, *LITE) as screen:
        assert screen.end() == 1
    assert "\x1b" not in screen.text
