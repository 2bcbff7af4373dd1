"""From a PyTorch module to TorchScript for LibTorch."""

from __future__ import annotations

import io
import warnings

import torch
from torch import nn

from triton_vision.export.networks import SIDE


def export(module: nn.Module) -> bytes:
    """The module (UINT8 pixels to logits), traced in eval mode and frozen: weights and batch norms become constants.

    Traced, not scripted: the graph holds plain operators alone, which older LibTorch versions know, too.
    """
    buffer = io.BytesIO()
    # Two rows, so that no operator can take the batch for a dimension of one.
    example = torch.zeros(2, SIDE, SIDE, 3, dtype=torch.uint8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the tracer's remarks on constants, and on its own deprecation
        # What somebody brings as TorchScript is a graph already.
        is_graph = isinstance(module, torch.jit.ScriptModule)
        traced = module if is_graph else torch.jit.trace(module.eval(), example, check_trace=False)
        torch.jit.save(torch.jit.freeze(traced), buffer)
    return buffer.getvalue()
