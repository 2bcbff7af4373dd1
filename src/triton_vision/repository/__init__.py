"""Reading a Triton model repository: what is in it, what of it can be served, and a folder of links to just that."""

from triton_vision.repository.compose import compose, fitted
from triton_vision.repository.model import Model, RepositoryError, read_model, variants
from triton_vision.repository.placement import Placement, check_gpus, parse_placement
from triton_vision.repository.scale import Scale, scaled
from triton_vision.repository.select import Selection, select

__all__ = [
    "Model",
    "Placement",
    "RepositoryError",
    "Scale",
    "Selection",
    "check_gpus",
    "compose",
    "fitted",
    "parse_placement",
    "read_model",
    "scaled",
    "select",
    "variants",
]
