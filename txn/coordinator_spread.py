"""The spread of transaction coordinators over several brokers.  Pure."""

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
    """Assign a broker id to each of `unled`; {} when there is no candidate.

    Each goes to the broker that leads fewest.  Brokers that know the same choose the same.
    """
    counts = dict.fromkeys(candidates, 0)
    for broker_id in leaders.values():
        if broker_id in counts:
            counts[broker_id] += 1
    chosen: dict[CoordinatorId, str] = {}
    for number in sorted(unled) if counts else ():
        # Among equals a hash of number and broker decides.
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
    """Return the coordinators that this broker is chosen for, else one that another left alone.

    `left_alone` are those of `unled` that the chosen broker did not take in time.  Any candidate
    takes them; any broker, if there is no candidate.  Those in `tried` are left out.
    """
    # A broker stands for all that it is chosen for at once.  Even if it knows old leaders, these
    # never make it lead more than an even share, rounded up.
    chosen = assign_successors(unled, leaders, candidates)
    mine = [number for number, broker_id in chosen.items() if broker_id == me]
    if new := [number for number in mine if number not in tried]:
        return new, []
    if candidates and me not in candidates:
        return [], []
    # One at a time, in an order of each broker's own, so that not all stand for the same one.
    alone = [number for number in left_alone if number not in tried]
    return [], sorted(alone, key=lambda number: (_rank(number, me), number))[:1]


def choose_surplus(
    me: str,
    leaders: Mapping[CoordinatorId, str],
    candidates: Collection[str],
    parallelism: int,
    kept: Collection[CoordinatorId] = (),
) -> list[CoordinatorId]:
    """Return the coordinators that this broker gives up: those above an even share, rounded up.

    Those in `kept` are never given up.
    """
    if me not in candidates:
        return []
    share = math.ceil(parallelism / len(candidates))
    led = [number for number, broker_id in leaders.items() if broker_id == me]
    led = [number for number in led if number not in kept]
    led.sort(key=lambda number: (_rank(number, me), number))
    return led[share:]


class RetainedCoordinators:
    """Coordinators that this broker took because the chosen broker did not, and keeps for a while.

    Else it would give them up to the broker that did not take them.  It keeps them for
    COORDINATOR_KEPT_S, and longer the longer that broker has left them alone, up to
    COORDINATOR_KEPT_MAX_S.  When the candidates change, none is kept, as shares change too.

    All times are seconds of one monotonic clock.
    """

    __slots__ = ("_candidates", "_me", "_since_s", "_until_s")

    def __init__(self, me: str) -> None:
        self._me = me
        self._candidates: frozenset[str] = frozenset()
        """The candidates when these coordinators were taken; others void them."""
        self._since_s: float | None = None
        """When a coordinator was first left alone among these candidates."""
        self._until_s: dict[CoordinatorId, float] = {}

    @property
    def due_s(self) -> Sequence[float]:
        """The times at which these coordinators may be given up again."""
        return [*self._until_s.values()]

    def note(
        self, taken: Collection[CoordinatorId], candidates: Collection[str], now_s: float
    ) -> None:
        """Keep coordinators that this broker takes now; none if there are no candidates."""
        self._set_candidates(candidates)
        if not taken or not candidates:
            return
        if self._since_s is None:
            self._since_s = now_s
        # So a broker that never takes one is offered it less and less often, and one that was away
        # is offered it after at most as long again.
        for_s = min(max(now_s - self._since_s, COORDINATOR_KEPT_S), COORDINATOR_KEPT_MAX_S)
        self._until_s.update(dict.fromkeys(taken, now_s + for_s))

    def numbers(
        self, leaders: Mapping[CoordinatorId, str], candidates: Collection[str], now_s: float
    ) -> Collection[CoordinatorId]:
        """Return the coordinators to keep now; forget those that another broker leads."""
        self._set_candidates(candidates)
        self._until_s = {
            number: until_s
            for number, until_s in self._until_s.items()
            if until_s > now_s and leaders.get(number, self._me) == self._me
        }
        return self._until_s.keys()

    def _set_candidates(self, candidates: Collection[str]) -> None:
        if self._candidates != (seen := frozenset(candidates)):
            self._candidates, self._since_s = seen, None
            self._until_s.clear()


def _rank(number: CoordinatorId, broker_id: str) -> int:
    return zlib.crc32(f"{number} {broker_id}".encode())
