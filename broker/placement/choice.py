"""Which live broker gets what nobody owns, and what moves when load is uneven.  Pure.

Rules:

- A broker's *cost* is what it owns, weighted with how busy it is.  What nobody owns goes to the
  cheapest; among equals the name decides (rendezvous hashing), so that all who see the same choose
  the same, and a name comes back to the broker it had while nothing else has changed.
- Who gets a scalable topic that nobody leads is decided by its name alone: all brokers have to
  send its consumers to the same one, and a lead costs little.
- A *fair share* is what each would own if all were equally costly.  A broker sheds once it is above
  UNEVEN times that and one more, and then down to it: between both nothing moves (hysteresis).
- A round moves few, never what has moved lately, and nothing to a broker at its own share.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNEVEN: Final = 1.25
"""Above so many times its fair share a broker gives something away."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A broker that takes topics.  `load`: its busiest resource, 1.0 when there is no room."""

    broker_id: str
    owned: int
    load: float = 0.0

    @property
    def weight(self) -> float:
        """What one topic costs there."""
        return 1.0 + max(0.0, self.load)

    @property
    def cost(self) -> float:
        """What everything costs there, with one topic more."""
        return (self.owned + 1) * self.weight


@dataclass(frozen=True, slots=True)
class Move:
    """A name that is to go from one broker to another."""

    name: str
    source: str
    target: str


def rendezvous(name: str, broker_id: str) -> bytes:
    """How much a name belongs to a broker, whoever else there is; compare bytewise."""
    return hashlib.blake2b(f"{broker_id}\n{name}".encode(), digest_size=8).digest()


def choose(name: str, candidates: Collection[Candidate]) -> str | None:
    """The id of the broker that gets it; None when there is none to choose from."""
    if not candidates:
        return None
    lowest = min(one.cost for one in candidates)
    ids = [one.broker_id for one in candidates if one.cost == lowest]
    return ids[0] if len(ids) == 1 else choose_by_name(name, ids)


def choose_by_name(name: str, broker_ids: Collection[str]) -> str | None:
    """The id of the broker that a name chooses; None when there is none to choose from."""
    return max(broker_ids, key=lambda one: (rendezvous(name, one), one), default=None)


def fair_shares(candidates: Collection[Candidate]) -> dict[str, float]:
    """What each would own of all that is owned, if everybody's cost were the same."""
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
    """What one round moves, at most `limit`, never a name in `keep`.

    `owned` has the names of each broker; brokers that are no candidates are left alone.
    """
    shares = fair_shares(candidates)
    counts = {one.broker_id: one.owned for one in candidates}
    moves: list[Move] = []
    for source in sorted(counts, key=lambda one: (shares[one] - counts[one], one)):
        if counts[source] <= shares[source] * UNEVEN + 1:
            continue
        names = [name for name in owned.get(source, ()) if name not in keep]
        names.sort(key=lambda name: (rendezvous(name, source), name))
        for name in names:
            target = _roomiest(counts, shares, source)
            if len(moves) >= limit or counts[source] - 1 < shares[source] or target is None:
                break
            counts[source] -= 1
            counts[target] += 1
            moves.append(Move(name, source, target))
    return moves


def _roomiest(counts: Mapping[str, int], shares: Mapping[str, float], source: str) -> str | None:
    """Who is furthest below its share."""
    others = [one for one in counts if one != source]
    if not others:
        return None
    best = min(others, key=lambda one: (counts[one] - shares[one], one))
    return best if counts[best] < shares[best] else None
