"""Label files: a line for each class, in the order of the class ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path


def read_labels(path: Path) -> list[str]:
    """A file's labels, without the byte order mark that some editors put before the first.

    Raises:
        ValueError: it cannot be read; the text says why and does not name the file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError("does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: see byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    return [line.strip() for line in text.rstrip("\n").split("\n")]


def duplicates(labels: Sequence[str]) -> dict[str, list[int]]:
    """Labels that stand for several classes -> the ids of those."""
    ids: defaultdict[str, list[int]] = defaultdict(list)
    for number, label in enumerate(labels):
        ids[label].append(number)
    return {label: numbers for label, numbers in ids.items() if len(numbers) > 1}
