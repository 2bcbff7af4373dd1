"""A model's configuration as a stage sees it: typed, validated, with errors that name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from triton_vision.stages.errors import ConfigError

# Triton's data types and numpy's (Triton's model configuration documentation, "Datatypes"); strings are objects.
DTYPES: dict[str, DTypeLike] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
# Parameters of the Python backend itself, and of the suite's server: no stage's business, so no stage's error.
FOREIGN_PARAMETERS = frozenset(
    {
        "EXECUTION_ENV_PATH",
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "PREFERRED_MEMORY",
        "artifacts",
        "instances",
        "largest_batch",
        "patience",
        "queue_size",
    }
)


@dataclass(frozen=True)
class Tensor:
    """An input or output as the configuration declares it.

    Attributes:
        name: its name.
        triton_type: such as ``TYPE_UINT8``.
        dims: without the batch dimension; -1 is any size.
    """

    name: str
    triton_type: str
    dims: tuple[int, ...]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type; strings are objects."""
        return np.dtype(DTYPES[self.triton_type])


class StageConfig:
    """One model's configuration.

    A stage reads each of its ``parameters`` once, in ``setup``, through a typed getter. ``check_all_read`` then
    refuses whatever nobody read: a misspelt parameter must not be ignored in silence.

    Args:
        arguments: what Triton hands to ``initialize``: ``model_config`` (JSON), ``model_repository`` (the model's
            directory), ``model_version`` and ``model_instance_name`` (NAME_GROUP_NUMBER).

    Raises:
        ConfigError: the configuration has no batch dimension, or a type that stages cannot carry.
    """

    def __init__(self, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        self.name: str = config.get("name", "")
        self.max_batch_size = int(config.get("max_batch_size", 0))
        self.folder = Path(arguments.get("model_repository", "."))
        self.version_folder = self.folder / str(arguments.get("model_version", "1"))
        if not (config.get("input") or config.get("output")):
            raise ConfigError("there is no config.pbtxt, or it declares no tensors")
        if self.max_batch_size < 1:
            raise ConfigError("max_batch_size must be at least 1: stages work on batches")
        self.inputs = self._tensors("input", config.get("input", []))
        self.outputs = self._tensors("output", config.get("output", []))
        self.instances = sum(max(1, int(group.get("count", 1))) for group in config.get("instance_group", [])) or 1
        number = arguments.get("model_instance_name", "").rpartition("_")[2]
        self.instance = int(number) if number.isdecimal() else 0
        self._parameters: dict[str, str] = {
            key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()
        }
        self._read: set[str] = set()

    def _tensors(self, field: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        tensors = {}
        for entry in entries:
            for needed in ("name", "data_type", "dims"):
                if not entry.get(needed):
                    raise ConfigError(f"{field} {entry.get('name', '')}: {needed} is missing")
            kind = entry["data_type"]
            if kind not in DTYPES:
                raise ConfigError(f"{field} {entry['name']}: data_type {kind} is not one that a stage can carry")
            tensors[entry["name"]] = Tensor(entry["name"], kind, tuple(int(size) for size in entry["dims"]))
        return tensors

    def require(self, field: str, name: str, kinds: Mapping[str, tuple[int, ...]]) -> Tensor:
        """The declared tensor ``name``, which must have one of ``kinds``: Triton type -> dims (-1: any size).

        Raises:
            ConfigError: it is not declared, or is declared otherwise.
        """
        tensors = self.inputs if field == "input" else self.outputs
        shapes = " or ".join(f"{kind} {list(dims)}" for kind, dims in kinds.items())
        if name not in tensors:
            raise ConfigError(f"{field} {name} ({shapes}) is missing")
        tensor = tensors[name]
        dims = kinds.get(tensor.triton_type)
        if (
            dims is None
            or len(dims) != len(tensor.dims)
            or any(wanted not in (-1, given) for wanted, given in zip(dims, tensor.dims, strict=True))
        ):
            raise ConfigError(f"{field} {name} is {tensor.triton_type} {list(tensor.dims)}, and must be {shapes}")
        return tensor

    # -- parameters ---------------------------------------------------------------------------------------------

    def text(self, key: str, default: str) -> str:
        """The parameter as it stands, stripped."""
        self._read.add(key)
        return self._parameters.get(key, default).strip()

    def integer(self, key: str, default: int, *, minimum: int = 1, maximum: int | None = None) -> int:
        """A whole number from ``minimum`` to ``maximum``, in plain digits."""
        text = self.text(key, str(default))
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            self._wrong(key, text, "a whole number")
        value = int(text)
        if value < minimum:
            self._wrong(key, text, f"at least {minimum}")
        if maximum is not None and value > maximum:
            self._wrong(key, text, f"at most {maximum}")
        return value

    def number(self, key: str, default: float, *, minimum: float = -np.inf) -> float:
        """A finite number of at least ``minimum``."""
        return self._number(key, self.text(key, str(default)), minimum)

    def numbers(self, key: str, default: Sequence[float], count: int) -> tuple[float, ...]:
        """``count`` finite numbers, separated by commas."""
        text = self.text(key, ", ".join(map(str, default)))
        parts = text.split(",")
        if len(parts) != count:
            self._wrong(key, text, f"{count} numbers separated by commas")
        return tuple(self._number(key, part, -np.inf) for part in parts)

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """One of ``choices``."""
        text = self.text(key, default)
        if text not in choices:
            self._wrong(key, text, "one of " + ", ".join(choices))
        return text

    def words(self, key: str, default: Sequence[str], choices: Sequence[str]) -> tuple[str, ...]:
        """One or more of ``choices``, separated by commas, upper or lower case."""
        text = self.text(key, ", ".join(default))
        known = {choice.lower(): choice for choice in choices}
        parts = [part.strip().lower() for part in text.split(",") if part.strip()]
        if not parts or any(part not in known for part in parts):
            self._wrong(key, text, "some of " + ", ".join(choices))
        return tuple(known[part] for part in parts)

    def artifact(self, default: str) -> Path:
        """The first file that the parameter ``artifacts`` names, in the version directory."""
        name = self.text("artifacts", default).split(",")[0].strip()
        path = self.version_folder / name
        if not path.is_file():
            raise ConfigError(f"parameters artifacts: {self.version_folder.name}/{name} is not there")
        return path

    def check_all_read(self) -> None:
        """Raises ConfigError for a parameter that the stage does not have."""
        unknown = sorted(set(self._parameters) - self._read - FOREIGN_PARAMETERS)
        if unknown:
            known = ", ".join(sorted(self._read)) or "none"
            raise ConfigError(f"parameters {unknown[0]}: there is no such parameter; this stage has: {known}")

    def _number(self, key: str, text: str, minimum: float) -> float:
        try:
            value = float(text)
        except ValueError:
            self._wrong(key, text, "a number")
        if not np.isfinite(value) or value < minimum:
            self._wrong(key, text, f"a finite number of at least {minimum}" if minimum > -np.inf else "a finite number")
        return value

    def _wrong(self, key: str, text: str, wanted: str) -> NoReturn:
        raise ConfigError(f"parameters {key}: {text!r} is not {wanted}")
