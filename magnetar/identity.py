"""The numbers by which a broker knows what this client has there.  Pure.

Rules: each kind counts from 1; no number is used twice in the life of a client, so a late answer
never meets the wrong one, and something keeps its number when it moves to another connection.
"""

from itertools import count

from magnetar.protocol.ids import ConsumerId, ProducerId, RequestId

__all__ = ["Identities"]


class Identities:
    """Counters of one client."""

    __slots__ = ("_consumers", "_producers", "_requests", "_sessions")

    def __init__(self) -> None:
        self._producers = count(1)
        self._consumers = count(1)
        self._sessions = count(1)
        self._requests = count(1)

    def producer_id(self) -> ProducerId:
        """Of a PRODUCER."""
        return ProducerId(next(self._producers))

    def consumer_id(self) -> ConsumerId:
        """Of a SUBSCRIBE, or of a SCALABLE_TOPIC_SUBSCRIBE: both are of one kind."""
        return ConsumerId(next(self._consumers))

    def session_id(self) -> int:
        """Of a watch: of a layout, a namespace, the transaction coordinators."""
        return next(self._sessions)

    def request_id(self) -> RequestId:
        """Of what is answered; a connection gives it to what it is asked to request."""
        return RequestId(next(self._requests))
