"""Raw images in, labels out, through a real Triton over real gRPC."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from triton_vision_client import ImageClient
from tritonclient import grpc as triton

from tests.conftest import ROOT, SAMPLES, encoded, jpeg, noise
from tests.unit.stages import bombs
from triton_vision.server import TritonServer
from triton_vision.stages import REASONS

pytestmark = pytest.mark.quiet

LITE = "ensemble_lite"


def infer(
    server: TritonServer,
    model: str,
    images: list[bytes],
    parameters: dict[str, Any] | None = None,
    outputs: tuple[str, ...] = ("LABELS", "CLASS_IDS", "SCORES", "STATUS"),
) -> list[Any]:
    """The stock client's way, so that the suite's own client is no part of what is tested."""
    tensor = triton.InferInput("IMAGE", [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(images, np.object_).reshape(-1, 1))
    with triton.InferenceServerClient(server.grpc_address) as client:
        result = client.infer(
            model, [tensor], outputs=[triton.InferRequestedOutput(name) for name in outputs], parameters=parameters
        )
        return [result.as_numpy(name) for name in outputs]


@pytest.mark.parametrize(
    ("photo", "words"),
    [("coffee", ("espresso",)), ("cat", ("cat",)), ("rocket", ("missile",)), ("palace", ("palace",))],
)
def test_samples_have_the_right_top_1(server: TritonServer, photo: str, words: tuple[str, ...]) -> None:
    labels, ids, scores, status = infer(server, LITE, [(SAMPLES / f"{photo}.jpg").read_bytes()])
    assert any(word in labels[0, 0].decode() for word in words)
    assert labels.shape == ids.shape == scores.shape == (1, 5)
    assert status.tolist() == [[b""]]
    assert (np.diff(scores[0]) <= 0).all()


def test_24_images_of_many_sizes_in_one_request_each_get_their_own_answer(server: TritonServer) -> None:
    images = [jpeg(seed, (100 + 13 * seed, 400 - 9 * seed)) for seed in range(24)]
    together = infer(server, LITE, images, {"top_k": 1000})
    for row, image in enumerate(images):
        alone = infer(server, LITE, [image], {"top_k": 1000})
        order = np.argsort(alone[1][0])
        found = np.argsort(together[1][row])
        np.testing.assert_allclose(together[2][row][found], alone[2][0][order], atol=1e-5)
    assert len({tuple(ids[:20]) for ids in together[1].tolist()}) == 24


def test_32_concurrent_callers_each_get_their_own_answer(server: TritonServer) -> None:
    images = [jpeg(seed) for seed in range(32)]
    expected = [infer(server, LITE, [image])[1][0, 0] for image in images]
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda image: infer(server, LITE, [image])[1][0, 0], images * 3))
    assert found == expected * 3


def test_pixels_equal_the_recipe(server: TritonServer) -> None:
    photo = SAMPLES / "rocket.jpg"
    (pixels,) = infer(server, "preprocess", [photo.read_bytes()], outputs=("PIXELS",))
    image = Image.open(photo)
    width, height = image.size
    resized = image.resize((int(256 * width / height), 256), Image.Resampling.BILINEAR)
    left, top = round((resized.width - 224) / 2.0), round((resized.height - 224) / 2.0)
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224)))
    assert pixels.dtype == np.uint8
    assert np.abs(pixels[0].astype(int) - expected).max() <= 1


@pytest.fixture(scope="session")
def resnet_logits(
    server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[bytes], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images, the logits that Triton's core gives on their served pixels, and the PyTorch module's on the same."""
    folder = tmp_path_factory.mktemp("logits")
    images = [(SAMPLES / name).read_bytes() for name in ("cat.jpg", "coffee.jpg")] + [jpeg(7)]
    (pixels,) = infer(server, "preprocess", images, outputs=("PIXELS",))
    np.save(folder / "pixels.npy", pixels)
    # torch lives in an environment of its own.
    subprocess.run(
        [ROOT / ".venv-export" / "bin" / "python", ROOT / "tests" / "export" / "reference.py", folder], check=True
    )
    tensor = triton.InferInput("INPUT__0", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels)
    with triton.InferenceServerClient(server.grpc_address) as client:
        served = client.infer("resnet50_trt", [tensor]).as_numpy("OUTPUT__0")
    return images, served, np.load(folder / "logits.npy")


def test_the_core_equals_the_pytorch_module(resnet_logits: tuple[Any, Any, Any]) -> None:
    _, served, expected = resnet_logits
    assert served.shape == expected.shape == (3, 1000)
    assert np.abs(served - expected).max() <= 1e-3 * np.ptp(expected)
    assert np.ptp(expected) > 0.1  # the comparison would mean nothing on logits that are all alike


def test_scores_are_the_softmax_of_the_module(server: TritonServer, resnet_logits: tuple[Any, Any, Any]) -> None:
    images, _, logits = resnet_logits
    exponential = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    expected = exponential / exponential.sum(axis=1, keepdims=True)
    _, ids, scores, _ = infer(server, "ensemble", images, {"top_k": 1000})
    assert sorted(ids[0].tolist()) == list(range(1000))
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids, axis=1), atol=1e-4)


@pytest.mark.parametrize("model", ["ensemble", LITE])
def test_one_bad_image_costs_only_itself_when_masked(server: TritonServer, model: str) -> None:
    good = [jpeg(1), jpeg(2)]
    labels, ids, scores, status = infer(server, model, [good[0], b"text", good[1]], {"on_bad_image": "mask"})
    assert status[1, 0].startswith(b"unsupported_format: ")
    assert labels[1].tolist() == [b""] * 5
    assert ids[1].tolist() == [-1] * 5
    assert scores[1].tolist() == [0.0] * 5
    for row, image in ((0, good[0]), (2, good[1])):
        np.testing.assert_allclose(scores[row], infer(server, model, [image])[2][0], atol=1e-5)
        assert status[row, 0] == b""


@pytest.mark.parametrize("model", ["ensemble", LITE])
def test_a_bad_image_fails_its_request_with_its_index_and_reason(server: TritonServer, model: str) -> None:
    with pytest.raises(triton.InferenceServerException, match=r"image 1: truncated: [^/]*$") as caught:
        infer(server, model, [jpeg(1), jpeg(2)[:900]])
    assert "INVALID_ARGUMENT" in caught.value.status()


def test_neighbours_in_a_dynamic_batch_never_notice(server: TritonServer) -> None:
    images = [jpeg(seed) for seed in range(6)]
    expected = [infer(server, LITE, [image])[1].tolist() for image in images]

    def call(number: int) -> Any:
        if number % 4 == 3:
            try:
                infer(server, LITE, [images[0], b"\xff\xd8\xff junk"])
            except triton.InferenceServerException as error:
                return error.status()
        return infer(server, LITE, [images[number % 6]])[1].tolist()

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(call, range(96)))
    for number, answer in enumerate(answers):
        assert answer == ("StatusCode.INVALID_ARGUMENT" if number % 4 == 3 else expected[number % 6])


@pytest.mark.parametrize(
    "parameters",
    [{"top_k": 0}, {"top_k": 1001}, {"top_k": -1}, {"top_k": True}, {"top_k": "3"}, {"on_bad_image": "skip"}],
)
def test_wrong_parameters_are_invalid_arguments(server: TritonServer, parameters: dict[str, Any]) -> None:
    with pytest.raises(triton.InferenceServerException, match=next(iter(parameters))) as caught:
        infer(server, LITE, [jpeg(1)], parameters)
    assert "INVALID_ARGUMENT" in caught.value.status()


def test_unknown_parameters_are_ignored(server: TritonServer) -> None:
    assert infer(server, LITE, [jpeg(1)], {"x_forwarded": "yes", "top_k": 2})[1].shape == (1, 2)


def test_33_images_are_refused_and_32_served(server: TritonServer) -> None:
    assert infer(server, LITE, [jpeg(1, (64, 64))] * 32)[3].shape == (32, 1)
    with pytest.raises(triton.InferenceServerException, match="32"):
        infer(server, LITE, [jpeg(1, (64, 64))] * 33)


def test_serving_imports_no_torch(server: TritonServer) -> None:
    stubs = subprocess.run(["pgrep", "-g", str(server.pid)], capture_output=True, text=True, check=True).stdout.split()
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in stubs)
    assert "libopenvino" in maps
    assert "libtorch" not in maps
    code = "import sys, triton_vision.cli.main, triton_vision_client; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrays_travel_without_loss(server: TritonServer, tmp_path: Path) -> None:
    image = noise(3, (300, 280))
    image.save(tmp_path / "image.png")
    with ImageClient(server.grpc_address, model=LITE) as client:
        expected = client.classify(tmp_path / "image.png").predictions
        assert client.classify(np.asarray(image)).predictions == expected
        assert client.classify(image).predictions == expected


def test_a_caller_s_timeout_reaches_the_server(server: TritonServer) -> None:
    # One microsecond in the queue: the server drops the work of a caller who is gone.
    request = triton.InferInput("IMAGE", [1, 1], "BYTES")
    request.set_data_from_numpy(np.array([[jpeg(1)]], np.object_))
    with (
        triton.InferenceServerClient(server.grpc_address) as client,
        pytest.raises(triton.InferenceServerException) as caught,
    ):
        client.infer(LITE, [request], timeout=1)
    assert str(grpc.StatusCode.UNAVAILABLE) in caught.value.status()


def counters(server: TritonServer, model: str) -> dict[str, float]:
    """The suite's own metrics of one model: name and labels -> value."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(rf'^(triton_vision_\w+\{{model="{model}".*\}}) (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def settled(server: TritonServer, model: str) -> dict[str, float]:
    """The counters once nothing is on its way any more: every instance hands over its counts a few times a second."""
    known, since = counters(server, model), time.monotonic()
    while time.monotonic() < since + 1.0:
        time.sleep(0.1)
        now = counters(server, model)
        if now != known:
            known, since = now, time.monotonic()
    return known


def test_metrics_of_images_refusals_bytes_and_seconds(server: TritonServer) -> None:
    before = settled(server, "preprocess_lite")
    good = jpeg(1)
    infer(server, LITE, [good, b"", good, b"junk"], {"on_bad_image": "mask"})
    wanted = {
        'triton_vision_images_total{model="preprocess_lite"}': 2,
        'triton_vision_refusals_total{model="preprocess_lite",reason="empty"}': 1,
        'triton_vision_refusals_total{model="preprocess_lite",reason="unsupported_format"}': 1,
        'triton_vision_input_bytes_total{model="preprocess_lite"}': 2 * len(good) + 4,
    }
    after = settled(server, "preprocess_lite")
    assert {name: after[name] - before.get(name, 0) for name in wanted} == wanted
    for step in ("read", "process", "respond"):
        name = f'triton_vision_seconds_total{{model="preprocess_lite",step="{step}"}}'
        assert after[name] > before.get(name, 0)


def test_small_images_do_not_wait_for_32_large_ones(server: TritonServer) -> None:
    """P99 under 200 ms for another caller, while 32 images of 12 megapixels come in one request."""
    large = [encoded(noise(seed, (4000, 3000)), "JPEG", quality=80) for seed in range(2)] * 16
    small = jpeg(3, (500, 375))
    waits: list[float] = []
    answered = threading.Event()

    def send_large() -> None:
        infer(server, "preprocess", large, outputs=("STATUS",))
        answered.set()

    thread = threading.Thread(target=send_large)
    thread.start()
    while not answered.is_set():
        began = time.monotonic()
        infer(server, "preprocess", [small], outputs=("STATUS",))
        waits.append(time.monotonic() - began)
    thread.join()
    assert len(waits) > 20
    assert sorted(waits)[int(len(waits) * 0.99)] < 0.2


def test_work_in_progress_is_dropped_when_its_timeout_has_passed(server: TritonServer) -> None:
    """In the middle of a batch, not only in the queue: 32 images of 12 megapixels take most of a second."""
    large = encoded(noise(1, (4000, 3000)), "JPEG", quality=80)
    tensor = triton.InferInput("IMAGE", [32, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([large] * 32, np.object_).reshape(-1, 1))
    with triton.InferenceServerClient(server.grpc_address) as client:
        with pytest.raises(triton.InferenceServerException, match="Request timeout expired while") as caught:
            client.infer("preprocess", [tensor], timeout=200_000)
        assert "UNAVAILABLE" in caught.value.status()
        assert client.infer("preprocess", [tensor]).as_numpy("STATUS").tolist() == [[b""]] * 32


def mutations(count: int) -> list[bytes]:
    """Seeded damage to small files of every format: bytes changed, cut out, put in, the end cut off."""
    kinds = ("JPEG", "JPEG", "JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
    originals = [encoded(noise(3, (72, 56)), kind) for kind in kinds]
    originals[1] = encoded(noise(4, (72, 56)), "JPEG", progressive=True)
    originals[2] = encoded(noise(5, (72, 56)).convert("CMYK"), "JPEG")
    made = []
    for seed in range(count):
        generator = np.random.default_rng(seed)
        data = bytearray(originals[seed % len(originals)])
        # Half of the damage goes where the headers are.
        reach = len(data) if seed // len(originals) % 2 else min(len(data), 700)
        for spot in generator.integers(0, reach, generator.integers(1, 6)):
            match generator.integers(0, 8):
                case 0:
                    del data[spot : spot + int(generator.integers(1, 9))]
                case 1:
                    data[spot:spot] = generator.bytes(int(generator.integers(1, 9)))
                case 2:
                    del data[spot + 60 :]
                case _:
                    data[min(spot, len(data) - 1)] = generator.integers(0, 256)
        made.append(bytes(data))
    return made


def test_bombs_and_large_images_harm_nobody_in_their_request_or_batch(server: TritonServer) -> None:
    photo, large = (SAMPLES / "coffee.jpg").read_bytes(), encoded(noise(1, (4000, 3000)), "PNG", compress_level=1)
    expected = infer(server, LITE, [photo])[1][0, 0]
    with ThreadPoolExecutor(8) as pool:
        hostile = [
            pool.submit(infer, server, LITE, [photo, data, photo], {"on_bad_image": "mask"})
            for data in (bombs.many_scans(4000, 2000), large, bombs.inside_jpeg(b"\xff\xd8" * 6000), large)
        ]
        good = [pool.submit(infer, server, LITE, [photo]) for _ in range(40)]
        assert [call.result()[1][0, 0] for call in good] == [expected] * 40
    for call, refused in zip(hostile, (True, False, True, False), strict=True):
        _, ids, _, status = call.result()
        assert (ids[0, 0], ids[2, 0]) == (expected, expected)
        assert status[1, 0].startswith(b"too_complex: ") == refused
        assert (ids[1, 0] == -1) == refused


def pillow_serves(data: bytes) -> bool:
    """Whether Pillow opens and decodes it, as one of the formats of the contract and within the limit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            formats = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
            with Image.open(io.BytesIO(data), formats=formats) as image:
                if image.width * image.height > 100_000_000:
                    return False
                image.load()
                converted = np.asarray(image.convert("RGB"))
                return bool(np.isfinite(np.asarray(image)).all()) if image.mode == "F" else converted.size > 0
    except Exception:  # noqa: BLE001 - Pillow refuses it, with whatever
        return False


def test_10000_mutated_files_kill_no_stub_and_are_served_or_refused_as_pillow_does(server: TritonServer) -> None:
    files = mutations(10_000)
    with ThreadPoolExecutor(2) as pool:
        batches = [files[at : at + 32] for at in range(0, len(files), 32)]
        answers = pool.map(
            lambda batch: infer(server, "preprocess", batch, {"on_bad_image": "mask"}, outputs=("STATUS",))[0], batches
        )
        status = np.concatenate(list(answers)).ravel()
    expected = [pillow_serves(data) for data in files]
    differing = [
        (number, text)
        for number, (text, wanted) in enumerate(zip(status, expected, strict=True))
        if (not text) != wanted
    ]
    assert differing == []
    assert 1000 < sum(expected) < 9000
    assert {text.split(b":")[0] for text in status if text} <= {reason.encode() for reason in REASONS}
    assert infer(server, "preprocess", [jpeg(1)], outputs=("STATUS",))[0].tolist() == [[b""]]
