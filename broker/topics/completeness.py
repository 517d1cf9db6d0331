"""Pure: of which clusters a replicated subscription of a segment has had every copy (F11).

A subscription that is made when copies are there, or were, may lack some.  That none is left then
does not say that they are consumed.  The rule is in
`../../docs/decisions/replicated-subscriptions-of-segments.md`.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from broker.topics.replicated_ranges import EVERYTHING, SourceSegment
from config.bounds import RECEIVED_SEGMENTS_NOTED
from magnetar.protocol.ids import Position

Received = Mapping[SourceSegment, Position]
"""By source segment, the last entry that was received."""


@dataclass(frozen=True, slots=True)
class Completeness:
    """What is noted with the cursor of a replicated subscription.

    `from_start`: it was made at the first entry of a log of which nothing had been dropped.
    `made_for` is the cluster for whose subscription it was made, "" if a consumer or an operator
    made it.  `clusters` are those of which nothing is missing in it that their own subscription
    had not consumed.  `received` is what the segment had received of others when it was made: no
    more can be missing.  It is None if that is not noted.
    """

    from_start: bool = False
    made_for: str = ""
    clusters: frozenset[str] = frozenset()
    received: Received | None = None

    @classmethod
    def parse(cls, note: str) -> Self:
        """What a cursor's note says.  Raises ValueError."""
        return cls.from_json(json.loads(note)) if note else cls()

    @property
    def note(self) -> str:
        """What the cursor notes; "" if there is nothing to say."""
        return "" if self == INCOMPLETE else json.dumps(self.to_json(), separators=(",", ":"))

    def to_json(self) -> dict[str, object]:
        """The JSON that brokers send each other."""
        return {
            "fromStart": self.from_start,
            "madeFor": self.made_for,
            "clusters": sorted(self.clusters),
            "received": None
            if self.received is None
            else [
                [cluster, f"{number:016x}", segment_id, *last]
                for (cluster, number, segment_id), last in self.received.items()
            ],
        }

    @classmethod
    def from_json(cls, members: object) -> Self:
        """Decode the JSON of another broker.  Raises ValueError."""
        match members:
            case {
                "fromStart": bool(from_start),
                "madeFor": str(made_for),
                "clusters": list(names),
                "received": None | list() as rows,
            }:
                received = None if rows is None else dict(map(_row, rows))
                return cls(from_start, made_for, frozenset(map(str, names)), received)
        raise ValueError(f"{members!r} says nothing of how complete a subscription is")

    def complete_for(self, cluster: str) -> Self:
        """The same, once nothing of this cluster is missing."""
        received = self.received
        if received is not None:
            received = {each: last for each, last in received.items() if each.cluster != cluster}
        return replace(self, clusters=self.clusters | {cluster}, received=received)

    def begun(self, received: Received, *, from_start: bool) -> Self:
        """The same of a subscription that is made now, where so much was received."""
        noted = received if len(received) <= RECEIVED_SEGMENTS_NOTED else None
        return replace(self, from_start=from_start, received=noted)

    def made_here(self) -> Self:
        """The same, once the cluster that it was made for has answered: it counts as made here."""
        return replace(self, made_for="")

    @classmethod
    def inherited(cls, parents: Iterable[Self | None]) -> Self:
        """That of a child, at its first entry; None for a parent without the subscription."""
        found = list(parents)
        known = [each for each in found if each is not None]
        made_for = {each.made_for for each in known}
        child = cls(True, made_for.pop() if len(made_for) == 1 else "")
        if not known or len(known) < len(found):
            return child
        clusters = frozenset.intersection(*(each.clusters for each in known))
        received: dict[SourceSegment, Position] = {}
        for each in known:
            if each.received is None:
                return replace(child, clusters=clusters)
            for source, last in each.received.items():
                received[source] = max(last, received.get(source, last))
        return replace(child, clusters=clusters, received=received)


INCOMPLETE: Final = Completeness()


def _row(row: object) -> tuple[SourceSegment, Position]:
    match row:
        case [str(cluster), str(incarnation), int(segment_id), int(ledger_id), int(entry_id)]:
            source = SourceSegment(cluster, int(incarnation, 16), segment_id)
            return source, Position(ledger_id, entry_id)
    raise ValueError(f"{row!r} says nothing of what was received")


def received_of(received: Received, cluster: str, incarnation: int) -> dict[int, Position]:
    """What was received of one topic, by the ids of its segments."""
    return {
        each.segment_id: last
        for each, last in received.items()
        if (each.cluster, each.incarnation) == (cluster, incarnation)
    }


def still_lacking(
    lacking: Mapping[int, Position], below: Mapping[int, Position], segments: Collection[int]
) -> dict[int, Position]:
    """The source segments of which copies may be missing that are not consumed in their cluster.

    `lacking` has by source segment the last copy that may be missing, `below` how far each one is
    acknowledged in its cluster now, and `segments` are those that it still has (F8).
    """

    def is_consumed(segment_id: int, last: Position) -> bool:
        told = below.get(segment_id)
        return told is not None and (told > last or told == EVERYTHING.position)

    return {
        segment_id: last
        for segment_id, last in lacking.items()
        if segment_id in segments and not is_consumed(segment_id, last)
    }
