"""Pure: counters of which rates are taken, and the rates under the names of Pulsar's tools.

The numbers of each type are counters, or what those grew per second: see
`broker.topics.rates`.
"""

from typing import NamedTuple


class Published(NamedTuple):
    """Messages and bytes of one producer, and messages that were dropped."""

    messages: float
    bytes: float
    dropped: float

    def as_members(self) -> dict[str, float]:
        """The rates as members of PublisherStats."""
        return incoming_members(self.messages, self.bytes)


class Delivered(NamedTuple):
    """Messages and bytes of one consumer."""

    messages: float
    bytes: float
    redelivered: float
    acknowledged: float

    def as_members(self) -> dict[str, float]:
        """The rates as members of SubscriptionStats and ConsumerStats."""
        return {
            **outgoing_members(self.messages, self.bytes),
            "msgRateRedeliver": self.redelivered,
            "messageAckRate": self.acknowledged,
        }


class SubscriptionTraffic(NamedTuple):
    """Messages and bytes of one subscription, and entries that expired."""

    messages: float
    bytes: float
    redelivered: float
    acknowledged: float
    expired: float

    def as_members(self) -> dict[str, float]:
        """The rates as members of SubscriptionStats."""
        return {**Delivered(*self[:-1]).as_members(), "msgRateExpired": self.expired}


class Traffic(NamedTuple):
    """Messages and bytes of one topic, in and out."""

    messages_in: float
    bytes_in: float
    messages_out: float
    bytes_out: float

    def as_members(self) -> dict[str, float]:
        """The rates as members of TopicStats."""
        return {
            **incoming_members(self.messages_in, self.bytes_in),
            **outgoing_members(self.messages_out, self.bytes_out),
        }


def incoming_members(messages: float, size_bytes: float) -> dict[str, float]:
    """Rates in, and the average size of a message; 0 without messages."""
    return {
        "msgRateIn": messages,
        "msgThroughputIn": size_bytes,
        "averageMsgSize": size_bytes / messages if messages else 0.0,
    }


def outgoing_members(messages: float, size_bytes: float) -> dict[str, float]:
    """Rates out."""
    return {"msgRateOut": messages, "msgThroughputOut": size_bytes}
