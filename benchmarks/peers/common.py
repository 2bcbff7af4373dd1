"""What the HTTP peers do with one image: the same work as the suite, written as one would without Triton.

simplejpeg decodes and Pillow resizes the part that the crop shows: the fastest way with stock packages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workload import CROP, answer, box, stand_in


def classify(data: bytes) -> dict[str, Any]:
    """One file to labels, class ids and scores."""
    image = Image.fromarray(simplejpeg.decode_jpeg(data))
    pixels = np.asarray(image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box(*image.size)))
    labels, ids, scores = answer(stand_in(pixels[np.newaxis])[0])
    return {"labels": labels, "class_ids": ids, "scores": scores}
