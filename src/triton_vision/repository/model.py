"""One model directory: its configuration, its versions and the artifacts that it needs."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from triton_vision.probe import takes_a_photo

# A backend's default file in a version directory (Triton's documentation of each backend). Backends that are not
# here bring their own convention, or need no file at all: nothing is demanded of them.
DEFAULT_ARTIFACT = {
    "dali": "model.dali",
    "onnxruntime": "model.onnx",
    "openvino": "model.xml",
    "python": "model.py",
    "pytorch": "model.pt",
    "tensorrt": "model.plan",
}
# The older `platform` field, where it says which backend (Triton's model configuration documentation).
PLATFORM_BACKEND = {
    "ensemble": "ensemble",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "tensorrt_plan": "tensorrt",
}
# protobuf's words where a text names a field that the message has not.
UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')


class RepositoryError(Exception):
    """A repository cannot be served at all; its text is one plain sentence."""


@dataclass(frozen=True)
class Model:
    """A model directory as one variant sees it.

    Attributes:
        path: the directory; its name is the model's name.
        config: the parsed configuration (``inference.ModelConfig``), None where there is none to read.
        config_file: the file it was read from, relative to ``path``; empty without one.
        problem: why the configuration cannot be read; empty if it can.
        beside: a directory that may hold further artifacts, as ``VERSION/FILE``; None without one.
    """

    path: Path
    config: Any
    config_file: str
    problem: str = ""
    beside: Path | None = None

    @property
    def name(self) -> str:
        """The directory's name, by which Triton knows the model."""
        return self.path.name

    @property
    def is_ensemble(self) -> bool:
        """Whether it is a chain of other models."""
        return self.config is not None and (
            self.config.platform == "ensemble" or bool(self.config.ensemble_scheduling.step)
        )

    @property
    def backend(self) -> str:
        """The backend's name, read from the configuration or else from the files; empty if neither says."""
        if self.is_ensemble:
            return "ensemble"
        if self.config is not None:
            named: str = self.config.backend or PLATFORM_BACKEND.get(self.config.platform, "")
            if named:
                return named
        for backend, artifact in DEFAULT_ARTIFACT.items():
            if any((version / artifact).exists() for version in self.version_folders()):
                return backend
        return ""

    def version_folders(self) -> list[Path]:
        """The numbered directories, lowest first."""
        try:
            folders = [entry for entry in self.path.iterdir() if entry.name.isdecimal() and entry.is_dir()]
        except OSError:  # as ``read_model`` has noted
            return []
        return sorted((folder for folder in folders if int(folder.name) > 0), key=lambda folder: int(folder.name))

    def folders(self) -> list[str]:
        """The names of all directories in it."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_dir())

    def served_versions(self) -> list[Path]:
        """The version directories that the version policy loads; by default the highest."""
        folders = self.version_folders()
        if self.config is not None:
            policy = self.config.version_policy
            which = policy.WhichOneof("policy_choice")
            if which == "all":
                return folders
            if which == "specific":
                wanted = set(policy.specific.versions)
                return [folder for folder in folders if int(folder.name) in wanted]
            if which == "latest" and policy.latest.num_versions > 1:
                return folders[-policy.latest.num_versions :]
        return folders[-1:]

    def steps(self) -> list[str]:
        """The names of the models that an ensemble chains; empty for any other model."""
        return [step.model_name for step in self.config.ensemble_scheduling.step] if self.is_ensemble else []

    def extra_artifacts(self) -> list[str]:
        """The files that a Python model names in its parameter ``artifacts``, beside its ``model.py``."""
        if self.backend != "python" or self.config is None or "artifacts" not in self.config.parameters:
            return []
        listed = self.config.parameters["artifacts"].string_value
        return [name for name in (part.strip() for part in listed.split(",")) if name]

    def wanted_artifacts(self) -> list[str]:
        """The names of the files that a version of this model needs: what its backend loads, and the further ones."""
        if self.is_ensemble:
            return []
        default = DEFAULT_ARTIFACT.get(self.backend, "")
        if self.config is not None:
            default = self.config.default_model_filename or default
        return [default, *self.extra_artifacts()] if default else self.extra_artifacts()

    def artifact(self, version: Path, name: str) -> Path:
        """Where a version's file is, or would be: in the repository, or else in the directory ``beside`` it."""
        here = version / name
        if self.beside is not None and not here.exists():
            there = self.beside / version.name / name
            if there.exists():
                return there
        return here

    def missing_artifacts(self) -> list[str]:
        """The files, relative to the model directory, without which this model would not load."""
        wanted = self.wanted_artifacts()
        versions = self.served_versions()
        if not versions:
            return [f"1/{name}" for name in wanted]
        return [
            f"{folder.name}/{name}"
            for folder in versions
            for name in wanted
            if not self._is_there(self.artifact(folder, name))
        ]

    def _is_there(self, artifact: Path) -> bool:
        # Some backends take a directory with the graph and its weights; these do not.
        return artifact.is_file() if self.backend in ("python", "pytorch", "tensorrt") else artifact.exists()

    def is_image_ensemble(self) -> bool:
        """Whether it takes one encoded file as ``IMAGE`` and has a ``STATUS`` for it, as the suite's ensembles do."""
        return self.is_ensemble and takes_a_photo(
            "ensemble",
            self.config.max_batch_size,
            [(one.name, model_config_pb2.DataType.Name(one.data_type), one.dims) for one in self.config.input],
            {one.name for one in self.config.output},
        )


def variants(path: Path) -> list[str]:
    """The names of the variants that a model directory has."""
    return sorted(file.stem for file in path.glob("configs/*.pbtxt"))


def read_model(path: Path, config_name: str | None, artifacts: Path | None = None) -> Model:
    """Reads a model directory as Triton does under ``--model-config-name=config_name``.

    ``artifacts`` may name a directory that holds further artifacts, as ``MODEL/VERSION/FILE``.

    A configuration that cannot be read is noted in ``problem``, not raised: one bad model is no reason to refuse
    the others.
    """
    beside = artifacts / path.name if artifacts is not None else None
    file = f"configs/{config_name}.pbtxt" if config_name else "config.pbtxt"
    try:
        next(path.iterdir(), None)
    except OSError as error:
        return Model(path, None, "", problem=f"cannot be read: {error.strerror}", beside=beside)
    if not (path / file).is_file():
        file = "config.pbtxt"
    if not (path / file).is_file():
        return Model(path, None, "", beside=beside)
    try:
        config = _parse((path / file).read_text(encoding="utf-8"))
    except (text_format.ParseError, UnicodeDecodeError, OSError) as error:
        return Model(path, None, file, problem=f"{file} cannot be read: {error}", beside=beside)
    return Model(path, config, file, beside=beside)


def _parse(text: str) -> Any:
    """A configuration.

    Raises:
        ParseError: it is none, or holds a field whose name looks like a slip.
    """
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        unknown = UNKNOWN_FIELD.search(str(error))
        if unknown is None:
            raise
        fields = model_config_pb2.DESCRIPTOR.pool.FindMessageTypeByName(unknown[1]).fields_by_name
        meant = difflib.get_close_matches(unknown[2], fields, 1, cutoff=0.75)
        if meant:
            where = f"line {error.GetLine()}: " if error.GetLine() else ""
            raise text_format.ParseError(f"{where}there is no {unknown[2]}; did you mean {meant[0]}?") from None
    # A newer server may know fields that this client's schema does not: Triton itself judges those.
    return text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)
