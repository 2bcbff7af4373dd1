"""Several servers, some of them in trouble: who is asked, who is left alone, whose failure is told."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from triton_vision_client import (
    AsyncImageClient,
    AuthenticationError,
    ImageClient,
    ModelNotFoundError,
    ServerOverloadedError,
    ServerUnavailableError,
)
from triton_vision_client._balancer import LONGEST_EJECTION_S

from tests.conftest import wait_until
from tests.unit.client.scripted import CODE, ONCE, Start, abort, answer, silent, typed, unless


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (abort(CODE.UNAVAILABLE, "Exceeds maximum queue size"), None, ServerOverloadedError),
        (
            abort(CODE.UNAVAILABLE, "Exceeds maximum queue size"),
            abort(CODE.UNAVAILABLE, "Request for unknown model: 'm' is not found"),
            ServerOverloadedError,
        ),
        (abort(CODE.NOT_FOUND, "Request for unknown model"), None, ServerUnavailableError),
        (abort(CODE.NOT_FOUND, "no such"), abort(CODE.NOT_FOUND, "no such"), ModelNotFoundError),
    ],
)
def test_of_several_servers_failures_the_one_that_says_most(start: Start, one: Any, other: Any, kind: Any) -> None:
    urls = [start(one)[0], start(other)[0] if other else "127.0.0.1:9"]
    for order in (urls, urls[::-1]):
        with ImageClient(order, retry=ONCE) as client, pytest.raises(kind) as raised:
            client.classify(b"x")
        assert type(raised.value) is kind
        assert all(url in str(raised.value) for url in urls)  # nobody's failure is kept back


def test_a_mute_server_costs_a_moment_and_no_call(start: Start) -> None:
    url, _ = start(answer)
    mute, servicer = start(answer)
    held = []

    def silent(request: Any, context: Any) -> Any:  # noqa: ARG001
        held.append(context)
        wait_until(lambda: not context.is_active(), 20)

    servicer.live = silent

    async def twin() -> int:
        async with AsyncImageClient([mute, url], timeout=3) as client:
            return sum([(await client.classify(b"x")).predictions[0].class_id for _ in range(4)])

    with ImageClient([mute, url], timeout=3) as client:
        assert [client.classify(b"x").predictions[0].class_id for _ in range(4)] == [1] * 4
    assert asyncio.run(twin()) == 4
    assert held


def test_a_server_known_to_be_mute_does_not_swallow_what_another_refuses_for_a_moment(start: Start) -> None:
    turn = itertools.count()

    def now_and_then_full(request: Any, context: Any) -> Any:
        if next(turn) % 4 == 3:
            context.abort(CODE.UNAVAILABLE, "Exceeds maximum queue size")
        return answer(request, context)

    url, _ = start(now_and_then_full)
    mute, servicer = start(silent)
    servicer.live = servicer.ready = silent
    with ImageClient([mute, url], timeout=12) as client:
        for number in range(12):
            began = time.monotonic()
            assert client.classify(b"x").predictions[0].class_id == 1
            assert number == 0 or time.monotonic() - began < 4


def test_servers_of_different_models_come_back(start: Start) -> None:
    ill = False

    def sometimes(request: Any, context: Any) -> Any:
        if ill:
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        if request.model_name != "ensemble":
            context.abort(CODE.NOT_FOUND, "Request for unknown model")
        return answer(request, context)

    url, _ = start(answer)
    one, servicer = start(sometimes)
    servicer.models = {"ensemble"}
    with ImageClient([one, url]) as client:
        for model in ("ensemble", "other") * 4:
            client.classify(b"x", model=model)
        ill = True
        for _ in range(4):
            client.classify(b"x", model="other")
        ill = False
        before = len(servicer.requests)

        def back() -> bool:
            client.classify(b"x", model="ensemble")
            return len(servicer.requests) > before

        wait_until(back, 2 * LONGEST_EJECTION_S)


def test_a_server_comes_back_for_a_client_of_other_models(start: Start) -> None:
    ill = True

    url, _ = start(answer)
    other, servicer = start(unless(lambda: ill))
    servicer.models = {"mine"}
    with ImageClient([other, url]) as client:  # whose own model, "ensemble", nobody has
        for _ in range(4):
            client.classify(b"x", model="mine")
        ill = False
        before = len(servicer.requests)

        def back() -> bool:
            client.classify(b"x", model="mine")
            return len(servicer.requests) > before

        wait_until(back, 2 * LONGEST_EJECTION_S)


def test_impatient_calls_eject_nobody(start: Start) -> None:
    def slow(request: Any, context: Any) -> Any:
        time.sleep(0.1)  # latency that this test makes
        return answer(request, context)

    urls = [start(slow)[0], start(slow)[0]]
    with ImageClient(urls) as client:
        for _ in range(10):
            with pytest.raises(Exception, match="were over"):
                client.classify(b"x", timeout=0.03)
        assert not client._balancer.any_ejected()


def test_restricted_health_does_not_close_what_is_open(start: Start) -> None:
    urls = []
    for _ in range(2):
        url, servicer = start(answer)
        servicer.live = abort(CODE.UNAVAILABLE, "This protocol is restricted")
        urls.append(url)
    with ImageClient(urls) as client:
        for _ in range(4):
            client.classify(b"x")
        with pytest.raises(AuthenticationError):
            raise typed(CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'token'")


def test_an_answer_that_cannot_be_read_is_asked_for_elsewhere(start: Start) -> None:
    def empty(request: Any, context: Any) -> Any:
        response = answer(request, context)
        response.Clear()
        return response

    urls = [start(empty)[0], start(answer)[0]]
    with ImageClient(urls) as client:
        assert [client.classify(b"x").predictions[0].class_id for _ in range(6)] == [1] * 6

    async def twin() -> list[int]:
        async with AsyncImageClient(urls) as client:
            return [(await client.classify(b"x")).predictions[0].class_id for _ in range(6)]

    assert asyncio.run(twin()) == [1] * 6


def test_a_fallback_that_answers_something_else(start: Start) -> None:  # noqa: ARG001
    with ImageClient("127.0.0.1:9", timeout=1, fallback=lambda *_: "abc") as client:  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="list of Predictions") as raised:
            client.classify(b"x")
        assert isinstance(raised.value.__cause__, ServerUnavailableError)
