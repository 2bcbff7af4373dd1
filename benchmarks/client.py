"""What the client costs: beside a bare gRPC stub, and shared memory beside gRPC; they take turns.

``.venv/bin/python benchmarks/client.py``. The first part sends batches of 16 files to a server in another process that
answers at once, from ``classify_many`` and from a bare stub that builds the same messages. The second part sends one
image at a time to a real Triton whose preprocessing does nothing, over both transports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import repository
from triton_vision_client import ImageClient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision.server import TritonServer
from triton_vision.server.security import Security

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "benchmark"
BATCH, WINDOW, FILE_BYTES = 16, 6, 65_000
PAYLOADS = {"65 kB": 65_000, "1 MB": 1_000_000, "3.4 MB (12 MP)": 3_400_000}


class Answering(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated without types
    """Answers every image with five labels, at once."""

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the protocol's
        count = request.inputs[0].shape[0]
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        for name, kind, width, content in (
            ("LABELS", "BYTES", 5, b"\1\0\0\0x" * 5 * count),
            ("CLASS_IDS", "INT32", 5, np.zeros(5 * count, np.int32).tobytes()),
            ("SCORES", "FP32", 5, np.ones(5 * count, np.float32).tobytes()),
            ("STATUS", "BYTES", 1, b"\0\0\0\0" * count),
        ):
            response.outputs.add(name=name, datatype=kind, shape=[count, width])
            response.raw_output_contents.append(content)
        return response


def serve(ports: Any) -> None:
    """A process of its own, so that its cost is not the client's."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Answering(), server)
    ports.put(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def bare(address: str, files: list[bytes], count: int) -> None:
    """The same requests from a stub that does nothing else."""
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        flying: deque[Any] = deque()
        for start in range(0, count, BATCH):
            batch = [files[(start + row) % len(files)] for row in range(BATCH)]
            request = service_pb2.ModelInferRequest(model_name="ensemble")
            request.inputs.add(name="IMAGE", datatype="BYTES", shape=[BATCH, 1])
            request.raw_input_contents.append(
                b"".join(part for file in batch for part in (struct.pack("<I", len(file)), file))
            )
            flying.append(stub.ModelInfer.future(request, timeout=30))
            if len(flying) == WINDOW:
                flying.popleft().result()
        while flying:
            flying.popleft().result()


def ours(address: str, files: list[bytes], count: int) -> None:
    """``classify_many``."""
    with ImageClient(address) as client:
        for result in client.classify_many(files[number % len(files)] for number in range(count)):
            assert len(result.predictions) == 5


def measured(work: Callable[[], None], count: int) -> tuple[float, float]:
    """Milliseconds of this process's CPU, and of the clock, for each of ``count`` things."""
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    work()
    took, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return 1000 * cpu / count, 1000 * took / count


def beside_a_bare_stub(rounds: int, count: int) -> None:
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=serve, args=(ports,), daemon=True)
    process.start()
    address = f"127.0.0.1:{ports.get(timeout=30)}"
    files = [os.urandom(FILE_BYTES) for _ in range(64)]
    rows = []
    for number in range(rounds + 1):
        stub, _ = measured(lambda: bare(address, files, count), count)
        client, took = measured(lambda: ours(address, files, count), count)
        if number:  # the first one warms up
            rows.append((stub, client, client / stub, 1000 / took))
    process.terminate()
    process.join()
    stub, client, ratio, rate = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"batches of {BATCH}, files of {FILE_BYTES // 1000} kB: bare stub {stub:.3f} ms of CPU an image, ", end="")
    print(f"classify_many {client:.3f} ms, {ratio:.2f} times; {rate:.0f} images/s")


def transports(rounds: int, count: int) -> None:
    with TritonServer(repository.suite(BUILD / "client"), security=Security(shm_open=True)) as server:
        print("| one image of | gRPC ms | shm ms | of it | client's CPU: gRPC ms | shm ms | of it |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, size in PAYLOADS.items():
            rows = list(_turns(server.grpc_address, os.urandom(size), rounds, count))
            grpc_cpu, grpc_ms, shm_cpu, shm_ms = (statistics.median(column) for column in zip(*rows, strict=True))
            print(
                f"| {name} | {grpc_ms:.2f} | {shm_ms:.2f} | {shm_ms / grpc_ms:.2f} | {grpc_cpu:.2f} | {shm_cpu:.2f} "
                f"| {shm_cpu / grpc_cpu:.2f} |"
            )


def _turns(address: str, file: bytes, rounds: int, count: int) -> Iterator[tuple[float, float, float, float]]:
    with (
        ImageClient(address, model="ensemble_nothing") as plain,
        ImageClient(address, model="ensemble_nothing", transport="shm") as shared,
    ):
        for number in range(rounds + 1):
            found: list[float] = []
            for client in (plain, shared):
                found += measured(lambda client=client: _call(client, file, count), count)  # type: ignore[misc]
            if number:
                yield found[0], found[1], found[2], found[3]


def _call(client: ImageClient, file: bytes, count: int) -> None:
    for _ in range(count):
        client.classify(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=3200, help="in each round of the first part")
    parser.add_argument("--calls", type=int, default=100, help="in each round of the second part")
    args = parser.parse_args()
    beside_a_bare_stub(args.rounds, args.images // BATCH * BATCH)
    transports(args.rounds, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
