"""Which server takes the next call, and when a call is tried again; no network."""

from __future__ import annotations

import socket

import grpc
import pytest
from triton_vision_client import (
    BadImageError,
    DeadlineExceededError,
    ModelNotFoundError,
    RetryPolicy,
    ServerOverloadedError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._balancer import FIRST_EJECTION_S, FULL_S, LONGEST_EJECTION_S, Balancer, Member
from triton_vision_client._calls import Attempts, Budget
from triton_vision_client._names import members_of, named_host
from triton_vision_client._translate import translate

LOST = ServerUnavailableError("no server answers")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def balancer(count: int, clock: Clock | None = None) -> Balancer:
    return Balancer([Member(f"host:{number}") for number in range(count)], clock=clock or Clock())


def test_the_server_with_the_fewest_calls_under_way() -> None:
    one = balancer(3)
    picked = [one.pick() for _ in range(6)]
    assert sorted(member.outstanding for member in one.members) == [2, 2, 2]
    one.answered(picked[0])
    one.answered(picked[0])
    assert one.pick() is picked[0]


def test_idle_servers_take_turns() -> None:
    one = balancer(3)
    seen = set()
    for _ in range(3):
        member = one.pick()
        seen.add(member)
        one.answered(member)
    assert len(seen) == 3


def test_ejection_and_return() -> None:
    clock = Clock()
    told: list[Member] = []
    one = Balancer([Member("a:1"), Member("b:1")], told.append, clock=clock)
    bad = one.pick()
    one.failed(bad)
    assert told == [bad]
    for _ in range(4):
        member = one.pick()
        assert member is not bad
        one.answered(member)
    assert one.due() == []
    clock.now += FIRST_EJECTION_S
    assert one.due() == [bad]
    assert one.due() == []  # it is being asked
    one.probed(bad, well=False)
    clock.now += FIRST_EJECTION_S
    assert one.due() == []  # twice as long
    clock.now += FIRST_EJECTION_S
    assert one.due() == [bad]
    one.probed(bad, well=True)
    trial = [one.pick() for _ in range(4)]
    assert trial.count(bad) == 1  # one call at a time until it has answered
    one.answered(bad)
    assert [one.pick() for _ in range(3)].count(bad) >= 2
    assert len(told) == 1


def test_a_server_that_goes_on_failing_is_asked_ever_more_rarely() -> None:
    clock = Clock()
    one = balancer(2, clock)
    bad = one.members[0]
    pauses = []
    for _ in range(8):
        bad.outstanding += 1
        one.failed(bad)
        pauses.append(bad.ejected_until - clock.now)
        clock.now = bad.ejected_until
        assert one.due() == [bad]
        one.probed(bad, well=True)
    assert pauses[:3] == [FIRST_EJECTION_S, 2 * FIRST_EJECTION_S, 4 * FIRST_EJECTION_S]
    assert pauses[-1] == LONGEST_EJECTION_S


def test_a_call_goes_somewhere_even_if_all_are_ejected() -> None:
    one = balancer(2)
    for member in one.members:
        member.outstanding += 1
        one.failed(member)
    tried = [one.pick()]
    tried.append(one.pick(tried))
    assert set(tried) == set(one.members)
    assert one.pick(tried) in one.members


def test_servers_of_a_name_come_and_go() -> None:
    one = balancer(2)
    kept = one.members[0]
    kept.outstanding = 3
    gone = one.replace([Member("host:0"), Member("host:9")])
    assert [member.address for member in gone] == ["host:1"]
    assert one.members[0] is kept
    assert one.members[1].address == "host:9"


# -- tries ----------------------------------------------------------------------------------------------------------


def attempts(servers: int, *, reserve: float = 20.0, **policy: float) -> Attempts:
    retry = RetryPolicy(initial=0.01, maximum=0.01, **policy)  # type: ignore[arg-type]
    return Attempts(balancer(servers), Budget(retry.budget, reserve), retry, 30.0)


def fail(course: Attempts, error: VisionClientError) -> float | None:
    member = course.next()
    course.settle(member, error)
    return course.pause_after(member, error)


def waited() -> ServerOverloadedError:
    error = ServerOverloadedError("waited in the queue")
    error.waited = True
    return error


def test_other_servers_are_asked_at_once_and_cost_nothing() -> None:
    course = attempts(3, reserve=0.0)
    assert fail(course, LOST) == 0.0
    assert fail(course, LOST) == 0.0
    assert fail(course, LOST) is None  # going round again would cost a retry, and there is none


def test_going_round_again_costs_attempts_and_budget() -> None:
    course = attempts(1, attempts=4)
    pauses = [fail(course, LOST) for _ in range(4)]
    assert all(pause is not None and 0 <= pause <= 0.01 for pause in pauses[:3])
    assert pauses[3] is None


def test_a_budget_is_earned_by_calls() -> None:
    budget = Budget(ratio=0.5, reserve=2.0)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (LOST, True),
        (ServerOverloadedError("full"), True),
        (ModelNotFoundError("loading"), True),
        (waited(), False),
        (DeadlineExceededError("late"), False),
        (BadImageError("truncated", ""), False),
    ],
)
def test_what_is_tried_elsewhere(error: VisionClientError, elsewhere: bool) -> None:
    assert fail(attempts(2), error) == (0.0 if elsewhere else None)


def test_full_servers_do_not_see_every_call_of_every_caller() -> None:
    clock, full = Clock(), ServerOverloadedError("full")
    servers, budget = balancer(3, clock), Budget(0.0, 0.0)

    def tries() -> int:
        course = Attempts(servers, budget, RetryPolicy(), 30.0)
        count = 1
        while fail(course, full) is not None:
            count += 1
        return count

    assert tries() == 3  # nobody knows yet
    assert [tries() for _ in range(10)] == [1] * 10
    clock.now += FULL_S
    assert tries() == 3


def test_a_server_with_room_is_preferred_to_one_without() -> None:
    clock = Clock()
    servers = balancer(2, clock)
    full = servers.pick()
    servers.overloaded(full)
    assert full not in [servers.pick() for _ in range(5)]
    clock.now += FULL_S
    assert servers.pick() is full


def test_a_model_that_is_nowhere_is_not_asked_for_again() -> None:
    course = attempts(2)
    assert fail(course, ModelNotFoundError("no such model")) == 0.0
    assert fail(course, ModelNotFoundError("no such model")) is None


def test_servers_far_away_are_not_taken_for_dead() -> None:
    """A connection over a long line takes some round trips, and a short timeout leaves each server little time."""
    servers = balancer(10)
    course = Attempts(servers, Budget(0.2, 20.0), RetryPolicy(), 2.0)
    member = course.next()
    assert 0.49 < course.check_timeout(member) <= 0.5
    course.settle(member, LOST, unanswered_for=0.5)
    assert not servers.any_ejected()
    member = course.next()
    course.settle(member, LOST, unanswered_for=1.5)
    assert servers.any_ejected()
    assert Attempts(servers, Budget(0.2, 20.0), RetryPolicy(), 0.2).check_timeout(member) <= 0.1


def test_one_attempt_is_one() -> None:
    assert fail(attempts(3, attempts=1), LOST) is None


def test_a_server_that_says_how_long_it_is_busy_is_left_alone_for_that_long() -> None:
    policy = RetryPolicy(initial=0.01, maximum=2.0)
    assert all(0.5 <= policy.pause(0, 1.0) <= 1.0 for _ in range(100))
    assert all(1.0 <= policy.pause(0, 60.0) <= 2.0 for _ in range(100))
    details = "in ensemble 'm', Exceeds maximum queue size: an answer would take about 1.5 s; try again later"
    full = translate(grpc.StatusCode.UNAVAILABLE, details, model="m", address="host:1", timeout=30.0, connected=True)
    assert isinstance(full, ServerOverloadedError)
    assert full.wait == 1.5
    pause = fail(Attempts(balancer(1), Budget(1.0, 9.0), policy, 30.0), full)
    assert pause is not None
    assert 0.75 <= pause <= 1.5
    assert fail(Attempts(balancer(1), Budget(1.0, 9.0), policy, 0.5), full) is None  # its time would be over


def test_no_pause_outlasts_the_timeout() -> None:
    retry = RetryPolicy(initial=50.0, maximum=50.0)
    course = Attempts(balancer(1), Budget(1.0, 9.0), retry, 0.001)
    pause = fail(course, LOST)
    assert pause is None or pause < 0.001


# -- addresses ------------------------------------------------------------------------------------------------------


def answer(family: int, *addresses: str) -> list[tuple[object, ...]]:
    return [(family, socket.SOCK_STREAM, 6, "", (address, 8001)) for address in addresses]


def test_a_name_that_stands_for_several_servers() -> None:
    found = members_of("triton:8001", answer(socket.AF_INET, "10.0.0.1", "10.0.0.2", "10.0.0.1"))
    assert [(member.address, member.authority) for member in found] == [
        ("10.0.0.1:8001", "triton"),
        ("10.0.0.2:8001", "triton"),
    ]
    six = members_of("triton:8001", answer(socket.AF_INET6, "fd00::1", "fd00::2"))
    assert [member.address for member in six] == ["[fd00::1]:8001", "[fd00::2]:8001"]


def test_a_name_that_stands_for_one_is_left_to_grpc() -> None:
    both = answer(socket.AF_INET6, "::1") + answer(socket.AF_INET, "127.0.0.1")
    for answers in ([], answer(socket.AF_INET, "10.0.0.1"), both):
        (member,) = members_of("localhost:8001", answers)
        assert (member.address, member.authority) == ("localhost:8001", None)


@pytest.mark.parametrize(
    ("url", "named"),
    [("triton:8001", ("triton", 8001)), ("10.0.0.1:8001", None), ("[::1]:8001", None), ("unix:/run/t.sock", None),
     ("dns:///triton:8001", None)],
)  # fmt: skip
def test_what_is_looked_up(url: str, named: tuple[str, int] | None) -> None:
    assert named_host(url) == named
