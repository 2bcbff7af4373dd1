"""The client against a real server: both twins, and every source of an image."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from triton_vision_client import (
    AsyncImageClient,
    BadImageError,
    ImageClient,
    ModelNotFoundError,
    ServerError,
    ServerUnavailableError,
)

from tests.conftest import SAMPLES, encoded, jpeg, noise
from triton_vision.server import TritonServer

LITE = "ensemble_lite"
NOWHERE = "127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture
def client(server: TritonServer) -> Iterator[ImageClient]:
    with ImageClient(server.grpc_address, model=LITE) as one:
        yield one


def test_every_source_of_an_image(client: ImageClient) -> None:
    path = SAMPLES / "coffee.jpg"
    expected = client.classify(path, top_k=3).predictions
    assert expected[0].label == "espresso"
    assert expected[0].class_id == 967
    assert expected[0].score > 0.9
    assert len(expected) == 3
    content = path.read_bytes()
    for source in (str(path), content, bytearray(content), memoryview(content), io.BytesIO(content)):
        result = client.classify(source, top_k=3)
        assert result.predictions == expected
        assert result.source is source
    with path.open("rb") as file:
        assert client.classify(file, top_k=3).predictions == expected


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "I;16"])
def test_a_pil_image_is_answered_like_its_file(client: ImageClient, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray((np.asarray(noise(4).convert("L")).astype(np.uint16) << 8) + 37)
    else:
        image = noise(4).convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert client.classify(image).predictions == client.classify(encoded(image, kind)).predictions


def test_a_pil_image_is_turned_upright(client: ImageClient) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = encoded(noise(5), "PNG", exif=exif)
    image = Image.open(io.BytesIO(file))
    assert client.classify(image).predictions == client.classify(file).predictions
    assert client.classify(image).predictions != client.classify(encoded(noise(5), "PNG")).predictions


def test_a_12_megapixel_array_is_answered_like_its_png(client: ImageClient) -> None:
    image = noise(6, (4032, 3024))
    expected = client.classify(encoded(image, "PNG", compress_level=1)).predictions
    assert client.classify(np.asarray(image)).predictions == expected
    assert client.classify(image).predictions == expected
    assert client.classify(np.asarray(image)[::2, ::-1]).predictions  # a view of any strides


def test_many_keep_their_order_and_bad_ones_cost_only_themselves(client: ImageClient, tmp_path: Path) -> None:
    images: list[object] = [jpeg(seed) for seed in range(40)]
    images[3] = b"text"
    images[17] = tmp_path / "missing.jpg"
    images[18] = tmp_path  # a folder
    images[21] = jpeg(1)[:500]
    images[39] = np.zeros((4, 4), np.uint8)
    results = list(client.classify_many(images, top_k=1))
    assert [result.source is image for result, image in zip(results, images, strict=True)] == [True] * 40
    reasons = {row: result.error.reason for row, result in enumerate(results) if result.error}
    assert reasons == {
        3: "unsupported_format",
        17: "unreadable",
        18: "unreadable",
        21: "truncated",
        39: "unreadable",
    }
    for row in (0, 2, 4, 16, 38):
        assert results[row].predictions == client.classify(images[row], top_k=1).predictions or np.isclose(
            results[row].predictions[0].score, client.classify(images[row], top_k=1).predictions[0].score, atol=1e-5
        )


def test_many_read_an_endless_iterable_only_as_far_as_needed(client: ImageClient) -> None:
    read = itertools.count()

    def endless() -> Iterator[bytes]:
        for number in read:
            yield jpeg(number % 5, (64, 64))

    results = client.classify_many(endless(), top_k=1)
    assert len(list(itertools.islice(results, 50))) == 50
    assert next(read) < 300
    results.close()


def test_nothing_but_unreadable_sources(client: ImageClient) -> None:
    (result,) = client.classify_many(["/nowhere.jpg"])
    assert isinstance(result.error, BadImageError)
    assert list(client.classify_many([])) == []


def test_errors_are_typed_and_plain(server: TritonServer, client: ImageClient) -> None:
    with pytest.raises(BadImageError, match=r"^truncated: the JPEG ends before") as bad:
        client.classify(jpeg(1)[:500])
    assert (bad.value.reason, bad.value.index) == ("truncated", 0)
    with pytest.raises(ModelNotFoundError, match="serves no model 'nonesuch'"):
        client.classify(jpeg(1), model="nonesuch")
    with pytest.raises(ServerError, match="top_k"):
        client.classify(jpeg(1), top_k=1001)
    with pytest.raises(FileNotFoundError):
        client.classify("missing.jpg")
    with ImageClient(NOWHERE, timeout=5) as nobody:
        with pytest.raises(ServerUnavailableError, match=f"no server answers at {NOWHERE}"):
            nobody.classify(jpeg(1))
        with pytest.raises(ServerUnavailableError):
            list(nobody.classify_many([jpeg(1)]))
        assert not nobody.ready(timeout=1)
    for port in (server.http_address, server.metrics_address):
        with ImageClient(port, timeout=5) as wrong, pytest.raises(ServerUnavailableError, match="does not speak gRPC"):
            wrong.classify(jpeg(1))


def test_a_wrong_port_of_localhost_is_told_apart(server: TritonServer) -> None:
    """gRPC itself shows only what ::1 says."""
    address = f"localhost:{server.http_address.rsplit(':', 1)[1]}"
    with ImageClient(address, timeout=5) as wrong, pytest.raises(ServerUnavailableError, match="does not speak gRPC"):
        wrong.classify(jpeg(1))


def test_a_server_that_is_not_there_is_passed_over(server: TritonServer) -> None:
    with ImageClient([NOWHERE, server.grpc_address], model=LITE) as client:
        assert client.ready()
        assert client.classify(SAMPLES / "coffee.jpg").predictions[0].label == "espresso"
        assert len(list(client.classify_many([jpeg(1)] * 20))) == 20


def test_any_tensors_of_any_model(server: TritonServer) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
    photo = (SAMPLES / "coffee.jpg").read_bytes()
    with ImageClient(server.grpc_address) as client:
        logits = client.infer("efficientnet_lite0", {"INPUT__0": pixels})["OUTPUT__0"]
        assert logits.dtype == np.float32
        assert logits.shape == (3, 1000)
        answer = client.infer(LITE, {"IMAGE": np.array([[photo]], np.object_)}, parameters={"top_k": 2})
        assert answer["LABELS"].tolist() == [[b"espresso", b"cup"]]
        assert answer["CLASS_IDS"].dtype == np.int32
        only = client.infer(LITE, {"IMAGE": [[photo]]}, outputs=["SCORES"])
        assert list(only) == ["SCORES"]
        with pytest.raises(TypeError, match="complex128 has no Triton datatype"):
            client.infer(LITE, {"IMAGE": np.zeros((1, 1), complex)})
        with pytest.raises(ServerError, match="INPUT__0"):
            client.infer("efficientnet_lite0", {"INPUT__0": pixels[:, :10]})

    async def twin() -> None:
        async with AsyncImageClient(server.grpc_address) as client:
            again = await client.infer("efficientnet_lite0", {"INPUT__0": pixels})
            np.testing.assert_allclose(again["OUTPUT__0"], logits, atol=1e-4)

    asyncio.run(twin())


def test_the_asyncio_twin(server: TritonServer) -> None:
    images: list[object] = [jpeg(seed) for seed in range(20)]
    images[5] = "missing.jpg"
    images[6] = b"text"
    client = AsyncImageClient(server.grpc_address, model=LITE)

    async def work() -> tuple[list[object], list[str | None]]:
        assert await client.ready()
        together = await asyncio.gather(*(client.classify(image) for image in images[7:15]))
        many = [item async for item in client.classify_many(images)]
        with pytest.raises(BadImageError, match="unsupported_format"):
            await client.classify(b"text")
        with pytest.raises(ModelNotFoundError):
            await client.classify(jpeg(1), model="nonesuch")
        return [result.source for result in together], [item.error.reason if item.error else None for item in many]

    # Twice: each event loop gets connections of its own.
    for _ in range(2):
        sources, reasons = asyncio.run(work())
        assert sources == images[7:15]
        assert reasons == [None] * 5 + ["unreadable", "unsupported_format"] + [None] * 13
    asyncio.run(client.close())


def test_the_asyncio_twin_without_a_server() -> None:
    async def work() -> None:
        async with AsyncImageClient(NOWHERE, timeout=5) as client:
            with pytest.raises(ServerUnavailableError, match=f"no server answers at {NOWHERE}"):
                await client.classify(jpeg(1))

    asyncio.run(work())
