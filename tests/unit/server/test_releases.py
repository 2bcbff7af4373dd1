"""NVIDIA's releases: the table, what the documents and the Dockerfile say of it, and the judgement on a driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from triton_vision.server import releases
from triton_vision.server.releases import RELEASES, check_driver, find_release, read_driver, read_server_version


def test_the_documented_table_is_the_one_in_the_code() -> None:
    assert releases.table() in (ROOT / "docs" / "image.md").read_text()


def test_the_dockerfile_builds_on_the_first_row_and_exports_with_the_same_release() -> None:
    dockerfile = (ROOT / "Dockerfile.triton").read_text()
    assert f"\nARG BASE={RELEASES[0].image}\n" in dockerfile
    assert f"\nARG EXPORT_BASE=nvcr.io/nvidia/pytorch:{RELEASES[0].release}-py3\n" in dockerfile
    assert "# syntax=" not in dockerfile


def test_the_last_row_is_the_embedded_server() -> None:
    pins = (ROOT / "requirements" / "triton.txt").read_text()
    assert f"tritonserver {RELEASES[-1].server} (release {RELEASES[-1].release})" in pins


def test_rows_are_complete_and_in_order() -> None:
    assert [row.release for row in RELEASES] == sorted((row.release for row in RELEASES), reverse=True)
    servers = [tuple(map(int, row.server.split("."))) for row in RELEASES]
    assert servers == sorted(servers, reverse=True)
    for row in RELEASES:
        assert find_release(row.server) is row
        assert re.fullmatch(r"\d{3}", row.driver)
        assert re.fullmatch(r"3\.\d+", row.python)
        assert re.fullmatch(r"\d+\.\d+\.\d+", row.cuda)


@pytest.mark.parametrize(
    ("server", "driver", "gpu"),
    [
        ("2.71.0", "580.65.06", ""),  # just new enough
        ("2.71.0", "610.43.02", "NVIDIA GeForce RTX 4090"),
        ("2.51.0", "560.35.03", "NVIDIA GeForce RTX 4090"),
        ("2.51.0", "535.183.01", "NVIDIA L4"),  # by forward compatibility
        ("2.51.0", "470.57", ""),  # what GPU it is, is not known
        ("9.99.0", "100.0", ""),  # a release that the table does not have
        ("", "535.183.01", ""),
        ("2.71.0", "", ""),  # no driver, or none that can be read
        ("2.71.0", "[N/A]", ""),
    ],
)
def test_a_driver_that_will_do_or_cannot_be_judged_is_not_complained_about(server: str, driver: str, gpu: str) -> None:
    assert check_driver(server, driver, gpu) == ""


@pytest.mark.parametrize(
    ("server", "driver", "gpu", "note"),
    [
        ("2.71.0", "575.57.08", "NVIDIA L4", "docs.nvidia.com/deploy/cuda-compatibility"),
        ("2.51.0", "535.54.03", "NVIDIA L4", "535.86"),  # of a listed branch, and older than the listed version
        ("2.51.0", "550.54.15", "NVIDIA L4", "545.23"),  # of a branch that is not listed
        ("2.51.0", "535.183.01", "NVIDIA GeForce RTX 3080", ""),  # forward compatibility is not for this GPU
        ("2.51.0", "535.183.01", "NVIDIA TITAN V", ""),
    ],
)
def test_an_old_driver_gets_one_sentence(server: str, driver: str, gpu: str, note: str) -> None:
    said = check_driver(server, driver, gpu)
    release = find_release(server)
    assert release is not None
    assert f"this machine has {driver}: update the driver" in said
    assert f"needs NVIDIA driver {release.driver} or newer" in said
    assert "\n" not in said
    assert not said.endswith(".")
    assert ("data-center" in said) == bool(note)
    assert note in said


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)\n", "580.65.06"),
        ("something else entirely\n", ""),
    ],
)
def test_the_kernel_module_tells_the_driver_where_nvidia_smi_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "version"
    assert read_driver(file) == ""
    file.write_text(text)
    assert read_driver(file) == version


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 570.124.06; echo 570.124.06", "570.124.06"),  # two GPUs
        ("echo 'NVIDIA-SMI has failed'; exit 9", "535.104.05"),
        ("echo No devices were found", "535.104.05"),
    ],
)
def test_nvidia_smi_comes_first_if_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, version: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_driver(file) == version


def test_the_server_version_comes_from_its_folder_then_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_SERVER_VERSION", raising=False)
    assert read_server_version(tmp_path) == ""
    monkeypatch.setenv("TRITON_SERVER_VERSION", "2.71.0")
    assert read_server_version(tmp_path) == "2.71.0"
    (tmp_path / "TRITON_VERSION").write_text("2.70.0\n")
    assert read_server_version(tmp_path) == "2.70.0"
