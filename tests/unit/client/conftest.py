"""What all tests of the client have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.unit.client.scripted import Ready, Script


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[str, Ready]]]:
    servers = []

    def one(script: Script, host: str = "127.0.0.1", garbled: Callable[[], bool] | None = None) -> tuple[str, Ready]:
        """A server; ``garbled`` says whether it answers questions about readiness with what is not a message."""
        server = grpc.server(futures.ThreadPoolExecutor(160), options=[("grpc.max_receive_message_length", -1)])
        servicer = Ready(script)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        if garbled is not None:
            garble = grpc.unary_unary_rpc_method_handler(lambda *_: b"\xff\xff\xff" if garbled() else b"\x08\x01")
            server.add_registered_method_handlers("inference.GRPCInferenceService", {"ModelReady": garble})
        port = server.add_insecure_port(f"{host}:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}", servicer

    yield one
    for server in servers:
        server.stop(0).wait()
