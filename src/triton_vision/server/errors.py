"""What can go wrong before a server serves.

ServerError
├── SetupError          this machine or environment lacks something; the message names the mend
├── ServerStartError    tritonserver ended, or never became ready
│   └── PortTakenError  somebody took one of its ports while it started
└── ModelLoadError      tritonserver runs, but a model of the repository does not load, or does not answer
"""

from __future__ import annotations


class ServerError(Exception):
    """Base of all that this package raises; its text is one plain sentence for an operator."""


class SetupError(ServerError):
    """The machine or the Python environment lacks something that a server needs."""


class ServerStartError(ServerError):
    """tritonserver ended before it was ready, or was not ready in time."""


class PortTakenError(ServerStartError):
    """Somebody took a port between the check that it was free and its use."""


class ModelLoadError(ServerError):
    """One or more models did not load, or did not answer their first photo.

    Attributes:
        reasons: model name -> why, as Triton reports it, without stack traces.
        sentences: model name -> what it does not do and why, to be read behind its name.
    """

    def __init__(self, reasons: dict[str, str], what: str = "does not load") -> None:
        self.reasons = reasons
        self.sentences = {name: f"{what}: {why}" for name, why in sorted(reasons.items())}
        super().__init__("; ".join(f"{name} {sentence}" for name, sentence in self.sentences.items()))
