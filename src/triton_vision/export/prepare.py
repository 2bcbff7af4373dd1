"""``prepare``: makes the artifacts of the repository's networks, and says from which weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from triton_vision.export import artifact
from triton_vision.export.networks import NETWORKS, Network, PrepareError
from triton_vision.export.weights import IMAGENET1K_V1, WeightsError

# Raised whenever the exported graph changes for the same weights and tools.
EXPORTER = 1
ARTIFACT = "model.onnx"
DONE, SOME_FAILED, NOTHING_DONE = 0, 1, 2


def prepare(repository: Path, names: Sequence[str], weights: str | None, *, force: bool = False) -> int:
    """Makes each model's ``1/model.onnx``; prints a line for each.

    Args:
        repository: the model repository.
        names: the models; none means every network that the repository has a directory for.
        weights: a state dict's path, ``random``, or None for each network's own; only for those that take weights.
        force: make them even where they are up to date.

    Returns:
        0 all are there, 1 some are missing, 2 none is there.
    """
    unknown = [name for name in names if name not in NETWORKS]
    if unknown:
        _complain(f"there is nothing to prepare for {unknown[0]!r}; there is for: {', '.join(NETWORKS)}")
        return NOTHING_DONE
    chosen = [NETWORKS[name] for name in dict.fromkeys(names)] or list(NETWORKS.values())
    chosen = [network for network in chosen if (repository / network.name).is_dir()]
    if not chosen:
        _complain(f"{repository} has no directory for {' or '.join(names or NETWORKS)}; name one with --repository")
        return NOTHING_DONE
    if weights and not any(network.takes_weights for network in chosen):
        _complain(f"--weights is for resnet50_trt, and only {', '.join(n.name for n in chosen)} was asked for")
        return NOTHING_DONE
    done = [_attempt(repository, network, weights if network.takes_weights else None, force) for network in chosen]
    return DONE if all(done) else SOME_FAILED if any(done) else NOTHING_DONE


def _attempt(repository: Path, network: Network, weights: str | None, force: bool) -> bool:
    path = repository / network.name / "1" / ARTIFACT
    try:
        _make(path, network, weights, force)
    except Exception as error:  # noqa: BLE001 - one model's failure must not cost the others
        known = isinstance(error, (PrepareError, WeightsError))
        why = str(error) if known else f"{type(error).__name__}: {error}".strip().split("\n")[0]
        print(f"{network.name}: not made: {why}", flush=True)
        present = artifact.read(path)
        if present:
            print(f"{network.name}: the {ARTIFACT} that is there stays, from {present['weights_source']}", flush=True)
        return False
    return True


def _make(path: Path, network: Network, weights: str | None, force: bool) -> None:
    artifact.remove_stale(path)
    present = {} if force else artifact.read(path)
    if weights is None and present.get("weights") == "file":
        _keep(network, present)  # somebody's own weights are not replaced by published ones unless asked for
        return
    if weights is None and present.get("weights") == IMAGENET1K_V1.kind and _up_to_date(present):
        _keep(network, present)  # whose digest is known without the download
        return
    module, origin = network.build(weights)

    from triton_vision.export import graph

    made_with = {"exporter": EXPORTER, **graph.versions()}
    same = present.get("weights") == origin.kind and present.get("weights_sha256") == origin.sha256
    if same and present.get("tools") == made_with:
        _keep(network, present)
        return
    print(f"{network.name}: exporting from {origin.source} …", flush=True)
    whole = graph.FromPixels(module, network.mean, network.std).eval()
    try:
        content = graph.export(whole)
        difference = graph.compare(whole, content)
    except graph.GraphError as error:
        raise PrepareError(str(error)) from None
    description = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "weights": origin.kind,
        "weights_source": origin.source,
        "weights_sha256": origin.sha256,
        "opset": graph.OPSET,
        "max_abs_logit_difference": difference,
        "tools": made_with,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    artifact.write(path, content, description)
    print(
        f"{network.name}: made {path.parent.name}/{path.name} ({len(content) / 1e6:.1f} MB) from {origin.source}; "
        f"logits differ from PyTorch's by at most {difference:.2g}",
        flush=True,
    )


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def _up_to_date(present: dict[str, object]) -> bool:
    from triton_vision.export import graph

    made_with = {"exporter": EXPORTER, **graph.versions()}
    return present["weights_sha256"] == IMAGENET1K_V1.sha256 and present["tools"] == made_with


def _keep(network: Network, present: dict[str, object]) -> None:
    print(f"{network.name}: {ARTIFACT} is up to date, from {present['weights_source']}", flush=True)
