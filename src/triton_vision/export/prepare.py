"""``prepare``: makes the artifacts of the repository's networks, and says from which weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vision.export import artifact
from triton_vision.export.fork import check_target, declared_classes, fork, read_labels
from triton_vision.export.networks import GRAPH, INPUT, NETWORKS, OUTPUT, SCRIPT, SIDE, Network, PrepareError
from triton_vision.export.weights import IMAGENET1K_V1, WeightsError, sha256
from triton_vision.labels import duplicates

if TYPE_CHECKING:
    from triton_vision.export.check import Difference
    from triton_vision.export.source import Normalisation, Source

# Raised whenever an artifact or its sidecar changes for the same weights and tools.
EXPORTER = 2
PRECISIONS = ("fp32", "fp16", "int8")
# The environment variable that names the Python to export with.
PYTHON = "TRITON_VISION_EXPORT_PYTHON"
DONE, SOME_FAILED, NOTHING_DONE = 0, 1, 2


@dataclass(frozen=True)
class Options:
    """What ``prepare`` is asked for.

    Attributes:
        weights: a state dict, TorchScript or ONNX file's path, ``random``, or None for each network's own.
        precision: of the ONNX graph, and so of a TensorRT plan made from it.
        calibration: a ``.npy`` file of UINT8 pixels ``[N, 224, 224, 3]``; INT8 needs it.
        labels: a file with a label on each line, for ``into``.
        into: a directory for a repository of its own, for a network with other classes.
        mean, std: on [0, 1], instead of the network's own; empty for those.
        force: make artifacts that are up to date, too.
    """

    weights: str | None = None
    precision: str = "fp32"
    calibration: Path | None = None
    labels: Path | None = None
    into: Path | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    force: bool = False


def prepare(repository: Path, names: Sequence[str], options: Options | None = None) -> int:
    """Makes each model's artifacts in its directory ``1``; prints a line for each.

    Args:
        repository: the model repository.
        names: the models; none means every network that the repository has a directory for.
        options: what is asked for; weights and all that goes with them concern only networks that take weights.

    Returns:
        0 all are there, 1 some are missing, 2 none is there.
    """
    options = options or Options()
    unknown = [name for name in names if name not in NETWORKS]
    if unknown:
        return _complain(f"there is nothing to prepare for {unknown[0]!r}; there is for: {', '.join(NETWORKS)}")
    chosen = [NETWORKS[name] for name in dict.fromkeys(names)] or list(NETWORKS.values())
    chosen = [network for network in chosen if (repository / network.name).is_dir()]
    if options.into is not None and not names:
        chosen = [network for network in chosen if network.takes_weights]
    if not chosen:
        return _complain(
            f"{repository} has no directory for {' or '.join(names or NETWORKS)}; name one with --repository"
        )
    if (options.weights or options.into) and not any(network.takes_weights for network in chosen):
        return _complain(f"--weights is for resnet50_trt, and only {', '.join(n.name for n in chosen)} was asked for")
    if options.into is not None and (len(chosen) != 1 or not options.weights or options.labels is None):
        return _complain("--into makes a repository for one network: name its --weights FILE and its --labels FILE")
    if options.labels is not None and options.into is None:
        return _complain("--labels belongs to a repository of its own: name a directory for it with --into DIR")
    if options.precision == "int8" and options.calibration is None:
        return _complain("int8 needs images to calibrate on: name a folder of some 100 with --calibration FOLDER")
    plain = Options(precision=options.precision, calibration=options.calibration, force=options.force)
    done = [_attempt(repository, network, options if network.takes_weights else plain) for network in chosen]
    return DONE if all(done) else SOME_FAILED if any(done) else NOTHING_DONE


def _attempt(repository: Path, network: Network, options: Options) -> bool:
    folder = (options.into or repository) / network.name / "1"
    try:
        with artifact.lock(options.into or repository):
            _make(repository, network, options)
    except Exception as error:  # noqa: BLE001 - one model's failure must not cost the others
        known = isinstance(error, (PrepareError, WeightsError))
        why = str(error) if known else f"{type(error).__name__}: {error}".strip().split("\n")[0]
        if isinstance(error, ModuleNotFoundError):
            why = f"{sys.executable} has no {error.name}: run 'make setup', or name a Python that has it in {PYTHON}"
        print(f"{network.name}: not made: {why}", flush=True)
        for name in network.artifacts:
            present = artifact.read(folder / name)
            if present:
                print(f"{network.name}: the {name} that is there stays, from {present['weights_source']}", flush=True)
        return False
    return True


def _make(repository: Path, network: Network, options: Options) -> None:
    if options.into is not None:
        check_target(repository, network.name, options.into)
    folder = (options.into or repository) / network.name / "1"
    present = {name: artifact.read(folder / name) for name in network.artifacts}
    for name in present:
        artifact.remove_stale(folder / name)
    if options.weights is None and not options.force and _stays(network, options, folder, present):
        return

    from triton_vision.export import graph
    from triton_vision.export.source import Normalisation, open_source

    normalisation = Normalisation(
        tuple(255 * value for value in options.mean) or network.mean, tuple(255 * v for v in options.std) or network.std
    )
    source = open_source(network, options.weights, normalisation)
    labels = _check_fit(repository, network, options, source)
    if source.note:
        print(f"{network.name}: note: {source.note}", flush=True)
    tools = {"exporter": EXPORTER, **graph.versions()}
    # All are made before anything in the repository changes.
    made: dict[str, tuple[bytes, dict[str, Any]]] = {}
    for name in network.artifacts:
        wanted = _identity(name, source, normalisation, options, tools)
        if not options.force and present[name] and {key: present[name].get(key) for key in wanted} == wanted:
            _keep(network, name, present[name])
        elif name != SCRIPT or source.module is not None:
            print(f"{network.name}: exporting {name} from {source.origin.source} …", flush=True)
            content, found = _export(name, source, options)
            description = {"sha256": hashlib.sha256(content).hexdigest(), **wanted, "tensors": _tensors(source.classes)}
            if found is not None:
                description["max_abs_logit_difference"] = found.largest
                description["label_agreement"] = f"{found.agreeing} of {found.images}"
                description["compared"] = str(found)
            made[name] = content, description
    if options.into is not None:
        fork(repository, network.name, options.into, source.classes, labels, list(made))
    folder.mkdir(parents=True, exist_ok=True)
    if source.module is None and (folder / SCRIPT).exists():
        # What was made of other weights would answer otherwise than the graph beside it.
        (folder / SCRIPT).unlink()
        (folder / (SCRIPT + artifact.SIDECAR)).unlink(missing_ok=True)
        print(f"{network.name}: removed {SCRIPT}, which is of other weights; an ONNX file makes none", flush=True)
    for name, (content, description) in made.items():
        compared = description.pop("compared", "")
        artifact.write(folder / name, content, description)
        print(
            f"{network.name}: made {folder.name}/{name} ({len(content) / 1e6:.1f} MB, {description['precision']}) from "
            f"{source.origin.source}" + (f"; {compared}" if compared else ""),
            flush=True,
        )


def _stays(network: Network, options: Options, folder: Path, present: dict[str, dict[str, Any]]) -> bool:
    """Whether, nobody having named weights, what is there is kept without looking for the network's own.

    Raises:
        PrepareError: what is there is somebody's own, which published weights must not replace, and needs making anew.
    """
    for name in network.artifacts if network.takes_weights else ():
        path, claimed = folder / name, artifact.claimed(folder / name)
        if path.exists() and not claimed:
            raise PrepareError(
                f"{name} is there without a sidecar, so it is somebody's own: --weights says what to make instead of it"
            )
        if claimed.get("weights") == "file" and not present[name]:
            raise PrepareError(f"{name} of {claimed.get('weights_source')} is damaged: name that again with --weights")
    graph = present[GRAPH]
    if graph.get("weights") == "file":
        source = graph["weights_source"]
        same = options.precision == graph.get("precision", "fp32")
        if not same or options.calibration or options.mean or options.std:
            raise PrepareError(f"{GRAPH} is of {source}: name that again with --weights to make it otherwise")
        for name, stated in present.items():
            if not stated and graph.get("source") != "onnx":
                raise PrepareError(f"there is no {name} beside {GRAPH} of {source}: name that again with --weights")
            if stated and stated["weights_sha256"] != graph["weights_sha256"]:
                raise PrepareError(
                    f"{name} is of {stated['weights_source']} and {GRAPH} of {source}, so the variants answer "
                    "differently: name one of them with --weights"
                )
        for name, stated in present.items():
            if stated:
                _keep(network, name, stated)
        return True
    # The published weights' digest is known without the download.
    current = [_is_published(stated, options) for stated in present.values()]
    if not all(current):
        return False
    for name, stated in present.items():
        _keep(network, name, stated)
    return True


def _is_published(stated: dict[str, Any], options: Options) -> bool:
    from triton_vision.export import graph

    precision = "fp32" if stated.get("artifact") == SCRIPT else options.precision
    return (
        stated.get("weights_sha256") == IMAGENET1K_V1.sha256
        and stated["tools"] == {"exporter": EXPORTER, **graph.versions()}
        and stated.get("precision") == precision
        and stated.get("calibration_sha256") == _calibration(precision, options)
        and not (options.mean or options.std)
    )


def _check_fit(repository: Path, network: Network, options: Options, source: Source) -> list[str]:
    """Sees to it that network and repository fit together; the labels of a repository of its own.

    Raises:
        PrepareError: they do not.
    """
    if options.into is not None:
        assert options.labels is not None
        labels = read_labels(options.labels, source.classes)
        for label, ids in duplicates(labels).items():
            print(f"warning: {options.labels}: {label!r} stands for the classes {', '.join(map(str, ids))}", flush=True)
        return labels
    file = repository / network.name / "config.pbtxt"
    declared = declared_classes(file.parent) if file.is_file() else network.classes
    if source.classes != declared:
        raise PrepareError(
            f"{source.origin.source} has {source.classes} classes, and {network.name}/config.pbtxt declares "
            f"{declared}; make a repository for it with --labels FILE --into DIR"
        )
    return []


def _identity(
    name: str, source: Source, normalisation: Normalisation, options: Options, tools: dict[str, Any]
) -> dict[str, Any]:
    """What an artifact's sidecar says of how it was made; if all of it is the same, it need not be made again."""
    precision = "fp32" if name == SCRIPT else options.precision
    return {
        "weights": source.origin.kind,
        "weights_source": source.origin.source,
        "weights_sha256": source.origin.sha256,
        "source": "onnx" if source.module is None else "module",
        "precision": precision,
        "calibration_sha256": _calibration(precision, options),
        "normalisation": {key: list(value) for key, value in asdict(normalisation).items()},
        "tools": tools,
    }


def _calibration(precision: str, options: Options) -> str:
    return sha256(options.calibration) if precision == "int8" and options.calibration is not None else ""


def _export(name: str, source: Source, options: Options) -> tuple[bytes, Difference | None]:
    """An artifact's bytes, and how they differ from the module; None for an ONNX file that stays as it is."""
    from triton_vision.export import check, graph, script

    if name == SCRIPT:
        assert source.module is not None
        module = source.module(False)
        content = script.export(module)
        return content, check.compare(check.run_module(module), check.run_script(content), check.samples())
    images = _pixels(options)
    if source.module is None:
        content = source.graph
        graph.check_structure(content)
        if options.precision == "fp32":
            return content, None
        if options.precision == "fp16":
            raise PrepareError("an ONNX file's precision is its own; FP16 needs a state dict")
        expected = check.run_graph(content)
    else:
        module = source.module(False)
        expected = check.run_module(module)
        content = graph.export(source.module(True) if options.precision == "fp16" else module)
    if options.precision == "int8":
        from triton_vision.export.quantize import quantize

        content = quantize(content, images)
        graph.check_structure(content)
    return content, check.compare(expected, check.run_graph(content), check.samples(images), options.precision)


def _pixels(options: Options) -> Any:
    """The calibration's pixels; None without any.

    Raises:
        PrepareError: they are not UINT8 pixels.
    """
    if options.calibration is None:
        return None
    import numpy as np

    pixels = np.load(options.calibration, allow_pickle=False)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (SIDE, SIDE, 3) or not len(pixels):
        raise PrepareError(f"{options.calibration.name} holds no UINT8 pixels [N, {SIDE}, {SIDE}, 3]")
    return pixels


def _tensors(classes: int) -> dict[str, Any]:
    return {
        "input": [{"name": INPUT, "datatype": "UINT8", "dims": [SIDE, SIDE, 3]}],
        "output": [{"name": OUTPUT, "datatype": "FP32", "dims": [classes]}],
    }


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return NOTHING_DONE


def _keep(network: Network, name: str, present: dict[str, Any]) -> None:
    print(f"{network.name}: {name} is up to date, from {present['weights_source']}", flush=True)
