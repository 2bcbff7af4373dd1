"""What an ensemble of the repository consists of: its recipe, its core, its labels, and where its weights come from."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_vision.export.weights import sha256
from triton_vision.labels import read_labels
from triton_vision.repository import Model, RepositoryError, read_model

FORMATS = "JPEG, MPO, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF"


@dataclass(frozen=True)
class Origin:
    """Where an artifact's weights come from, as its sidecar says.

    Attributes:
        kind: ``imagenet1k_v1``, ``package``, ``random`` or ``file``.
        source: the same for a person.
        sha256: of the weights' file; empty for random ones.
        mean, std: per channel on [0, 255], if they are stated.
    """

    kind: str
    source: str
    sha256: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chain:
    """An image ensemble.

    Attributes:
        name: the ensemble.
        first: its preprocessing.
        core: the model between its preprocessing and its postprocessing.
        recipe: parameters of the preprocessing -> value, as ``docs/stages.md`` lists them.
        labels: one for each class.
        origin: of the core's weights; None where no valid sidecar says so.
    """

    name: str
    first: str
    core: str
    recipe: dict[str, str]
    labels: list[str]
    origin: Origin | None

    def training(self) -> str:
        """What the network must have been trained on for its answers to mean anything, for a person."""
        told = f"shorter side {self.recipe['resize']}, centre crop {self.recipe['crop']}, {self.recipe['filter']}"
        if self.origin is None or not self.origin.mean:
            return told
        mean, std = (
            ",".join(f"{number / 255:.4g}" for number in numbers) for numbers in (self.origin.mean, self.origin.std)
        )
        return f"{told}, mean {mean}, std {std}"


DEFAULTS = {
    "resize": "256",
    "crop": "224",
    "filter": "bilinear",
    "orientation": "exif",
    "decode": "exact",
    "formats": FORMATS,
    "max_pixels": "100000000",
}


def chains_over(repository: Path, core: str) -> list[Chain]:
    """The image ensembles around a core, as far as they can be read."""
    found = []
    for folder in sorted(repository.iterdir()):
        with contextlib.suppress(RepositoryError, OSError):
            chain = read_chain(repository, folder.name)
            if chain.core == core:
                found.append(chain)
    return found


def read_chain(repository: Path, name: str) -> Chain:
    """Reads the ensemble ``name``.

    Raises:
        RepositoryError: it is not there, or is not a chain of preprocessing, core and postprocessing.
    """
    ensemble = _model(repository, name)
    if not ensemble.is_image_ensemble():
        raise RepositoryError(f"{name} in {repository} is not an ensemble from IMAGE to labels")
    steps = ensemble.config.ensemble_scheduling.step
    first = _step(name, [step for step in steps if "IMAGE" in step.input_map.values()], "reads IMAGE")
    pixels = first.output_map.get("PIXELS")
    core = _step(name, [step for step in steps if pixels and pixels in step.input_map.values()], "reads the PIXELS")
    last = _step(name, [step for step in steps if "LABELS" in step.output_map.values()], "makes LABELS")
    given = _parameters(_model(repository, first.model_name))
    return Chain(
        name,
        first.model_name,
        core.model_name,
        {key: given.get(key, default) for key, default in DEFAULTS.items()},
        _labels(_model(repository, last.model_name)),
        _origin(repository / core.model_name),
    )


def _model(repository: Path, name: str) -> Model:
    if not (repository / name).is_dir():
        raise RepositoryError(f"there is no {name} in {repository}: name the server's repository with --repository")
    model = read_model(repository / name, None)
    if model.config is None:
        raise RepositoryError(f"{name} in {repository}: {model.problem or 'there is no config.pbtxt'}")
    return model


def _step(name: str, steps: list[Any], what: str) -> Any:
    if len(steps) != 1:
        raise RepositoryError(f"{name}: one step {what} in a chain that can be compared, and here {len(steps)} do")
    return steps[0]


def _parameters(model: Model) -> dict[str, str]:
    return {key: value.string_value.strip() for key, value in model.config.parameters.items()}


def _labels(model: Model) -> list[str]:
    file = model.path / _parameters(model).get("labels", "labels.txt")
    try:
        return read_labels(file)
    except ValueError as error:
        raise RepositoryError(f"{file} {error}") from None


def _origin(core: Path) -> Origin | None:
    """What the sidecars beside the core's artifacts say, if they agree and speak of these very artifacts."""
    weights, normalisations = set(), set()
    for file in core.glob("[0-9]*/*.json"):
        try:
            stated = json.loads(file.read_text(encoding="utf-8"))
            if stated["sha256"] != sha256(file.with_suffix("")):
                continue
            weights.add((str(stated["weights"]), str(stated["weights_source"]), str(stated["weights_sha256"])))
            if "normalisation" in stated:
                numbers = stated["normalisation"]
                normalisations.add((tuple(map(float, numbers["mean"])), tuple(map(float, numbers["std"]))))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    if len(weights) != 1 or len(normalisations) > 1:
        return None
    return Origin(*weights.pop(), *(normalisations.pop() if normalisations else ()))
