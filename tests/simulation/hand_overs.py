"""Judges the order of keys at ordered consumers (B1, B2, B4, B7).

The rules are in `docs/decisions/entry-buckets.md`.

A place is a segment's id, ledger, entry, and the place in the batch.  The messages of a key are
stored in the order of their places, over the segments too.

A consumer has a message until it acknowledges it, asks for it again, or detaches.  A history does
not tell when a consumer that vanished was detached.  So a consumer counts as attached until its
last delivery by an owner of the segment.  What a broker sends that has been replaced shows nothing:
the new owner does not know of that consumer, which may miss its grace period.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.simulation.history import Acked, Delivered, History, Place, Txn

_FAILOVER = "persistent://"
"""Topics whose ordered consumers are of Failover subscriptions: a new active consumer begins at the
first message that is not acknowledged, which the one before it may still have, as in Pulsar.  So
the same message may be at both, but none that is behind it goes to one that lacks it."""
IN_FLIGHT_S = 2.0
"""The longest that an acknowledgement is under way."""

CommittedAt = Callable[[Txn], float | None]


def broken_hand_overs(
    history: History, subscription: str, committed_at: CommittedAt
) -> Iterator[str]:
    """Messages that were sent to a consumer while another one had an earlier message of the key."""
    found = _Places(committed_at)
    last_of: dict[int, float] = {}
    for each in history.deliveries:
        if not each.stale:
            last_of[each.attachment] = max(last_of.get(each.attachment, 0.0), each.written_at)
    events: list[tuple[float, int, int, Delivered | Acked]] = [
        (ack.at, 0, number, ack)
        for number, ack in enumerate(history.acks)
        if ack.subscription == subscription
    ]
    events += [
        (each.written_at, 1, number, each)
        for number, each in enumerate(history.deliveries)
        if each.subscription == subscription and not each.stale
    ]
    for _, _, _, event in sorted(events, key=lambda each: each[:3]):
        message = history.messages.get(event.message)
        if message is None:
            continue
        key = (message.topic, message.key)
        if isinstance(event, Acked):
            found.acknowledged(event)
            continue
        for before in found.unsettled_before(key, event):
            yield (
                f"hand-over: {event.message} was sent to {event.consumer} at "
                f"{event.written_at:.6f} s, while {before.consumer} had {before.message} "
                f"of the same key since {before.written_at:.6f} s"
            )
        earlier = found.out[key].get(_place(event))
        # The earlier consumer got something later, so it was attached all the time.
        if (
            earlier is not None
            and not message.topic.startswith(_FAILOVER)
            and earlier.attachment != event.attachment
            and not earlier.returned
            and last_of[earlier.attachment] > event.written_at
            and not found.is_settled(earlier, event.written_at)
        ):
            yield (
                f"hand-over: {event.message} was sent to {event.consumer} at "
                f"{event.written_at:.6f} s, while {earlier.consumer} had it"
            )
        found.out[key][_place(event)] = event


class _Places:
    """The messages that consumers have, by key, and how each was acknowledged."""

    def __init__(self, committed_at: CommittedAt) -> None:
        self.out: defaultdict[tuple[str, str], dict[Place, Delivered]] = defaultdict(dict)
        self._acks: defaultdict[Place, list[Acked]] = defaultdict(list)
        self._committed_at = committed_at

    def acknowledged(self, ack: Acked) -> None:
        self._acks[_place(ack)].append(ack)

    def unsettled_before(self, key: tuple[str, str], delivery: Delivered) -> list[Delivered]:
        """The earlier messages of a key that others have, or had and never acknowledged."""
        out, place = self.out[key], _place(delivery)
        for each in [each for each in out if each < place]:
            if self.is_settled(out[each], delivery.written_at):
                del out[each]
        return [
            had
            for each, had in out.items()
            if each < place and had.attachment != delivery.attachment
        ]

    def is_settled(self, delivery: Delivered, at: float) -> bool:
        """Whether a delivered message may be acknowledged by then."""
        for ack in self._acks[_place(delivery)]:
            if ack.txn is not None:
                committed = self._committed_at(ack.txn)
                if committed is not None and committed <= at:
                    return True
            elif ack.at > delivery.written_at - IN_FLIGHT_S:
                return True
        return False


def _place(event: Delivered | Acked) -> Place:
    _, _, number = event.segment.rpartition("-")
    return (int(number) if number.isdigit() else 0, *event.position)
