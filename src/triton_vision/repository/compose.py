"""A folder of links that holds just the models to serve."""

from __future__ import annotations

from pathlib import Path

from triton_vision.repository.select import Selection


def compose(selection: Selection, folder: Path) -> Path:
    """Fills ``folder`` (which must not exist) with a link to each served model; returns it.

    An ensemble has no files, and version control drops its empty version directory, which Triton insists on: such a
    model gets a folder of its own with that directory added.
    """
    folder.mkdir()
    for name, model in selection.served.items():
        source = model.path.resolve()
        if model.is_ensemble and not model.version_folders():
            target = folder / name
            target.mkdir()
            for entry in source.iterdir():
                (target / entry.name).symlink_to(entry)
            (target / "1").mkdir()
        else:
            (folder / name).symlink_to(source)
    return folder
