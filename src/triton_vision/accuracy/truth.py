"""What each image shows: from folders as ImageNet's, or from a CSV."""

from __future__ import annotations

import csv
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

WAYS_OUT = (
    "name the sub-folders by class id (281) or label (tabby), have one sub-folder for each class in the order of their "
    "sorted names, or give a CSV with the lines path,class"
)


class TruthError(Exception):
    """It cannot be told what the images show; the text is one sentence that names the place and the way out."""


@dataclass(frozen=True)
class Item:
    """An image's file, and the id of the class that it shows."""

    path: str
    class_id: int


class Classes:
    """A model's classes, found by id, by label, or by one of the label's synonyms.

    Args:
        labels: one for each class, in the order of the ids; synonyms are separated by commas (``tabby, tabby cat``).
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        self._whole: defaultdict[str, set[int]] = defaultdict(set)
        self._synonyms: defaultdict[str, set[int]] = defaultdict(set)
        for number, label in enumerate(labels):
            self._whole[_plain(label)].add(number)
            for synonym in label.split(","):
                self._synonyms[_plain(synonym)].add(number)

    def __len__(self) -> int:
        return len(self.labels)

    def find(self, name: str) -> int:
        """The class's id.

        Of two classes, the one whose whole label this is comes before the one where it is a synonym.

        Args:
            name: an id in digits, or a label: upper or lower case, with spaces or underscores.

        Raises:
            TruthError: there is no such class, or there are several.
        """
        text = name.strip()
        if text.isascii() and text.isdecimal():
            if int(text) < len(self):
                return int(text)
            raise TruthError(f"there is no class {text}: the ids go from 0 to {len(self) - 1}")
        key = _plain(text)
        found = sorted(self._whole.get(key) or self._synonyms.get(key) or ())
        if not found:
            raise TruthError(f"{name!r} is neither a class id nor a label")
        if len(found) > 1:
            several = " and ".join(f"{number} ({self.labels[number]})" for number in found)
            raise TruthError(f"{name!r} is the name of several classes, {several}: say which by its id")
        return found[0]


def _plain(text: str) -> str:
    """A label as it is compared: lower case, underscores as spaces, one space at a time."""
    text = unicodedata.normalize("NFC", text).casefold().replace("_", " ")
    return re.sub(r"\s*,\s*", ", ", " ".join(text.split()))


def read_truth(path: Path, classes: Classes) -> list[Item]:
    """The images under ``path``: a folder of one sub-folder for each class, or a CSV file.

    Raises:
        TruthError: it is neither, it holds no images, or a class in it is unknown or ambiguous.
    """
    try:
        items = from_folder(path, classes) if path.is_dir() else from_csv(path, classes)
    except OSError as error:
        raise TruthError(f"{path} cannot be read: {error.strerror}") from None
    if not items:
        raise TruthError(f"there are no images in {path}")
    return items


def from_folder(folder: Path, classes: Classes) -> list[Item]:
    """All files below the sub-folders, hidden ones aside, sorted.

    The sub-folders are named by class id or label. If none of them is, and there are as many as classes, their
    sorted order is that of the ids, which is how ImageNet's folders (n01440764 …) and torchvision's ImageFolder go.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise TruthError(f"{folder} has no sub-folders, whose names say what the images show: {WAYS_OUT}")
    found: dict[str, int] = {}
    problem = ""
    for name in names:
        try:
            found[name] = classes.find(name)
        except TruthError as error:
            problem = problem or f"{folder / name}: {error}"
    if problem:
        # Some names understood and others not are a mistake in a name, not another order of the classes.
        if found or len(names) != len(classes):
            raise TruthError(f"{problem} ({len(names)} sub-folders, {len(classes)} classes): {WAYS_OUT}")
        found = {name: number for number, name in enumerate(names)}
    return [Item(file, number) for name, number in found.items() for file in _files(folder / name)]


def _files(folder: Path) -> Iterator[str]:
    """The files below a folder, links followed, but none of them in a circle."""
    seen: set[tuple[int, int]] = set()
    for base, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(base)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(base, name) for name in sorted(files) if not name.startswith("."))


def from_csv(file: Path, classes: Classes) -> list[Item]:
    """The lines ``path,class``, in their order; a first line that names no class is the header.

    Paths are relative to the CSV's folder. A header with the columns ``path`` and ``class`` may have them anywhere;
    without one they are the first two.
    """
    if not file.is_file():
        raise TruthError(f"there is no {file}")
    items: list[Item] = []
    path_column, class_column = 0, 1
    try:
        with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
            reader = csv.reader(lines)
            first = True
            for row in reader:
                if not any(row):
                    continue
                header, first = first, False
                if (
                    header
                    and {"path", "class"} <= (names := {cell.strip().lower(): at for at, cell in enumerate(row)}).keys()
                ):
                    path_column, class_column = names["path"], names["class"]
                    continue
                if len(row) <= max(path_column, class_column) or not row[path_column]:
                    raise TruthError(f"{file}, line {reader.line_num}: a line is path,class")
                path = file.parent / row[path_column]
                try:
                    items.append(Item(str(path), classes.find(row[class_column])))
                except TruthError as error:
                    if header and not path.is_file():
                        continue
                    raise TruthError(
                        f"{file}, line {reader.line_num}: {error} (a label with a comma stands in quotation marks)"
                    ) from None
    except csv.Error as error:
        raise TruthError(f"{file} cannot be read as CSV: {error}") from None
    return items


def spread(items: list[Item], limit: int | None) -> list[Item]:
    """At most ``limit`` of the items, evenly spread, so that the classes are too."""
    if limit is None or limit >= len(items):
        return items
    return [items[number * len(items) // limit] for number in range(limit)]
