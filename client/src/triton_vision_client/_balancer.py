"""Which of several servers takes the next call: least outstanding, ejection and return. No I/O in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

# How long a server that failed is left alone: doubled with each failure in a row, up to the longest.
FIRST_EJECTION_S = 0.25
LONGEST_EJECTION_S = 4.0
# Answers in a row that may be the server's fault (INTERNAL, no answer in time) until it is ejected for them.
ERRORS_IN_A_ROW = 3
# When a question whether a server is well is given up for lost, and asked again.
PROBE_LOST_S = 5.0
# How long a server whose queue was full is asked only if no other one is left.
FULL_S = 0.1


@dataclass(eq=False)
class Member:
    """One server, and what is known of it.

    Attributes:
        address: ``HOST:PORT``, as messages show it and gRPC connects to it.
        authority: the name that its certificate must hold, where ``address`` is not that name.
        outstanding: calls under way.
        left: those of them that nobody waits for.
        proven: whether its last call reached it.
    """

    address: str
    authority: Optional[str] = None
    outstanding: int = 0
    left: int = 0
    proven: bool = False
    failures: int = 0
    errors: int = 0
    ejected_until: float = 0.0
    # Until when an answer to the question whether it is well is waited for; 0 while none is.
    probing_until: float = 0.0
    # Back from an ejection, but yet to answer a call: it gets one at a time.
    on_trial: bool = False
    full_until: float = 0.0
    ill_since: float = 0.0
    answered_at: float = 0.0
    # The model that calls are missing there while it is ejected; empty for the server as such.
    missing: str = ""
    # The models that have answered there, and the last of them.
    served: set[str] = field(default_factory=set)
    last_served: str = ""
    # The models known to be dead there, and when that was last heard; an answer takes one off.
    dead: dict[str, float] = field(default_factory=dict)
    # Whether it is known to survive that a call is cancelled; and when to ask for its version, which says so.
    cancels: bool = False
    version_due: float = 0.0


class Balancer:
    """Chooses among the members, and learns from how calls end. Safe to use from several threads.

    Its lock, as every one of this package, may be taken again by the thread that has it: the garbage collector may end
    somebody's unfinished ``classify_many`` at any moment, in any thread.

    Args:
        members: at least one.
        on_ejection: told of each member that is ejected.
    """

    def __init__(
        self,
        members: Sequence[Member],
        on_ejection: Optional[Callable[[Member], None]] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = list(members)
        self._on_ejection = on_ejection
        self._clock = clock
        self._lock = threading.RLock()
        self._turn = 0

    def pick(self, tried: Iterable[Member] = ()) -> Member:
        """The member for the next call, counted as under way there until ``ended``.

        Of those in rotation that this call has not tried, the one with the fewest calls under way; one with a full
        queue only if there is no other. If there is none: of those that it has not tried; then of those in rotation;
        then of all, for a call must go somewhere.
        """
        with self._lock:
            skip = set(tried)
            fresh = [member for member in self.members if member not in skip]
            rotation = [member for member in self.members if self._in_rotation(member)]
            both = [member for member in fresh if member in rotation]
            roomy = [member for member in both if not self._full(member)]
            chosen = self._least(roomy or both or fresh or rotation or self.members)
            chosen.outstanding += 1
            return chosen

    def has_untried(self, tried: Iterable[Member], *, with_room: bool = False) -> bool:
        """Whether there is a member that a call has not tried; one in ejection, too, may be well again by now.

        Args:
            with_room: not counting those whose queue has just been full.
        """
        with self._lock:
            skip = set(tried)
            return any(member not in skip and not (with_room and self._full(member)) for member in self.members)

    def overloaded(self, member: Member) -> None:
        """A call ended because the server's queue was full."""
        with self._lock:
            member.full_until = self._clock() + FULL_S
        self.answered(member)

    def answered(self, member: Member) -> None:
        """A call ended, and the server did what it should: with an answer, or a refusal that is the caller's affair."""
        with self._lock:
            member.outstanding -= 1
            member.proven = True
            member.answered_at = self._clock()
            member.failures, member.errors, member.ejected_until, member.on_trial = 0, 0, 0.0, False

    def failed(self, member: Member, missing: str = "") -> None:
        """A call ended because the server could not be reached, or its model is broken: it is ejected.

        Args:
            missing: the model that must be ready there until it comes back; empty for the server as such.
        """
        with self._lock:
            member.outstanding -= 1
            member.proven = False
            member.missing = missing
            ejected = self._eject(member)
        if ejected and self._on_ejection is not None:
            self._on_ejection(member)

    def erred(self, member: Member, missing: str = "") -> None:
        """A call ended with what may be the server's fault: an INTERNAL error, or none in time.

        A server that answers errors at once has always the fewest calls under way: after ERRORS_IN_A_ROW it is ejected,
        if another has answered meanwhile. Otherwise it may be the calls, or the little time that they are given.
        ``missing`` is as in ``failed``.
        """
        with self._lock:
            if not member.errors:
                member.ill_since = self._clock()
            member.errors += 1
            others = [other for other in self.members if other is not member]
            well = any(other.answered_at >= member.ill_since for other in others)
            ill = member.errors >= ERRORS_IN_A_ROW and well
        if ill:
            self.failed(member, missing)
        else:
            self.ended(member)

    def ended(self, member: Member) -> None:
        """A call ended in a way that says nothing about the server."""
        with self._lock:
            member.outstanding -= 1

    def keeps(self, member: Member) -> None:
        """A call whose caller has left is still under way there, until ``done``."""
        with self._lock:
            member.outstanding += 1
            member.left += 1

    def done(self, member: Member) -> None:
        """Such a call has ended."""
        with self._lock:
            member.outstanding -= 1
            member.left -= 1

    def any_ejected(self) -> bool:
        """Whether a member is left alone at present."""
        return any(member.ejected_until for member in self.members)

    def due(self) -> list[Member]:
        """The ejected members to be asked whether they are well again.

        Each counts as being asked until ``probed``, or for PROBE_LOST_S.
        """
        with self._lock:
            now = self._clock()
            due = [
                member
                for member in self.members
                if member.ejected_until and now >= member.ejected_until and now >= member.probing_until
            ]
            for member in due:
                member.probing_until = now + PROBE_LOST_S
            return due

    def probed(self, member: Member, well: bool) -> None:
        """What an ejected member has answered. One that is well gets a call, on trial."""
        with self._lock:
            member.probing_until = 0.0
            if well:
                member.ejected_until, member.on_trial = 0.0, True
            else:
                self._eject(member)

    def replace(self, members: Sequence[Member]) -> list[Member]:
        """Takes other members, keeping what is known of those that stay; returns those that are gone."""
        with self._lock:
            known = {member.address: member for member in self.members}
            gone = [member for member in self.members if member.address not in {one.address for one in members}]
            self.members = [known.get(member.address, member) for member in members]
            return gone

    def _full(self, member: Member) -> bool:
        return self._clock() < member.full_until

    def _in_rotation(self, member: Member) -> bool:
        return not member.ejected_until and not (member.on_trial and member.outstanding)

    def _least(self, members: Sequence[Member]) -> Member:
        """The one with the fewest calls under way; among equals in turns."""
        self._turn += 1
        start = self._turn % len(members)
        order = [*members[start:], *members[:start]]
        return min(order, key=lambda member: member.outstanding)

    def _eject(self, member: Member) -> bool:
        """Leaves a member alone for a while; whether it had been in rotation."""
        was_in = not member.ejected_until
        pause = min(LONGEST_EJECTION_S, FIRST_EJECTION_S * 2.0**member.failures)
        member.failures = min(member.failures + 1, 16)
        member.ejected_until, member.on_trial = self._clock() + pause, False
        member.cancels, member.version_due = False, 0.0  # another server may come back there
        return was_in
