"""Finding files: order, duplicates, links, and what cannot be read."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from pathlib import Path

import pytest

from triton_vision.cli import find as find_module
from triton_vision.cli.find import Unreadable, check, find, find_files


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files at several depths."""
    for name in ("b.jpg", "a/2.jpg", "a/1.jpg", "a/deep/x.jpg", "a/.hidden.jpg", "a/.folder/y.jpg", "c[1].jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_sorted_and_goes_all_the_way_down(tree: Path) -> None:
    assert list(find(["a"])) == ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg"]
    assert list(find(["./a/"])) == ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg"]
    assert list(find(["."])) == ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg", "b.jpg", "c[1].jpg"]
    assert next(find([str(tree)])) == str(tree / "a/1.jpg")


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["a/1.jpg", "a"], ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg"]),
        (["a", "a/1.jpg", "./a/1.jpg", "a/deep", "a/"], ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg"]),
        (["a/deep", "a"], ["a/deep/x.jpg", "a/1.jpg", "a/2.jpg"]),
        (["a/*.jpg", "a"], ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg"]),
        (["a", "**/*.jpg"], ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg", "b.jpg", "c[1].jpg"]),
        (
            ["a", "a/.hidden.jpg", "a/.folder"],
            ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg", "a/.hidden.jpg", "a/.folder/y.jpg"],
        ),
        (["b.jpg", "b.jpg", "c[1].jpg"], ["b.jpg", "c[1].jpg"]),
    ],
)
def test_each_comes_once(paths: list[str], found: list[str]) -> None:
    assert list(find(paths)) == found


def test_deep_globs_do_not_run_in_circles(tree: Path) -> None:
    (tree / "a" / "loop").symlink_to(tree / "a")
    (tree / "a" / "again").symlink_to(tree)
    (tree / "a" / "deep" / "link.jpg").symlink_to(tree / "b.jpg")
    assert list(find(["**/*.jpg"])) == ["a/1.jpg", "a/2.jpg", "a/deep/link.jpg", "a/deep/x.jpg", "b.jpg", "c[1].jpg"]
    assert list(find(["a/**"])) == ["a/1.jpg", "a/2.jpg", "a/deep/link.jpg", "a/deep/x.jpg"]
    assert list(find([f"{tree}/?/**/x.jpg"])) == [f"{tree}/a/deep/x.jpg"]
    assert list(find(["**/deep/**/*.jpg"])) == ["a/deep/link.jpg", "a/deep/x.jpg"]
    assert list(find(["a/loop/**/x.jpg"])) == ["a/loop/deep/x.jpg"]  # a link that is named is followed
    assert list(find(["a/**/"])) == []


def test_links(tree: Path) -> None:
    (tree / "a" / "loop").symlink_to(tree / "a")
    (tree / "a" / "self.jpg").symlink_to("self.jpg")
    (tree / "a" / "gone.jpg").symlink_to("nowhere")
    (tree / "a" / "other.jpg").symlink_to(tree / "b.jpg")
    (tree / "link").symlink_to("a")
    found = list(find(["a"]))
    good = ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg", "a/other.jpg"]
    assert [one for one in found if isinstance(one, str)] == good
    refused = {one.path: one.why for one in found if isinstance(one, Unreadable)}
    assert refused["a/gone.jpg"] == "a link to a file that is not there"
    assert "symbolic links" in refused["a/self.jpg"]
    # A link that is named itself is followed, and so is what lies behind a link that no walk has followed.
    assert "link/1.jpg" in list(find(["link"]))
    assert "a/loop/1.jpg" in list(find(["a", "a/loop"]))
    assert list(find_files(["a"])) == good


def test_pipes_and_other_things_that_are_no_files_are_left_out(tree: Path) -> None:
    os.mkfifo(tree / "a" / "pipe.jpg")
    assert list(find(["a"])) == ["a/1.jpg", "a/2.jpg", "a/deep/x.jpg"]


@pytest.mark.usefixtures("tree")
def test_what_is_deeper_than_a_path_may_be_is_refused_not_a_stop() -> None:
    here = os.getcwd()
    name = "d" * 250
    try:
        for _ in range(20):
            os.mkdir(name)
            os.chdir(name)
        Path("image.jpg").touch()
        os.chdir(here)
        *rest, deepest, last = find(["."])
        assert isinstance(deepest, Unreadable) or isinstance(last, Unreadable)
        assert "a/1.jpg" in rest
    finally:
        os.chdir(here)
        # Deeper than rmtree of this name can go.
        for _ in range(20):
            os.chdir(name)
        os.unlink("image.jpg")
        for _ in range(20):
            os.chdir("..")
            os.rmdir(name)


@pytest.mark.usefixtures("tree")
def test_what_names_nothing() -> None:
    check(["a", "c[1].jpg", "*.jpg"])
    for missing in ("nonesuch.jpg", "*.png", "b.jpg/x", "a/**/*.tiff"):
        with pytest.raises(FileNotFoundError, match="there is no "):
            check(["a", missing])
        with pytest.raises(FileNotFoundError, match="there is no "):
            find_files([missing])
    check(["x" * 300])  # longer than a name may be: refused when it is read, with the system's words


def test_the_file_that_is_written_is_no_image(tree: Path) -> None:
    own = os.stat(tree / "a" / "2.jpg")
    assert list(find(["a"], leave_out={(own.st_dev, own.st_ino)})) == ["a/1.jpg", "a/deep/x.jpg"]


def test_a_large_folder_is_not_listed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_module, "SORTED", 100)
    names = [f"{number:06}.jpg" for number in range(20_000)]
    for name in names:
        (tmp_path / name).touch()
    tracemalloc.start()
    found = find([str(tmp_path)])
    first = list(itertools.islice(found, 100))
    assert first == sorted(first, key=str)
    count = sum(1 for _ in found)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 19_900
    assert most < 300_000, "20,000 names take 2 MB"


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.jpg"
    with open(name, "wb"):
        pass
    (found,) = find([str(tmp_path)])
    assert isinstance(found, str)
    assert os.fsencode(found) == name
