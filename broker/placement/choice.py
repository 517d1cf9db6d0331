"""The broker that is chosen for an unowned name, and the moves that even out load.  Pure."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNEVEN: Final = 1.25
"""A broker gives names away once it owns more than this many times its fair share, plus one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A broker that takes topics.

    `owned` counts its names; `load` is the use of its busiest resource, from 0.0 to 1.0.
    """

    broker_id: str
    owned: int
    load: float = 0.0

    @property
    def weight(self) -> float:
        """The cost of one topic on this broker: 1.0 when it is idle, 2.0 when it is busy."""
        return 1.0 + max(0.0, self.load)

    @property
    def cost(self) -> float:
        """The cost of all its topics and one more."""
        return (self.owned + 1) * self.weight


@dataclass(frozen=True, slots=True)
class Move:
    """A name that is to go from one broker to another."""

    name: str
    source: str
    target: str


def rendezvous(name: str, broker_id: str) -> bytes:
    """The rank of a broker for a name (rendezvous hashing): the highest bytes win.

    It depends on no other broker, so a broker that comes or goes changes few choices.
    """
    return hashlib.blake2b(f"{broker_id}\n{name}".encode(), digest_size=8).digest()


def choose(name: str, candidates: Collection[Candidate]) -> str | None:
    """The id of the broker with the lowest cost; None when there are no candidates."""
    if not candidates:
        return None
    # Among equals the name decides: brokers that know the same choose the same, and a name returns
    # to the broker it had while nothing else has changed.
    lowest = min(one.cost for one in candidates)
    ids = [one.broker_id for one in candidates if one.cost == lowest]
    return ids[0] if len(ids) == 1 else choose_by_name(name, ids)


def choose_by_name(name: str, broker_ids: Collection[str]) -> str | None:
    """The id of the broker with the highest rank for a name; None when there are none.

    It decides alone for leads of scalable topics: all brokers have to send their consumers to the
    same one, and a lead costs little.
    """
    return max(broker_ids, key=lambda one: (rendezvous(name, one), one), default=None)


def fair_shares(candidates: Collection[Candidate]) -> dict[str, float]:
    """How many names each broker would own, by its id, if the costs of all were equal."""
    total = sum(one.owned for one in candidates)
    parts = sum(1.0 / one.weight for one in candidates)
    return {one.broker_id: total / one.weight / parts for one in candidates}


def plan_moves(
    owned: Mapping[str, Sequence[str]],
    candidates: Collection[Candidate],
    *,
    limit: int,
    keep: Collection[str] = (),
) -> list[Move]:
    """The moves of one round: at most `limit`, never a name in `keep`.

    `owned` has the names of each broker; brokers that are no candidates are left alone.  A broker
    well above its fair share gives names away down to that share, each to the broker that is
    furthest below its own.
    """
    shares = fair_shares(candidates)
    counts = {one.broker_id: one.owned for one in candidates}
    moves: list[Move] = []
    for source in sorted(counts, key=lambda one: (shares[one] - counts[one], one)):
        # Between its share and this limit a broker keeps what it has, so that no name goes to and
        # fro (hysteresis).
        if counts[source] <= shares[source] * UNEVEN + 1:
            continue
        names = [name for name in owned.get(source, ()) if name not in keep]
        names.sort(key=lambda name: (rendezvous(name, source), name))
        for name in names:
            target = _furthest_below_share(counts, shares, source)
            if len(moves) >= limit or counts[source] - 1 < shares[source] or target is None:
                break
            counts[source] -= 1
            counts[target] += 1
            moves.append(Move(name, source, target))
    return moves


def _furthest_below_share(
    counts: Mapping[str, int], shares: Mapping[str, float], source: str
) -> str | None:
    """The id of the broker furthest below its share, other than `source`; None if none is."""
    others = [one for one in counts if one != source]
    if not others:
        return None
    best = min(others, key=lambda one: (counts[one] - shares[one], one))
    return best if counts[best] < shares[best] else None
