"""Models that will not answer any more: told apart from late ones, once for all callers."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent import futures
from typing import Any

import pytest
from triton_vision_client import (
    AsyncImageClient,
    DeadlineExceededError,
    ImageClient,
    RetryPolicy,
    ServerUnavailableError,
)

from tests.unit.client.scripted import CODE, ONCE, Start, abort, answer, silent


def test_a_broken_model_is_the_cause_though_the_last_try_was_late(start: Start) -> None:
    asked: list[int] = []

    def dead(request: Any, context: Any) -> Any:
        asked.append(1)
        if len(asked) % 2:
            context.abort(CODE.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        release.wait(1)
        return answer(request, context)

    release = threading.Event()
    url, _ = start(dead)
    with ImageClient(url, timeout=0.5, retry=ONCE) as client, pytest.raises(ServerUnavailableError, match="broken"):
        client.classify(b"x")
    assert len(asked) == 2

    async def twin() -> None:
        async with AsyncImageClient(url, timeout=0.5, retry=ONCE) as client:
            await client.classify(b"x")

    with pytest.raises(ServerUnavailableError, match="broken"):
        asyncio.run(twin())
    release.set()


def outcomes(url: str, callers: int, *, concurrent: bool) -> set[str]:
    """What so many calls at once end with, each within its time and a little more."""
    seconds, ends = 1.2, []

    def end(result: Any) -> str:
        assert time.monotonic() - began < seconds + 1.5
        return type(result).__name__

    async def classify(client: AsyncImageClient) -> None:
        result = await asyncio.gather(client.classify(b"x"), return_exceptions=True)
        ends.append(end(result[0]))

    async def twin() -> None:
        async with AsyncImageClient(url, timeout=seconds, retry=ONCE) as client:
            await asyncio.gather(*(classify(client) for _ in range(callers)))

    began = time.monotonic()
    if concurrent:
        asyncio.run(twin())
    else:
        with ImageClient(url, timeout=seconds, retry=ONCE) as client, futures.ThreadPoolExecutor(callers) as threads:
            ends += [end(call.exception()) for call in [threads.submit(client.classify, b"x") for _ in range(callers)]]
    assert len(ends) == callers
    return set(ends)


@pytest.fixture
def brief_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not wait for calls that are never answered."""
    monkeypatch.setattr("triton_vision_client._client.LAST_CALLS_S", 0.0)


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("callers", [4, 16, 64])
def test_a_model_that_never_answers_and_is_not_ready_is_broken(start: Start, callers: int, concurrent: bool) -> None:
    url, servicer = start(silent)
    servicer.models = set()
    assert outcomes(url, callers, concurrent=concurrent) == {"ServerUnavailableError"}


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
def test_what_one_caller_hears_of_a_dead_model_all_callers_know(start: Start, concurrent: bool) -> None:
    """As a real server has it, which calls the model ready all the same."""
    turn = itertools.count()

    def dead(request: Any, context: Any) -> Any:
        if next(turn) == 15:
            context.abort(CODE.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        return silent(request, context)

    url, _ = start(dead)
    assert outcomes(url, 16, concurrent=concurrent) == {"ServerUnavailableError"}


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
def test_a_model_that_is_ready_is_late_and_not_broken(start: Start, concurrent: bool) -> None:
    url, _ = start(silent)
    assert outcomes(url, 4, concurrent=concurrent) == {"DeadlineExceededError"}


@pytest.mark.usefixtures("brief_end")
def test_a_model_that_answers_again_is_broken_no_more(start: Start) -> None:
    script: list[Any] = [abort(CODE.INTERNAL, "Stub process 'm_0_0' is not healthy."), answer, silent]
    url, _ = start(lambda request, context: script[0](request, context))
    with ImageClient(url, timeout=0.3, retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(ServerUnavailableError, match="broken"):
            client.classify(b"x")
        del script[0]
        client.classify(b"x")
        del script[0]
        with pytest.raises(DeadlineExceededError):
            client.classify(b"x")


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
def test_a_server_that_is_mute_holds_up_a_late_call_for_a_moment_only(start: Start, concurrent: bool) -> None:
    url, servicer = start(silent)
    servicer.ready = silent
    assert outcomes(url, 4, concurrent=concurrent) == {"DeadlineExceededError"}
