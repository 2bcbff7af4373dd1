"""LitServe: ``litserve_app.py --port N --workers N``. It reads JSON or forms, so an image comes as base64 in JSON."""

import argparse
import base64

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
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    arguments = parser.parse_args()
    server = litserve.LitServer(
        Classifier(), accelerator="cpu", workers_per_device=arguments.workers, timeout=60, fast_queue=True
    )
    server.run(host="127.0.0.1", port=arguments.port, num_api_servers=1, generate_client_file=False, log_level="error")
