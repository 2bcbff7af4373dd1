"""What images show: names of classes, folders, CSVs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT
from triton_vision.accuracy.truth import Classes, Item, TruthError, read_truth, spread

LABELS = (ROOT / "model_repository/postprocess/labels.txt").read_text(encoding="utf-8").splitlines()
IMAGENET = Classes(LABELS)
THREE = Classes(["tabby, tabby cat", "tiger cat", "espresso"])


def tree(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


def classes_of(folder: Path, items: list[Item]) -> dict[str, int]:
    return {os.path.relpath(item.path, folder): item.class_id for item in items}


@pytest.mark.parametrize(
    ("name", "class_id"),
    [
        ("281", 281),
        ("0281", 281),
        ("tabby", 281),
        ("Tabby_Cat", 281),
        ("tabby, tabby cat", 281),
        ("tabby,_tabby_cat", 281),
        ("  tiger   cat ", 282),
        ("great white shark", 2),
        ("missile", 657),  # 744 is "projectile, missile"
        ("maillot", 638),  # 639 is "maillot, tank suit"
    ],
)
def test_names_of_classes(name: str, class_id: int) -> None:
    assert IMAGENET.find(name) == class_id


def test_every_label_but_the_crane_finds_itself() -> None:
    for number, label in enumerate(LABELS):
        if label != "crane":
            assert IMAGENET.find(label) == number


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1000", "from 0 to 999"),
        ("crane", r"134 \(crane\) and 517 \(crane\): say which by its id"),
        ("panther", "several classes"),
        ("n01440764", "neither a class id nor a label"),
        ("-1", "neither"),
        ("²", "neither"),
        ("", "neither"),
    ],
)
def test_names_of_none_or_of_several(name: str, words: str) -> None:
    with pytest.raises(TruthError, match=words):
        IMAGENET.find(name)


def test_folders_named_by_label_or_id(tmp_path: Path) -> None:
    tree(tmp_path, "Tiger_Cat/b.jpg", "Tiger_Cat/deeper/a.png", "2/c.jpg", ".git/x", "2/.hidden", "readme.txt")
    found = classes_of(tmp_path, read_truth(tmp_path, THREE))
    assert found == {"2/c.jpg": 2, "Tiger_Cat/b.jpg": 1, "Tiger_Cat/deeper/a.png": 1}


def test_as_many_unknown_names_as_classes_are_in_order(tmp_path: Path) -> None:
    tree(tmp_path, "n03/c.jpg", "n01/a.jpg", "n02/b.jpg")
    assert classes_of(tmp_path, read_truth(tmp_path, THREE)) == {"n01/a.jpg": 0, "n02/b.jpg": 1, "n03/c.jpg": 2}


def test_as_many_numbers_as_classes_are_ids(tmp_path: Path) -> None:
    """Sorted as text, 10 would come before 2."""
    labels = Classes([f"class {number}" for number in range(11)])
    tree(tmp_path, *(f"{number}/a.jpg" for number in range(11)))
    assert classes_of(tmp_path, read_truth(tmp_path, labels))["10/a.jpg"] == 10


@pytest.mark.parametrize(
    "files",
    [
        ["n01/a.jpg", "n02/b.jpg"],  # too few
        ["espresso/a.jpg", "tabby/b.jpg", "tigre/c.jpg"],  # as many as classes, but one is misspelt
        ["espresso/a.jpg", "3/b.jpg"],
    ],
)
def test_a_name_that_nobody_knows_is_named_with_the_ways_out(tmp_path: Path, files: list[str]) -> None:
    wrong = next(file.split("/")[0] for file in files if file.startswith(("n01", "tigre", "3")))
    with pytest.raises(
        TruthError, match=rf"/{wrong}: .* sub-folders, 3 classes\): name the sub-folders .* or give a CSV"
    ):
        read_truth(tree(tmp_path, *files), THREE)


def test_nothing_to_judge(tmp_path: Path) -> None:
    with pytest.raises(TruthError, match="has no sub-folders"):
        read_truth(tree(tmp_path / "flat", "a.jpg"), THREE)
    (tmp_path / "empty" / "espresso").mkdir(parents=True)
    with pytest.raises(TruthError, match="there are no images in"):
        read_truth(tmp_path / "empty", THREE)
    with pytest.raises(TruthError, match=r"there is no .*missing"):
        read_truth(tmp_path / "missing", THREE)


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    tree(tmp_path / "elsewhere", "a.jpg", "b.jpg")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "espresso").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "elsewhere")
    found = classes_of(tmp_path / "tree", read_truth(tmp_path / "tree", THREE))
    assert found == {"espresso/a.jpg": 2, "espresso/b.jpg": 2}


@pytest.mark.parametrize(
    "text",
    [
        'a.jpg,espresso\nsub/b.jpg,"tabby, tabby cat"\n',
        "path,class\na.jpg,2\nsub/b.jpg,0\n",
        "\ufeffimage,label\r\na.jpg,2\r\n\r\nsub/b.jpg,TABBY\r\n",
        "number,Class,split,Path\n1,espresso,val,a.jpg\n2,tabby,val,sub/b.jpg\n",
    ],
)
def test_a_csv(tmp_path: Path, text: str) -> None:
    (tmp_path / "truth.csv").write_text(text, encoding="utf-8", newline="")
    items = read_truth(tmp_path / "truth.csv", THREE)
    assert items == [Item(str(tmp_path / "a.jpg"), 2), Item(str(tmp_path / "sub/b.jpg"), 0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.jpg,espresso\nb.jpg,tea\n", "line 2: 'tea' is neither"),
        ("a.jpg,espresso\nb.jpg\n", "line 2: a line is path,class"),
        ("a.jpg,espresso\nb.jpg,tabby, tabby cat\nc.jpg,9\n", "line 3: there is no class 9"),
        ("path,class\n", "there are no images"),
        ("real.jpg,tea\n", "line 1: 'tea' is neither"),  # no header: there is such a file
    ],
)
def test_what_is_wrong_with_a_csv(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "real.jpg").touch()
    (tmp_path / "truth.csv").write_text(text)
    with pytest.raises(TruthError, match=words):
        read_truth(tmp_path / "truth.csv", THREE)


def test_a_limit_takes_from_every_class() -> None:
    items = [Item(f"{number}.jpg", number // 50) for number in range(500)]
    assert [item.class_id for item in spread(items, 10)] == list(range(10))
    assert spread(items, 500) is items
    assert spread(items, None) is items
    assert len(spread(items, 333)) == 333
