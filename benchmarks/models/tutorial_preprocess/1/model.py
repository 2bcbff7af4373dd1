"""As tutorials write it: one request after the other, Pillow, the whole image resized, FP32 tensors."""

import io
import json

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "PIXELS")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            pixels = np.stack([self.one(row[0]) for row in files]).astype(self.dtype)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels)]))
        return responses

    def one(self, data):
        image = Image.open(io.BytesIO(data)).convert("RGB")
        width, height = image.size
        short = 256
        size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
        image = image.resize(size, Image.BILINEAR)
        left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
        pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
        return ((pixels - MEAN) / STD).transpose(2, 0, 1)
