"""As tutorials write it: one request after the other."""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        json.loads(args["model_config"])
        with open(os.path.join(args["model_repository"], "labels.txt"), encoding="utf-8") as file:
            self.labels = np.array([line.rstrip("\n").encode() for line in file], object)

    def execute(self, requests):
        responses = []
        for request in requests:
            logits = pb_utils.get_input_tensor_by_name(request, "LOGITS").as_numpy()
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
            ids = np.argsort(-scores, axis=1)[:, :5]
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("LABELS", self.labels[ids]),
                        pb_utils.Tensor("CLASS_IDS", ids.astype(np.int32)),
                        pb_utils.Tensor("SCORES", np.take_along_axis(scores, ids, axis=1)),
                    ]
                )
            )
        return responses
