"""Which broker stands for which transaction coordinator, where there are several.  Pure.

Rules:

- A coordinator that nobody leads goes to the broker that leads fewest; among equals number and
  broker decide, so that all who see the same agree.
- Whoever is chosen for several stands for all of them at once: even if what it knows of the others
  is old, that never makes it more than an even share, rounded up.
- What the chosen broker left alone any other candidate takes, one at a time and each in an order of
  its own, so that they do not all stand for the same.  Where there is no candidate anybody does.
- Nobody keeps more than an even share, rounded up; what is above that is given up, and nothing else
  moves.  What was left alone before is kept for a while (`Kept`): it would be given up to the
  broker that did not take it.
- A while is COORDINATOR_KEPT_S, and as long as it has gone on since this broker first saw something
  left alone, up to COORDINATOR_KEPT_MAX_S: who never takes anything is offered it ever less often,
  and who does again waits no longer than it was away.  Other candidates have other shares: then
  nothing is kept, and all this begins anew.
"""

import math
import zlib
from collections.abc import Collection, Mapping, Sequence

from config.bounds import COORDINATOR_KEPT_MAX_S, COORDINATOR_KEPT_S
from magnetar.protocol.txn_id import CoordinatorId


def assign_successors(
    unled: Collection[CoordinatorId],
    leaders: Mapping[CoordinatorId, str],
    candidates: Collection[str],
) -> dict[CoordinatorId, str]:
    """Assign a broker id to each of `unled`; {} when there is no candidate."""
    counts = dict.fromkeys(candidates, 0)
    for broker_id in leaders.values():
        if broker_id in counts:
            counts[broker_id] += 1
    chosen: dict[CoordinatorId, str] = {}
    for number in sorted(unled) if counts else ():
        broker_id = min(counts, key=lambda one: (counts[one], _rank(number, one), one))
        counts[broker_id] += 1
        chosen[number] = broker_id
    return chosen


def choose_candidacies(
    me: str,
    unled: Collection[CoordinatorId],
    left_alone: Collection[CoordinatorId],
    leaders: Mapping[CoordinatorId, str],
    candidates: Collection[str],
    tried: Collection[CoordinatorId] = (),
) -> tuple[list[CoordinatorId], list[CoordinatorId]]:
    """Return what this broker is chosen for, or else what it takes besides, one at most.

    `left_alone` are those of `unled` that nobody stood for in time.  Nothing `tried` is named.
    """
    chosen = assign_successors(unled, leaders, candidates)
    mine = [number for number, broker_id in chosen.items() if broker_id == me]
    if new := [number for number in mine if number not in tried]:
        return new, []
    if candidates and me not in candidates:
        return [], []
    alone = [number for number in left_alone if number not in tried]
    return [], sorted(alone, key=lambda number: (_rank(number, me), number))[:1]


def choose_surplus(
    me: str,
    leaders: Mapping[CoordinatorId, str],
    candidates: Collection[str],
    parallelism: int,
    kept: Collection[CoordinatorId] = (),
) -> list[CoordinatorId]:
    """Return the coordinators that this broker gives up; never those in `kept`."""
    if me not in candidates:
        return []
    share = math.ceil(parallelism / len(candidates))
    led = [number for number, broker_id in leaders.items() if broker_id == me]
    led = [number for number in led if number not in kept]
    led.sort(key=lambda number: (_rank(number, me), number))
    return led[share:]


class RetainedCoordinators:
    """Coordinators that this broker took because the chosen broker did not, and may keep a while.

    All times are in seconds of one clock that only goes forward.
    """

    __slots__ = ("_candidates", "_me", "_since_s", "_until_s")

    def __init__(self, me: str) -> None:
        self._me = me
        self._candidates: frozenset[str] = frozenset()
        """The candidates when these coordinators were taken; others void them."""
        self._since_s: float | None = None
        """When something was first left alone among them."""
        self._until_s: dict[CoordinatorId, float] = {}

    @property
    def due_s(self) -> Sequence[float]:
        """When each may be surplus again."""
        return [*self._until_s.values()]

    def note(
        self, taken: Collection[CoordinatorId], candidates: Collection[str], now_s: float
    ) -> None:
        """This broker stands for what was left alone; nothing is kept where nobody may lead."""
        self._see(candidates)
        if not taken or not candidates:
            return
        if self._since_s is None:
            self._since_s = now_s
        for_s = min(max(now_s - self._since_s, COORDINATOR_KEPT_S), COORDINATOR_KEPT_MAX_S)
        self._until_s.update(dict.fromkeys(taken, now_s + for_s))

    def numbers(
        self, leaders: Mapping[CoordinatorId, str], candidates: Collection[str], now_s: float
    ) -> Collection[CoordinatorId]:
        """Return the coordinators to keep now; forget those that another broker leads."""
        self._see(candidates)
        self._until_s = {
            number: until_s
            for number, until_s in self._until_s.items()
            if until_s > now_s and leaders.get(number, self._me) == self._me
        }
        return self._until_s.keys()

    def _see(self, candidates: Collection[str]) -> None:
        if self._candidates != (seen := frozenset(candidates)):
            self._candidates, self._since_s = seen, None
            self._until_s.clear()


def _rank(number: CoordinatorId, broker_id: str) -> int:
    return zlib.crc32(f"{number} {broker_id}".encode())
