"""LitServe: ``litserve_app.py PORT WORKERS``. It reads JSON or forms, so an image comes as base64 in JSON."""

import base64
import sys

import litserve
from common import classify


class Classifier(litserve.LitAPI):
    def setup(self, device: str) -> None:
        del device

    def decode_request(self, request: dict[str, str]) -> bytes:
        return base64.b64decode(request["image"])

    def predict(self, data: bytes) -> dict[str, object]:
        return classify(data)

    def encode_response(self, output: dict[str, object]) -> dict[str, object]:
        return output


if __name__ == "__main__":
    server = litserve.LitServer(
        Classifier(), accelerator="cpu", workers_per_device=int(sys.argv[2]), timeout=60, fast_queue=True
    )
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False, log_level="error"
    )
