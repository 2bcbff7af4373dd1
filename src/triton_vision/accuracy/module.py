"""The PyTorch module's side: a process where torch is, answering image after image."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from triton_vision.accuracy.chain import Chain
from triton_vision.accuracy.compare import Answer
from triton_vision.server import launch


class ModuleError(Exception):
    """The PyTorch module cannot be asked; the text is one plain sentence."""


def weights_argument(chain: Chain, named: str | None) -> str | None:
    """What the module is to be built from: ``named``, or what the artifact's sidecar says can be had again.

    Returns:
        A file's path, ``random``, or None for the network's own weights.

    Raises:
        ModuleError: nobody says from which weights the server's model was made, or their file has to be named.
    """
    if named is not None:
        return named if named == "random" else os.path.abspath(named)
    if chain.origin is None:
        raise ModuleError(
            f"nothing beside the artifacts of {chain.core} says from which weights they were made: name them with "
            "--weights FILE, or measure the server alone with --no-module"
        )
    if chain.origin.kind == "file":
        raise ModuleError(f"{chain.core} was made from the file {chain.origin.source}: name it with --weights FILE")
    return "random" if chain.origin.kind == "random" else None


class Module:
    """The process that answers for the module; ended with the ``with`` block.

    It is bound to the life of the thread that enters.

    Args:
        python: a Python with torch and this package.
        chain: the ensemble whose core and recipe it answers for.
        weights: as ``weights_argument`` returns it.
        paths: the images.

    Attributes:
        source: where the module's weights come from, for a person.
        sha256: of their file; empty for random ones.

    Raises:
        ModuleError: on entering, if the module cannot be built; while reading, if the process ends early.
    """

    source = ""
    sha256 = ""

    def __init__(self, python: str, chain: Chain, weights: str | None, paths: Sequence[str]) -> None:
        recipe = [f"--{key.replace('_', '-')}={chain.recipe[key]}" for key in RECIPE]
        own = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())]
        self._command = [*own, python, "-m", "triton_vision.export.evaluate", chain.core, *recipe]
        if weights is not None:
            self._command.append(f"--weights={weights}")
        if chain.origin is not None and chain.origin.mean:
            self._command += ["--mean", *map(str, chain.origin.mean), "--std", *map(str, chain.origin.std)]
        self._paths = paths

    def __enter__(self) -> Module:
        # In a session of its own a terminal's Ctrl-C does not reach it, which would print a trace of its own.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            header = self._read()
            if header is None:
                raise self._ended()
            self.source, self.sha256 = header["source"], header["sha256"]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was still to be written
                stream.close()

    def answers(self) -> Iterator[Answer]:
        """The answers, in the order of the paths."""
        for _ in self._paths:
            line = self._read()
            if line is None:
                raise self._ended()
            if "refused" in line:
                yield Answer(refused=line["refused"])
            else:
                yield Answer(tuple(line["ids"]), tuple(line["scores"]))

    def _feed(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, which the reader will notice
            for path in self._paths:
                stream.write(json.dumps(path) + "\n")
            stream.close()

    def _read(self) -> Any:
        """The next line's object; None at the end."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text.endswith("\n"):
            return None
        line = json.loads(text)
        if "fatal" in line:
            raise ModuleError(line["fatal"])
        return line

    def _ended(self) -> ModuleError:
        return ModuleError(f"the PyTorch side ended early, with exit code {self._process.wait()}")


RECIPE = ("resize", "crop", "filter", "orientation", "formats", "max_pixels")
