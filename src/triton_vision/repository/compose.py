"""A folder of links that holds just the models to serve."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from triton_vision.repository.model import Model
from triton_vision.repository.placement import Placement
from triton_vision.repository.scale import scaled
from triton_vision.repository.select import Selection


def fitted(model: Model, placement: Placement | None = None) -> Model:
    """The model with its configuration fitted to the machine and to what was asked for; itself if that changes nothing.

    Raises:
        RepositoryError: a parameter of the configuration is wrong.
    """
    sized = scaled(model)
    result = model if sized is None else sized[0]
    return result if placement is None else placement.place(result)


def compose(selection: Selection, folder: Path, placement: Placement | None = None) -> Path:
    """Fills ``folder`` (which must not exist) with a link to each served model; returns it.

    An ensemble has no files, and version control drops its empty version directory, which Triton insists on: such a
    model gets a folder of its own with that directory added. So does a model whose configuration is fitted to the
    machine, and one with artifacts in another directory.
    """
    folder.mkdir()
    for name, model in selection.served.items():
        target = folder / name
        changed = fitted(model, placement)
        elsewhere = _elsewhere(model)
        if changed is model and not elsewhere and (model.version_folders() or not model.is_ensemble):
            target.symlink_to(model.path.resolve())
            continue
        own = {version for version, _ in elsewhere}
        if changed is not model:
            own.add(model.config_file.partition("/")[0])
        _link_all(model.path, target, own)
        if changed is not model:
            file = target / model.config_file
            file.parent.mkdir(exist_ok=True)
            file.write_text(text_format.MessageToString(changed.config), encoding="utf-8")
        for version, files in elsewhere:
            _link_all(model.path / version, target / version, {file.name for file in files})
            for file in files:
                (target / version / file.name).symlink_to(file.resolve())
        if model.is_ensemble and not model.version_folders():
            (target / "1").mkdir()
    return folder


def _elsewhere(model: Model) -> list[tuple[str, list[Path]]]:
    """Each served version's artifacts that lie elsewhere, and what lies beside them, such as a graph's weights."""
    found = []
    for version in model.served_versions():
        paths = [model.artifact(version, name) for name in model.wanted_artifacts()]
        folders = {path.parent for path in paths if path.parent != version and path.exists()}
        there = [entry for folder in sorted(folders) for entry in sorted(folder.iterdir())]
        files = [
            entry for entry in there if (entry.is_file() or entry in paths) and not (version / entry.name).exists()
        ]
        if files:
            found.append((version.name, files))
    return found


def _link_all(source: Path, target: Path, but: set[str]) -> None:
    """Links a directory's entries, except for those whose names are in ``but``."""
    target.mkdir()
    for entry in source.resolve().iterdir():
        if entry.name not in but:
            (target / entry.name).symlink_to(entry)
