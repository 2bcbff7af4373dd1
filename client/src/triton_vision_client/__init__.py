"""A thin client for image ensembles on NVIDIA Triton: a photo in, labels out, over gRPC.

>>> from triton_vision_client import ImageClient
>>> with ImageClient("localhost:8001") as client:
...     best = client.classify("cat.jpg").predictions[0]
"""

from triton_vision_client._async import AsyncImageClient
from triton_vision_client._errors import (
    AuthenticationError,
    BadImageError,
    DeadlineExceededError,
    ModelNotFoundError,
    RequestTooLargeError,
    ServerError,
    ServerOverloadedError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._images import ImageSource
from triton_vision_client._observe import Observer, PrometheusObserver
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._results import ModelInfo, Prediction, Result, ServerInfo
from triton_vision_client._sync import ImageClient

__all__ = [
    "AsyncImageClient",
    "AuthenticationError",
    "BadImageError",
    "DeadlineExceededError",
    "ImageClient",
    "ImageSource",
    "ModelInfo",
    "ModelNotFoundError",
    "Observer",
    "Prediction",
    "PrometheusObserver",
    "RequestTooLargeError",
    "Result",
    "RetryPolicy",
    "ServerError",
    "ServerInfo",
    "ServerOverloadedError",
    "ServerUnavailableError",
    "TLSConfig",
    "VisionClientError",
]
__version__ = "0.1.0"
