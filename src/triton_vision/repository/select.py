"""Choosing the variant, and what of a repository can be served with it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from triton_vision.repository.model import Model, RepositoryError, read_model

EMBEDDED = "embedded"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Selection:
    """What will be served.

    Attributes:
        config_name: the variant, None for every model's ``config.pbtxt``.
        served: the models, by name.
        left_out: model name -> why.
        meaningless: the models whose weights are random, so that their answers mean nothing.
        unvouched: the models with artifacts of which no valid sidecar says where their weights come from.
    """

    config_name: str | None
    served: dict[str, Model]
    left_out: dict[str, str] = field(default_factory=dict)
    meaningless: tuple[str, ...] = ()
    unvouched: tuple[str, ...] = ()

    def image_ensembles(self) -> list[str]:
        """The names of the served ensembles that take an image and answer labels."""
        return [name for name, model in self.served.items() if model.is_image_ensemble()]

    def ensembles_over(self, member: str) -> list[str]:
        """The served ensembles that chain ``member``."""
        return [name for name, model in self.served.items() if member in model.steps()]


def select(repository: Path, config_name: str | None, *, backends: frozenset[str], gpu: bool) -> Selection:
    """Reads a repository and decides what can be served.

    Left out are: models whose backend the server does not have, models without their artifacts, and ensembles with
    any member left out.

    Args:
        repository: the directory of model directories.
        config_name: the variant; None picks one: ``embedded`` unless the server has TensorRT and the machine a GPU.
        backends: the server's backends.
        gpu: whether the machine has a GPU.

    Raises:
        RepositoryError: there is no such directory, nothing in it is a model, no model has the named variant, or
            nothing is left to serve.
    """
    if not repository.is_dir():
        raise RepositoryError(f"there is no model repository at {repository}: name one with --repository")
    folders = sorted(
        entry for entry in repository.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__"))
    )
    if not folders:
        raise RepositoryError(f"{repository} holds no model directories")
    if config_name:
        if not any((folder / "configs" / f"{config_name}.pbtxt").is_file() for folder in folders):
            known = sorted({file.stem for folder in folders for file in folder.glob("configs/*.pbtxt")})
            raise RepositoryError(
                f"no model in {repository} has a configs/{config_name}.pbtxt; "
                + (f"there are: {', '.join(known)}" if known else "none has any variant")
            )
    elif not (gpu and "tensorrt" in backends):
        config_name = EMBEDDED

    models = {folder.name: read_model(folder, config_name) for folder in folders}
    left_out: dict[str, str] = {}
    for model in models.values():
        reason = _reason_to_leave_out(model, backends)
        if reason:
            left_out[model.name] = reason
    _leave_out_ensembles(models, left_out)
    served = {name: model for name, model in models.items() if name not in left_out}
    if not served:
        reasons = "; ".join(f"{name} {why}" for name, why in left_out.items())
        raise RepositoryError(f"nothing in {repository} can be served: {reasons}")
    origins = {name: origin for name, model in served.items() if (origin := _weights(model))}
    return Selection(
        config_name,
        served,
        left_out,
        meaningless=tuple(name for name, origin in origins.items() if origin == "random"),
        unvouched=tuple(name for name, origin in origins.items() if origin == UNKNOWN),
    )


def _reason_to_leave_out(model: Model, backends: frozenset[str]) -> str:
    if model.problem:
        return model.problem
    backend = model.backend
    if not backend and model.config is None and not model.version_folders():
        return "is no model: it has neither a config.pbtxt nor a version directory"
    if backend not in ("ensemble", "", *backends):
        return f"needs the backend {backend!r}, which this server does not have"
    missing = model.missing_artifacts()
    return f"has no {' and no '.join(missing)}" if missing else ""


def _leave_out_ensembles(models: dict[str, Model], left_out: dict[str, str]) -> None:
    """Adds the ensembles with a missing member, and those over them, until nothing more falls."""
    changed = True
    while changed:
        changed = False
        for model in models.values():
            if model.name in left_out:
                continue
            gone = [step for step in model.steps() if step in left_out or step not in models]
            if gone:
                absent = [step for step in gone if step not in models]
                left_out[model.name] = (
                    f"chains {absent[0]}, which is not in the repository"
                    if absent
                    else f"chains {gone[0]}, which is left out"
                )
                changed = True


def _weights(model: Model) -> str:
    """The kind of weights that its artifacts' sidecars state; UNKNOWN without a valid one; empty without artifacts.

    A sidecar is valid for the very artifact whose SHA-256 it holds: one that was left behind, by a copy or a kill,
    must not vouch for another artifact.
    """
    kinds = {_stated(folder / name) for folder in model.served_versions() for name in model.extra_artifacts()}
    return next((kind for kind in ("random", UNKNOWN) if kind in kinds), next(iter(kinds), ""))


def _stated(artifact: Path) -> str:
    try:
        sidecar = json.loads(artifact.with_name(f"{artifact.name}.json").read_text(encoding="utf-8"))
        with artifact.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return str(sidecar["weights"]) if sidecar["sha256"] == digest.hexdigest() else UNKNOWN
    except (OSError, ValueError, KeyError, TypeError):
        return UNKNOWN
