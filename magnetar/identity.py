"""The ids of a client's producers, consumers, sessions and requests.  Pure."""

from itertools import count
from typing import Final

from magnetar.protocol.ids import ConsumerId, ProducerId, RequestId

__all__ = ["FIRST_REQUESTS", "Identities"]

FIRST_REQUESTS: Final = (2**40, 2**62)
"""The range of the random number at which a client begins to count requests."""


class Identities:
    """Counts the ids of one client, each kind from 1 on, requests from `first_request` on.

    No id is used twice.  So a late answer never reaches the wrong receiver, and a producer or
    consumer keeps its id on another connection.  Where `first_request` is random, as in Pulsar's
    Java client, a broker that deduplicates tells clients apart by it.
    """

    __slots__ = ("_consumers", "_producers", "_requests", "_sessions")

    def __init__(self, first_request: int = 1) -> None:
        self._producers = count(1)
        self._consumers = count(1)
        self._sessions = count(1)
        self._requests = count(first_request)

    def producer_id(self) -> ProducerId:
        """The next id for a PRODUCER."""
        return ProducerId(next(self._producers))

    def consumer_id(self) -> ConsumerId:
        """The next id for a SUBSCRIBE or a SCALABLE_TOPIC_SUBSCRIBE, which share one counter."""
        return ConsumerId(next(self._consumers))

    def session_id(self) -> int:
        """The next id for a watch of a layout, a namespace or the transaction coordinators."""
        return next(self._sessions)

    def request_id(self) -> RequestId:
        """The next id for a request; `Connection.request` sets it."""
        return RequestId(next(self._requests))
