"""A folder of links that holds just the models to serve."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from triton_vision.repository.model import Model
from triton_vision.repository.scale import scaled
from triton_vision.repository.select import Selection


def compose(selection: Selection, folder: Path) -> Path:
    """Fills ``folder`` (which must not exist) with a link to each served model; returns it.

    An ensemble has no files, and version control drops its empty version directory, which Triton insists on: such a
    model gets a folder of its own with that directory added. So does a model that is to be fitted to the machine,
    with a configuration of its own.
    """
    folder.mkdir()
    for name, model in selection.served.items():
        fitted = scaled(model)
        if fitted is not None:
            _link_all(model, folder / name, but=model.config_file)
            file = folder / name / model.config_file
            file.parent.mkdir(exist_ok=True)
            file.write_text(text_format.MessageToString(fitted[0].config), encoding="utf-8")
        elif model.is_ensemble and not model.version_folders():
            _link_all(model, folder / name)
            (folder / name / "1").mkdir()
        else:
            (folder / name).symlink_to(model.path.resolve())
    return folder


def _link_all(model: Model, target: Path, but: str = "") -> None:
    """Links the entries of a model's directory, except for the one that holds the file ``but``."""
    target.mkdir()
    for entry in model.path.resolve().iterdir():
        if entry.name != but.partition("/")[0]:
            (target / entry.name).symlink_to(entry)
