"""ResNet-50, with the parameter names of torchvision's checkpoints.

The architecture is that of He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, in the variant
known as v1.5: a bottleneck halves the resolution in its 3x3 convolution rather than in its first 1x1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Blocks and width of each of the four stages (table 1); a bottleneck's output is EXPANSION times as wide.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand, added to a shortcut; ``downsample`` is the shortcut where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU()
        self.downsample: Any = None
        if stride != 1 or channels != wide:
            self.downsample = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Any) -> Any:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet50(nn.Module):
    """FP32 ``[N, 3, 224, 224]``, normalised, to FP32 ``[N, classes]`` logits."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        for number, (blocks, width) in enumerate(STAGES, 1):
            layer = []
            for block in range(blocks):
                stride = 2 if block == 0 and number > 1 else 1
                layer.append(Bottleneck(channels, width, stride))
                channels = width * EXPANSION
            self.add_module(f"layer{number}", nn.Sequential(*layer))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, len(STAGES) + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(x.mean(dim=(2, 3)))


def random_state(classes: int, seed: int) -> dict[str, Any]:
    """A seeded state dict whose activations stay in range, so that engines can be compared on it.

    Convolutions are drawn by He initialisation; the batch norms keep their initial statistics, with the last one of
    each block scaled down so that the sum over the residual blocks does not explode.
    """
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = ResNet50(classes).state_dict()
    for name, tensor in state.items():
        if tensor.ndim >= 2:
            fan_out = tensor.shape[0] * tensor[0, 0].numel() if tensor.ndim == 4 else tensor.shape[1]
            state[name] = torch.randn(tensor.shape, generator=generator) * (2.0 / fan_out) ** 0.5
        elif name.endswith("bn3.weight"):
            state[name] = torch.full_like(tensor, 0.25)
        elif name == "fc.bias":
            state[name] = torch.zeros_like(tensor)
    return state
