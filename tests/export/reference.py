"""The PyTorch module's logits, for tests that run where torch is not: FOLDER/pixels.npy to FOLDER/logits.npy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from triton_vision.export.graph import FromPixels
from triton_vision.export.networks import NETWORKS

folder = Path(sys.argv[1])
network = NETWORKS["resnet50_trt"]
module, _ = network.build("random")
with torch.no_grad():
    logits = FromPixels(module, network.mean, network.std)(torch.from_numpy(np.load(folder / "pixels.npy")))
np.save(folder / "logits.npy", logits.numpy())
