"""A network that returns at once: the logits are the pixels at fixed places."""

import numpy as np

from triton_vision.stages import BatchStage, adapt


class StandIn(BatchStage):
    def setup(self, config):
        # benchmarks/workload.py's PLACES and SCALE; the runner writes them here.
        self.places = np.load(config.version_folder / "places.npy")

    def process(self, pixels):
        return pixels.reshape(len(pixels), -1)[:, self.places] * np.float32(1 / 16)


TritonPythonModel = adapt(StandIn)
