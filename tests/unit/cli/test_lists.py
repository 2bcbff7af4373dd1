"""Lists of paths: separators, slow pipes, and what is not a list."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_vision.cli.find import Found, Unreadable
from triton_vision.cli.lists import CHUNK, ListError, read_list


def listed(content: bytes, tmp_path: Path, nul: bool = False, check: bool = False) -> list[Found | None]:
    file = tmp_path / "list"
    file.write_bytes(content)
    fd = os.open(file, os.O_RDONLY)
    try:
        first = list(read_list(fd, "list", nul, check))
        assert list(read_list(fd, "list", nul, check)) == first, "a file can be read twice"
        return first
    finally:
        os.close(fd)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)


def test_lines(tmp_path: Path) -> None:
    assert listed(b"a.jpg\n\n b c.jpg \r\n*.jpg\nlast", tmp_path) == ["a.jpg", " b c.jpg ", "*.jpg", "last"]
    assert listed(b"", tmp_path) == []
    assert listed(b"caf\xe9.jpg\n", tmp_path) == [os.fsdecode(b"caf\xe9.jpg")]


def test_nul_bytes(tmp_path: Path) -> None:
    assert listed(b"a\nb.jpg\0c\r\0", tmp_path, nul=True) == ["a\nb.jpg", "c\r"]


def test_a_list_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    names = [f"photos/{number:07}.jpg" for number in range(3 * CHUNK // 10)]
    assert listed("\n".join(names).encode(), tmp_path) == names


def test_what_is_no_list(tmp_path: Path) -> None:
    with pytest.raises(ListError, match="add -0"):
        listed(b"a\0b\0", tmp_path)
    with pytest.raises(ListError, match="leave out -0"):
        listed(b"a.jpg\n" * 50_000, tmp_path, nul=True)


def test_only_files_can_be_sent(tmp_path: Path) -> None:
    (tmp_path / "image.jpg").touch()
    os.mkfifo(tmp_path / "pipe")
    names = [str(tmp_path / name) for name in ("image.jpg", "", "pipe", "gone.jpg")]
    good, folder, pipe, gone = listed("\n".join(names).encode(), tmp_path, check=True)
    assert good == str(tmp_path / "image.jpg")
    for found, words in ((folder, "a folder"), (pipe, "neither a file"), (gone, "No such file")):
        assert isinstance(found, Unreadable)
        assert words in found.why
        with pytest.raises(OSError, match=words):
            found.read()


def test_a_pipe_is_read_as_it_comes(pipe: tuple[int, int]) -> None:
    read, write = pipe
    names = read_list(read, "list", nul=False, check=False)
    assert next(names) is None
    os.write(write, b"one.jpg\ntw")
    assert next(names) == "one.jpg"
    assert next(names) is None
    os.write(write, b"o.jpg\nthree.jpg")
    os.close(write)
    assert list(names) == ["two.jpg", "three.jpg"]
