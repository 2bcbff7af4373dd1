"""A registry on this machine with one image, which an engine really pulls: the distribution protocol's read side."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry:
    """``with Registry() as registry:`` serves ``registry.image``, an image of one text file, run by user 10001."""

    def __init__(self) -> None:
        layer = _archive("note.txt", b"pulled\n")
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"User": "10001:10001", "Entrypoint": ["/nothing"]},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        ).encode()
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": _entry("application/vnd.docker.container.image.v1+json", config),
                "layers": [_entry("application/vnd.docker.image.rootfs.diff.tar", layer)],
            }
        ).encode()
        files = {
            "/v2/": b"{}",
            "/v2/note/manifests/1": manifest,
            f"/v2/note/manifests/{_digest(manifest)}": manifest,
            **{f"/v2/note/blobs/{_digest(blob)}": blob for blob in (config, layer)},
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = files.get(self.path)
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Type", MANIFEST if "/manifests/" in self.path else "application/octet-stream")
                self.send_header("Content-Length", str(len(content or b"")))
                if content is not None and "/manifests/" in self.path:
                    self.send_header("Docker-Content-Digest", _digest(content))
                self.end_headers()
                if content is not None and self.command == "GET":
                    self.wfile.write(content)

            do_HEAD = do_GET  # noqa: N815 - the name that the base class asks for

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.image = f"127.0.0.1:{self._server.server_port}/note:1"

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _entry(kind: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(blob), "digest": _digest(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _archive(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
