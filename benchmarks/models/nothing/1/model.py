"""A preprocess that does nothing but answer: what the server itself costs."""

import numpy as np

from triton_vision.stages import BatchStage, adapt


class Nothing(BatchStage):
    def process(self, images):
        return np.zeros((len(images), 224, 224, 3), np.uint8)


TritonPythonModel = adapt(Nothing)
