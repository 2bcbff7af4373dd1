"""The load generator, a process of its own: so many callers, each sending one image after the other.

Prints one JSON object: images per second, latency percentiles in ms, the generator's own CPU time per image. Every
answer is checked. Requests are built before the clock starts, so that the generator costs the server as little as
possible: it shares its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import resource
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from images import load
from tritonclient.grpc import service_pb2
from workload import expected, is_right


def grpc_request(model: str, data: bytes) -> bytes:
    """A ModelInferRequest for one image, serialised."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="IMAGE", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    for name in ("LABELS", "CLASS_IDS", "SCORES"):
        request.outputs.add(name=name)
    return bytes(request.SerializeToString())


def json_request(model: str, data: bytes) -> bytes:  # noqa: ARG001 - as the others
    """One image as base64 in JSON."""
    return json.dumps({"image": base64.b64encode(data).decode()}).encode()


def http_request(model: str, data: bytes) -> bytes:  # noqa: ARG001 - as the others
    """The file as it is."""
    return data


BUILD = {"grpc": grpc_request, "json": json_request, "http": http_request}
CONTENT_TYPES = {"http": "application/octet-stream", "json": "application/json"}


class GrpcCaller:
    """Sends serialised requests; all callers share one connection, as those of one process do."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_receive_message_length", -1)]
        self.channel = grpc.aio.insecure_channel(address, options)
        # Without serialisers: bytes in, bytes out.
        self.infer = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    async def call(self, request: bytes) -> list[int]:
        response = service_pb2.ModelInferResponse.FromString(await self.infer(request, timeout=60))
        names = [output.name for output in response.outputs]
        raw = response.raw_output_contents[names.index("CLASS_IDS")]
        ids: list[int] = np.frombuffer(raw, np.int32).tolist()
        return ids

    async def close(self) -> None:
        await self.channel.close()


class HttpCaller:
    """Posts images over a connection of its own that is kept open."""

    def __init__(self, address: str, content_type: str) -> None:
        self.host, _, self.port = address.rpartition(":")
        self.head = f"POST /predict HTTP/1.1\r\nHost: {address}\r\nContent-Type: {content_type}\r\n"
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def call(self, data: bytes) -> list[int]:
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, int(self.port))
        self.writer.write(f"{self.head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = head.split(b" ", 2)[1]
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await self.reader.readexactly(length)
        if status != b"200":
            raise RuntimeError(f"HTTP {status.decode()}: {body[:200]!r}")
        ids: list[int] = json.loads(body)["class_ids"]
        return ids

    async def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("protocol", choices=("grpc", "http", "json"), help="json: base64 within it, over HTTP")
    parser.add_argument("address")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--kind", default="small")
    parser.add_argument("--model", default="ensemble")
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=2.0)
    parser.add_argument("--requests", type=int, help="end after so many, however long they take")
    parser.add_argument("--tolerance", type=int, default=1, help="of 255; negative: answers are not checked")
    asyncio.run(run(parser.parse_args()))


async def run(args: argparse.Namespace) -> None:
    files = load(args.images, args.kind)
    truths = [expected(data) for data in files] if args.tolerance >= 0 else []
    requests = [BUILD[args.protocol](args.model, data) for data in files]
    shared = GrpcCaller(args.address) if args.protocol == "grpc" else None
    start = time.monotonic()
    counted, end = start + args.warm, start + args.warm + args.seconds
    latencies: list[float] = []

    async def work(caller: int) -> None:
        connection = shared or HttpCaller(args.address, CONTENT_TYPES[args.protocol])
        turn = caller
        for _ in itertools.count() if args.requests is None else range(args.requests // args.callers):
            began = time.monotonic()
            if began >= end and args.requests is None:
                break
            which = turn % len(files)
            ids = await connection.call(requests[which])
            ended = time.monotonic()
            if truths and not is_right(ids, truths[which], args.tolerance):
                raise SystemExit(f"error: a wrong answer for image {which}: {ids}")
            if args.requests is not None or counted <= ended <= end:
                latencies.append(ended - began)
            turn += args.callers
        if connection is not shared:
            await connection.close()

    async def clock() -> list[float]:
        times = []
        for moment in (counted, end) if args.requests is None else (start, start):
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            usage = resource.getrusage(resource.RUSAGE_SELF)
            times.append(usage.ru_utime + usage.ru_stime)
        return times

    clocked = asyncio.create_task(clock())
    await asyncio.gather(*(work(caller) for caller in range(args.callers)))
    cpu = await clocked
    if shared is not None:
        await shared.close()
    merged: Any = np.sort(latencies)
    print(
        json.dumps(
            {
                "rate": len(merged) / args.seconds,
                "p50": float(np.percentile(merged, 50)) * 1e3,
                "p99": float(np.percentile(merged, 99)) * 1e3,
                "client_ms": (cpu[1] - cpu[0]) / max(1, len(merged)) * 1e3,
                "count": len(merged),
                "over_300_ms": int((merged > 0.3).sum()),
            }
        )
    )


if __name__ == "__main__":
    main()
