"""The download of weights: resumed, verified, atomic, and quick to fail. A server on 127.0.0.1 stands in."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_vision.export import artifact, weights

CONTENT = bytes(range(256)) * 8000
DESCRIPTION = {"weights": "random", "weights_source": "dice", "weights_sha256": "", "tools": {}}
SHA = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT; the path says how it misbehaves."""

    ranges: list[str | None] = []  # noqa: RUF012 - one server a test

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.ranges.append(asked)
        start = int(asked.split("=")[1].rstrip("-")) if asked and "norange" not in self.path else 0
        if "missing" in self.path:
            self.send_error(404)
            return
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        body = CONTENT[start:]
        if "cut" in self.path:
            body = body[: len(body) // 2]
        self.wfile.write(body)
        if "stall" in self.path:
            self.wfile.flush()
            self.connection.settimeout(10)
            self.connection.recv(1)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    Handler.ranges = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_is_kept_when_its_digest_is_right(url: str, tmp_path: Path) -> None:
    weights.download(f"{url}/good", tmp_path / "new" / "w.pth", SHA)
    assert (tmp_path / "new" / "w.pth").read_bytes() == CONTENT
    assert sorted(entry.name for entry in (tmp_path / "new").iterdir()) == ["w.lock", "w.pth"]


def test_an_interrupted_download_goes_on_where_it_ended(url: str, tmp_path: Path) -> None:
    with pytest.raises(weights.WeightsError, match="cannot be downloaded"):
        weights.download(f"{url}/cut", tmp_path / "w.pth", SHA)
    assert (tmp_path / "w.pth.part").stat().st_size == len(CONTENT) // 2
    weights.download(f"{url}/good", tmp_path / "w.pth", SHA)
    assert (tmp_path / "w.pth").read_bytes() == CONTENT
    assert Handler.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_server_without_ranges_starts_over(url: str, tmp_path: Path) -> None:
    (tmp_path / "w.pth.part").write_bytes(CONTENT[:1000])
    weights.download(f"{url}/norange", tmp_path / "w.pth", SHA)
    assert (tmp_path / "w.pth").read_bytes() == CONTENT


def test_a_complete_part_is_verified_and_kept(url: str, tmp_path: Path) -> None:
    (tmp_path / "w.pth.part").write_bytes(CONTENT)
    weights.download(f"{url}/good", tmp_path / "w.pth", SHA)
    assert (tmp_path / "w.pth").read_bytes() == CONTENT


def test_a_wrong_file_is_not_kept(url: str, tmp_path: Path) -> None:
    with pytest.raises(weights.WeightsError, match="not the file it should be"):
        weights.download(f"{url}/good", tmp_path / "w.pth", "0" * 64)
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.lock"]


def test_two_downloads_at_once_share_one(url: str, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=weights.download, args=(f"{url}/good", tmp_path / "w.pth", SHA)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "w.pth").read_bytes() == CONTENT
    assert Handler.ranges == [None]


def test_failures_are_quick_and_one_sentence(url: str, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refused = f"http://127.0.0.1:{closed.getsockname()[1]}/w"
        for address in (f"{url}/missing", f"{url}/stall-cut", refused, "http://no-such-host.invalid/w"):
            began = time.monotonic()
            with pytest.raises(weights.WeightsError, match="cannot be downloaded") as caught:
                weights.download(address, tmp_path / "w.pth", SHA, timeout=1.0)
            assert time.monotonic() - began < 5
            assert "\n" not in str(caught.value)
    assert not (tmp_path / "w.pth").exists()


def test_a_cache_that_cannot_be_written_is_said(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(weights.WeightsError, match="cannot be downloaded"):
        weights.download(f"{url}/good", tmp_path / "file" / "w.pth", SHA)


def test_torchs_own_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_VISION_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    kept = tmp_path / "torch" / "hub" / "checkpoints" / weights.CHECKPOINT
    kept.parent.mkdir(parents=True)
    kept.write_bytes(CONTENT)
    path, origin = weights.imagenet_checkpoint("http://127.0.0.1:9/never", SHA)
    assert path == kept
    assert origin.kind == "imagenet1k_v1"


def test_an_artifact_and_its_sidecar_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    assert artifact.read(path) == {}
    artifact.write(path, b"one", {**DESCRIPTION, "sha256": hashlib.sha256(b"one").hexdigest()})
    assert artifact.read(path)["weights"] == "random"
    path.write_bytes(b"two")
    assert artifact.read(path) == {}
    artifact.write(path, b"two", {"sha256": hashlib.sha256(b"two").hexdigest()})  # another version's, with less in it
    assert artifact.read(path) == {}


def test_half_written_files_of_the_dead_are_removed_and_of_the_living_kept(tmp_path: Path) -> None:
    dead, living = tmp_path / ".model.onnx.99999999.tmp", tmp_path / ".model.onnx.1.tmp"
    dead.touch()
    living.touch()
    artifact.remove_stale(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == [living]


def test_the_progress_says_how_far(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, 1.0, 6.0])
    show = weights.Progress("w.pth", 100_000_000, 20_000_000, clock=lambda: next(moments))
    show(30_000_000)
    show(50_000_000)
    assert capsys.readouterr().err.splitlines() == ["  w.pth: going on from 20 MB", "  w.pth: 50 of 100 MB"]
