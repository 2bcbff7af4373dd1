"""The client against servers that misbehave, scripted in process."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import prometheus_client
import pytest
import triton_vision_client
from triton_vision_client import (
    AsyncImageClient,
    AuthenticationError,
    BadImageError,
    DeadlineExceededError,
    ImageClient,
    ModelNotFoundError,
    PrometheusObserver,
    RequestTooLargeError,
    RetryPolicy,
    ServerError,
    ServerOverloadedError,
    ServerUnavailableError,
    TLSConfig,
    VisionClientError,
)

from tests.unit.client.scripted import CODE, Start, abort, answer

FAST = RetryPolicy(attempts=3, initial=0.01, maximum=0.02)


CASES: list[tuple[grpc.StatusCode, str, type[VisionClientError], int]] = [
    (CODE.INVALID_ARGUMENT, "in ensemble 'e', image 3: truncated: the JPEG ends", BadImageError, 1),
    (CODE.INVALID_ARGUMENT, "parameter top_k is 0", ServerError, 1),
    (CODE.UNAVAILABLE, "Request for unknown model: 'm' is not found", ModelNotFoundError, 1),
    (CODE.NOT_FOUND, "Request for unknown model: 'm' has no available versions", ModelNotFoundError, 1),
    (CODE.UNAVAILABLE, "in ensemble 'e', Exceeds maximum queue size", ServerOverloadedError, 3),
    (CODE.UNAVAILABLE, "in ensemble 'e', Request timeout expired", ServerOverloadedError, 1),
    (CODE.UNAVAILABLE, "Socket closed", ServerUnavailableError, 3),
    (CODE.INTERNAL, "Stub process 'p_0_0' is not healthy.", ServerUnavailableError, 3),
    (CODE.UNAUTHENTICATED, "no token", AuthenticationError, 1),
    (CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'x'", AuthenticationError, 1),
    (CODE.RESOURCE_EXHAUSTED, "message larger than max", RequestTooLargeError, 1),
    (CODE.INTERNAL, "something else", ServerError, 1),
]


@pytest.mark.parametrize(("code", "details", "kind", "tries"), CASES)
def test_each_status_is_its_typed_error_and_tried_as_often_as_it_may_help(
    start: Start, code: grpc.StatusCode, details: str, kind: type[VisionClientError], tries: int
) -> None:
    url, servicer = start(abort(code, details))
    with ImageClient(url, retry=FAST) as client, pytest.raises(VisionClientError) as caught:
        client.classify(b"x")
    assert type(caught.value) is kind
    assert len(servicer.requests) == tries

    async def twin() -> None:
        async with AsyncImageClient(url, retry=FAST) as client:
            await client.classify(b"x")

    with pytest.raises(kind) as again:
        asyncio.run(twin())
    assert str(again.value) == str(caught.value)
    assert len(servicer.requests) == 2 * tries


def test_a_bad_image_has_reason_detail_and_index(start: Start) -> None:
    url, _ = start(abort(CODE.INVALID_ARGUMENT, "in ensemble 'e', image 3: too_many_pixels: 9x9, and more: text"))
    with ImageClient(url) as client, pytest.raises(BadImageError) as caught:
        client.classify(b"x")
    error = caught.value
    assert (error.reason, error.detail, error.index) == ("too_many_pixels", "9x9, and more: text", 3)


def test_a_late_server_and_a_silent_network_are_told_apart(start: Start) -> None:
    release = threading.Event()

    def late(request: Any, context: Any) -> Any:
        release.wait(10)
        return answer(request, context)

    url, _ = start(late)
    with (
        ImageClient(url, timeout=0.5) as client,
        pytest.raises(DeadlineExceededError, match=r"0\.5 s were over"),
    ):
        client.classify(b"x")
    release.set()
    with socket.socket() as silent:  # accepts connections, and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with ImageClient(address, timeout=0.5) as client, pytest.raises(ServerUnavailableError, match="no connection"):
            client.classify(b"x")
        assert time.monotonic() - began < 2


def test_a_silent_server_among_several_is_passed_over(start: Start) -> None:
    url, _ = start(answer)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        urls = [f"127.0.0.1:{silent.getsockname()[1]}", url]
        with ImageClient(urls, timeout=6) as client:
            assert client.classify(b"four").predictions[0].class_id == 4
            assert [item.predictions[0].class_id for item in client.classify_many([b"x"] * 3)] == [1, 1, 1]

        async def twin() -> int:
            async with AsyncImageClient(urls, timeout=6) as client:
                return (await client.classify(b"four")).predictions[0].class_id

        assert asyncio.run(twin()) == 4


def test_retries_end_in_an_answer_and_share_one_timeout(start: Start) -> None:
    counter = itertools.count()

    def third_time_lucky(request: Any, context: Any) -> Any:
        if next(counter) < 2:
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        return answer(request, context)

    url, servicer = start(third_time_lucky)
    with ImageClient(url, retry=FAST, timeout=5) as client:
        assert client.classify(b"four").predictions[0].class_id == 4
    budgets = [request.parameters["timeout"].int64_param for request in servicer.requests]
    assert len(budgets) == 3
    assert 5_000_000 >= budgets[0] > budgets[1] > budgets[2] > 3_000_000


def test_headers_and_parameters_are_sent(start: Start) -> None:
    url, servicer = start(answer)
    with ImageClient(url, model="mine", headers={"Authorization": "Bearer x"}) as client:
        client.classify(b"x", top_k=7)
        list(client.classify_many([b"x"]))
    one, many = servicer.requests
    assert servicer.metadata[0]["authorization"] == "Bearer x"
    assert one.model_name == "mine"
    assert one.parameters["top_k"].int64_param == 7
    assert "on_bad_image" not in one.parameters
    assert many.parameters["on_bad_image"].string_param == "mask"
    assert "top_k" not in many.parameters


def test_the_token_for_shared_memory_goes_with_its_own_calls_alone(start: Start) -> None:
    url, servicer = start(answer)
    name = "triton-grpc-protocol-shm"
    given: dict[str, Any]
    for given in ({"shm_token": "t"}, {"headers": {name: "t"}}, {"shm_token": "t", "headers": {name: "other"}}):
        with ImageClient(url, transport="shm", **given) as client:
            client.classify(b"x")
            assert name not in servicer.metadata[-1]
            assert dict(client._settings.for_shared_memory((("a", "b"),))) == {"a": "b", name: "t"}
    with pytest.raises(ValueError, match="transport='shm'"):
        ImageClient(url, shm_token="t")
    with pytest.raises(ValueError, match="header"):
        ImageClient(url, transport="shm", shm_token="of two\nlines")


def test_headers_and_a_trace_of_one_call(start: Start) -> None:
    url, servicer = start(answer)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with ImageClient(url, headers={"a": "client", "b": "client"}) as client:
        client.classify(b"x", headers={"B": "call"}, traceparent=trace)
        client.classify(b"x")
    first, second = servicer.metadata
    assert (first["a"], first["b"], first["traceparent"]) == ("client", "call", trace)
    assert (second["a"], second["b"]) == ("client", "client")
    assert "traceparent" not in second


ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("trace", "passed_on"),
    [
        (f"00-{ID}-{PARENT}-01", True),
        (f"cc-{ID}-{PARENT}-01", True),
        (f"cc-{ID}-{PARENT}-01-what.the-future-brings", True),
        (f"00-{ID}-{PARENT}-01-more", False),
        (f"ff-{ID}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{ID}-{'0' * 16}-01", False),
        (f"00-{ID.upper()}-{PARENT}-01", False),
        ("yes", False),
        ("", False),
    ],
)
def test_a_trace_that_is_none_costs_no_call(start: Start, trace: str, passed_on: bool) -> None:
    url, servicer = start(answer)
    with ImageClient(url) as client:
        client.classify(b"x", traceparent=trace)
    assert (servicer.metadata[0].get("traceparent") == trace) is passed_on


def test_prometheus_counts_outcomes_retries_and_ejections(start: Start) -> None:
    counter = itertools.count()

    def second_time(request: Any, context: Any) -> Any:
        if next(counter) == 0:
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        if request.raw_input_contents[0].endswith(b"bad"):
            context.abort(CODE.INVALID_ARGUMENT, "image 0: corrupt: bad")
        return answer(request, context)

    url, _ = start(second_time)
    registry = prometheus_client.CollectorRegistry()
    with ImageClient(url, retry=FAST, observer=PrometheusObserver(registry)) as client:
        client.classify(b"x")
        list(client.classify_many([b"x"]))
        with pytest.raises(BadImageError):
            client.classify(b"bad")
    name = "triton_vision_client"
    assert registry.get_sample_value(f"{name}_seconds_count", {"outcome": "ok"}) == 2
    assert registry.get_sample_value(f"{name}_seconds_count", {"outcome": "BadImageError"}) == 1
    assert registry.get_sample_value(f"{name}_retries_total", {"error": "ServerUnavailableError"}) == 1
    assert registry.get_sample_value(f"{name}_ejections_total", {"server": url}) == 1


def test_the_budget_bounds_what_a_server_in_trouble_sees(start: Start) -> None:
    url, servicer = start(abort(CODE.UNAVAILABLE, "Socket closed"))
    retry = RetryPolicy(attempts=4, initial=0.0, maximum=0.0, budget=0.1, reserve=5)
    with ImageClient(url, retry=retry) as client:
        for _ in range(100):
            with pytest.raises(ServerUnavailableError):
                client.classify(b"x")
    assert 100 + 5 <= len(servicer.requests) <= 100 + 5 + 10


def test_batches_are_filled_by_count_and_by_bytes(start: Start) -> None:
    url, servicer = start(answer)
    images = [b"x" * (size + 1) for size in range(40)] + [b"y" * (5 << 20)] * 3
    with ImageClient(url) as client:
        results = list(client.classify_many(images))
    assert [result.predictions[0].class_id for result in results] == [len(image) for image in images]
    assert sorted(request.inputs[0].shape[0] for request in servicer.requests) == [1, 1, 9, 16, 16]


@pytest.mark.parametrize("broken", ["LABELS", "STATUS", "SCORES"])
def test_an_answer_that_is_none_is_a_server_error(start: Start, broken: str) -> None:
    def cut(request: Any, context: Any) -> Any:
        response = answer(request, context)
        for output in response.outputs:
            if output.name == broken:
                output.name = "OTHER"
        return response

    url, _ = start(cut)
    with ImageClient(url) as client, pytest.raises(ServerError, match="as an image ensemble does"):
        client.classify(b"x")


def test_a_file_that_fits_into_no_message_costs_only_itself(start: Start, tmp_path: Path) -> None:
    url, _ = start(answer)
    huge = tmp_path / "huge.jpg"
    with huge.open("wb") as file:
        file.truncate(2200 << 20)  # sparse: it takes no room
    with ImageClient(url) as client:
        first, second, third = client.classify_many([b"one", huge, b"three"])
        assert [item.predictions[0].class_id for item in (first, third)] == [3, 5]
        assert second.error is not None
        assert second.error.reason == "too_large"
        with pytest.raises(RequestTooLargeError, match="less than 2 GiB"):
            client.classify(huge)


def test_one_client_in_many_threads(start: Start) -> None:
    url, _ = start(answer)
    with ImageClient(url) as client, futures.ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda size: client.classify(b"x" * size).predictions[0].class_id, range(1, 200)))
    assert ids == list(range(1, 200))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": "http://localhost:8001"}, "without a scheme"),
        ({"url": []}, "at least one URL"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": 1e10}, "timeout"),
        ({"headers": {"bad key": "x"}}, "header"),
        ({"headers": {"x": "é"}}, "header"),
        ({"headers": {"trace-bin": "x"}}, "gRPC's own"),
        *(
            ({"url": url}, "HOST:PORT")
            for url in ("localhost", "localhost:0", "host:70000", "a b:1", "::1:8001", ":8001")
        ),
        ({"model": ""}, "ensemble"),
    ],
)
@pytest.mark.parametrize("kind", [ImageClient, AsyncImageClient])
def test_arguments_that_cannot_work(kind: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**arguments)


@pytest.mark.parametrize(
    ("image", "kind", "words"),
    [
        (np.zeros((4, 4), np.uint8), ValueError, "height, width, 3"),
        (np.zeros((4, 4, 3), np.float32), ValueError, "uint8"),
        (np.zeros((0, 4, 3), np.uint8), ValueError, "empty"),
        (3, TypeError, "not int"),
    ],
)
def test_what_is_no_image(image: Any, kind: type[Exception], words: str) -> None:
    with ImageClient() as client:
        with pytest.raises(kind, match=words):
            client.classify(image)
        (result,) = client.classify_many([image])
        assert result.error is not None
        assert result.error.reason == "unreadable"


def test_top_k_is_checked_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="top_k"):
        AsyncImageClient().classify_many([], top_k=0)
    with ImageClient() as client:
        with pytest.raises(TypeError):
            client.classify(b"x", top_k=True)
        with pytest.raises(ValueError, match="top_k"):
            client.classify_many([b"x"], top_k=0)


def test_a_closed_client_says_so() -> None:
    client = ImageClient()
    client.close()
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.classify(b"x")


def test_mutual_tls_needs_both() -> None:
    with pytest.raises(ValueError, match="both"):
        TLSConfig(certificate="a.pem")


def test_the_exported_names() -> None:
    assert set(triton_vision_client.__all__) == {
        name
        for name, value in vars(triton_vision_client).items()
        if not name.startswith("_") and name not in ("annotations",)
    }
    tree = triton_vision_client._errors.__doc__ or ""
    for name in triton_vision_client.__all__:
        if name.endswith("Error"):
            assert name in tree
