"""Choosing the variant, and what of a repository can be served with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path

from triton_vision.repository import sidecar, variant
from triton_vision.repository.model import Model, RepositoryError, read_model, variants


@dataclass(frozen=True)
class Selection:
    """What will be served.

    Attributes:
        config_name: the variant, None for every model's ``config.pbtxt``.
        served: the models, by name.
        left_out: model name -> why.
        meaningless: the models whose weights are random, so that their answers mean nothing.
        unvouched: the models with artifacts of which no valid sidecar says where their weights come from.
        pipelines: what callers ask, served or not: the ensembles that no other chains, or without any all models.
        doubts: a sentence for each variant that was passed over for what is wrong with its artifact, and for each model
            whose artifacts were made from different weights.
        broken: the models of ``left_out`` that only the server found to be unusable.
    """

    config_name: str | None
    served: dict[str, Model]
    left_out: dict[str, str] = field(default_factory=dict)
    meaningless: tuple[str, ...] = ()
    unvouched: tuple[str, ...] = ()
    pipelines: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    broken: frozenset[str] = frozenset()

    def served_pipelines(self) -> list[str]:
        """The names of the pipelines that are served."""
        return [name for name in self.pipelines if name in self.served]

    def without(self, broken: Mapping[str, str]) -> Selection:
        """The same without those models and what chains them.

        Args:
            broken: model name -> why it cannot be served.
        """
        gone = dict(broken)
        _leave_out_ensembles(self.served, gone)
        served = {name: model for name, model in self.served.items() if name not in gone}
        return replace(self, served=served, left_out={**self.left_out, **gone}, broken=self.broken | broken.keys())

    def causes(self, broken: Mapping[str, str]) -> dict[str, str]:
        """Of models that do not load, those that fail for themselves, and not only for one that they chain."""
        own = {
            name: why
            for name, why in broken.items()
            if name not in self.served or not any(step in broken for step in self.served[name].steps())
        }
        return own or dict(broken)

    def image_ensembles(self) -> list[str]:
        """The names of the served ensembles that take one encoded image."""
        return [name for name, model in self.served.items() if model.is_image_ensemble()]

    def ensembles_over(self, member: str) -> list[str]:
        """The served ensembles that chain ``member``."""
        return [name for name, model in self.served.items() if member in model.steps()]


def select(
    repository: Path,
    config_name: str | None,
    *,
    backends: frozenset[str],
    gpu: bool,
    artifacts: Path | None = None,
    refused: Mapping[str, str] | None = None,
) -> Selection:
    """Reads a repository and decides what can be served.

    Left out are: models whose backend the server does not have, models without their artifacts or with artifacts that
    are not what their sidecars say or not what the configuration declares, and ensembles with any member left out.

    Args:
        repository: the directory of model directories.
        config_name: the variant; None picks one for this server and machine (``variant.pick``).
        backends: the server's backends.
        gpu: whether the machine has a GPU.
        artifacts: a directory with further artifacts, as MODEL/VERSION/FILE.
        refused: models with a TensorRT plan that must not be used -> why.

    Raises:
        RepositoryError: there is no such directory, nothing in it is a model, no model has the named variant, or
            nothing is left to serve.
    """
    if not repository.is_dir():
        raise RepositoryError(f"there is no model repository at {repository}: name one with --repository")
    try:
        entries = list(repository.iterdir())
    except OSError as error:
        raise RepositoryError(
            f"{repository} cannot be read ({error.strerror}): who serves it must be able to"
        ) from None
    folders = sorted(entry for entry in entries if entry.is_dir() and not entry.name.startswith((".", "__")))
    if not folders:
        raise RepositoryError(f"{repository} holds no model directories")
    if config_name and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", config_name):
        raise RepositoryError(
            f"{config_name!r} is not a variant's name: it names configs/NAME.pbtxt in a model's directory"
        )
    known = sorted({name for folder in folders for name in variants(folder)})
    if config_name and config_name not in known:
        raise RepositoryError(
            f"no model in {repository} has a configs/{config_name}.pbtxt; "
            + (f"there are: {', '.join(known)}" if known else "none has any variant")
        )

    def read(name: str | None) -> dict[str, Model]:
        return {folder.name: read_model(folder, name, artifacts) for folder in folders}

    def reason(model: Model) -> str:
        if model.backend == "tensorrt" and refused and model.name in refused:
            return refused[model.name]
        return _reason_to_leave_out(model, backends)

    doubts: list[str] = []
    if not config_name:

        @cache
        def own(name: str | None) -> tuple[Model, ...]:
            return tuple(model for model in read(name).values() if variant.is_own(model, name))

        @cache
        def faults(name: str | None) -> dict[str, str]:
            return {model.name: why for model in own(name) if (why := reason(model))}

        def is_usable(name: str | None) -> bool:
            return bool(own(name)) and not faults(name)

        config_name = variant.pick(is_usable, gpu=gpu, tensorrt="tensorrt" in backends)
        passed: dict[tuple[str, str], list[str]] = {}
        for name in takewhile(lambda name: not is_usable(name), variant.ranked(gpu=gpu)):
            # What this server has no backend for, and what is not there, was never to be had.
            there = all(model.backend in backends and not model.missing_artifacts() for model in own(name))
            if there and name != config_name:
                for fault in faults(name).items():
                    passed.setdefault(fault, []).append(name or "config.pbtxt")
        doubts += [f"{model}: passed over {' and '.join(names)}: {why}" for (model, why), names in passed.items()]
        if config_name not in known:
            config_name = None
    models = read(config_name)
    left_out = {model.name: why for model in models.values() if (why := reason(model))}
    _leave_out_ensembles(models, left_out)
    served = {name: model for name, model in models.items() if name not in left_out}
    if not served:
        reasons = "; ".join(f"{name} {why}" for name, why in left_out.items())
        raise RepositoryError(f"nothing in {repository} can be served: {reasons}")
    doubts += [f"{name}: {why}" for name, model in served.items() if (why := sidecar.disagreement(model))]
    origins = {name: origin for name, model in served.items() if (origin := sidecar.weights(model))}
    return Selection(
        config_name,
        served,
        left_out,
        meaningless=tuple(name for name, origin in origins.items() if origin == "random"),
        unvouched=tuple(name for name, origin in origins.items() if origin == sidecar.UNKNOWN),
        pipelines=_pipelines(models),
        doubts=tuple(doubts),
    )


def _pipelines(models: Mapping[str, Model]) -> tuple[str, ...]:
    chained = {step for model in models.values() for step in model.steps()}
    ensembles = tuple(name for name, model in models.items() if model.is_ensemble and name not in chained)
    return ensembles or tuple(models)


def _reason_to_leave_out(model: Model, backends: frozenset[str]) -> str:
    try:
        return _reason(model, backends)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"


def _reason(model: Model, backends: frozenset[str]) -> str:
    if model.problem:
        return model.problem
    backend = model.backend
    if not backend and model.config is None and not model.version_folders():
        return "is not a model: it has neither a config.pbtxt nor a version directory"
    if not backend and model.config is None:
        return "is not a model: it has no config.pbtxt and no file whose name Triton recognizes"
    if backend not in ("ensemble", "", *backends):
        return f"needs the backend {backend!r}, which this server does not have"
    if model.config is not None and model.config.name not in ("", model.name):
        return f"is called {model.config.name!r} by its {model.config_file}: rename one of the two"
    if not model.is_ensemble and not model.version_folders():
        for name in model.folders():
            like = re.fullmatch(r"[vV]\.?([1-9][0-9]*)", name)
            if like:
                return f"has no version directory: {name} must be a plain number, {like[1]}"
    missing = model.missing_artifacts()
    return f"has no {' and no '.join(missing)}" if missing else sidecar.problem(model)


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
