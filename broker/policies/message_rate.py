"""Rates that policies set, and their JSON of Apache Pulsar.  Pure.

A number that is missing, 0 or -1 is no limit, as in Pulsar.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from broker.policies.json_numbers import INT32_MAX, LARGEST, is_number

MESSAGES_PUBLISHED: Final = "publishThrottlingRateInMsg"
BYTES_PUBLISHED: Final = "publishThrottlingRateInByte"
MESSAGES_DISPATCHED: Final = "dispatchThrottlingRateInMsg"
BYTES_DISPATCHED: Final = "dispatchThrottlingRateInByte"
IS_RELATIVE: Final = "relativeToPublishRate"
SUBSCRIBES: Final = "subscribeThrottlingRatePerConsumer"
PERIOD: Final = "ratePeriodInSecond"
SUBSCRIBE_PERIOD_S: Final = 30
"""Pulsar's period of a subscribe rate that names none."""


@dataclass(frozen=True, slots=True)
class MessageRate:
    """Numbers of messages and of bytes in a period; 0 is no limit.

    If it `is_relative`, the rate at which the topic is published to is added to both.
    """

    messages: int
    size_bytes: int
    period_s: int = 1
    is_relative: bool = False


@dataclass(frozen=True, slots=True)
class SubscribeRate:
    """A number of SUBSCRIBEs of one consumer in a period."""

    subscribes: int
    period_s: int


def is_publish_rate(value: object) -> bool:
    """Whether this is a valid publishRate."""
    return _has_numbers(value, {MESSAGES_PUBLISHED: INT32_MAX, BYTES_PUBLISHED: LARGEST})


def is_dispatch_rate(value: object) -> bool:
    """Whether this is a valid dispatchRate, or subscriptionDispatchRate."""
    numbers = {MESSAGES_DISPATCHED: INT32_MAX, BYTES_DISPATCHED: LARGEST, PERIOD: INT32_MAX}
    if not isinstance(value, dict) or not isinstance(value.get(IS_RELATIVE, False), bool):
        return False
    rest = {member: each for member, each in value.items() if member != IS_RELATIVE}
    return _has_numbers(rest, numbers)


def is_subscribe_rate(value: object) -> bool:
    """Whether this is a valid subscribeRate."""
    return _has_numbers(value, {SUBSCRIBES: INT32_MAX, PERIOD: INT32_MAX})


def publish_rate_of(value: Mapping[str, object]) -> MessageRate | None:
    """The rate of a valid publishRate; None if it limits nothing."""
    return _limiting(
        MessageRate(_number(value.get(MESSAGES_PUBLISHED)), _number(value.get(BYTES_PUBLISHED)))
    )


def dispatch_rate_of(value: Mapping[str, object]) -> MessageRate | None:
    """The rate of a valid dispatchRate; None if it limits nothing."""
    return _limiting(
        MessageRate(
            _number(value.get(MESSAGES_DISPATCHED)),
            _number(value.get(BYTES_DISPATCHED)),
            max(_number(value.get(PERIOD)), 1),
            value.get(IS_RELATIVE) is True,
        )
    )


def subscribe_rate_of(value: Mapping[str, object]) -> SubscribeRate | None:
    """The rate of a valid subscribeRate; None if it limits nothing."""
    subscribes = _number(value.get(SUBSCRIBES))
    period_s = _number(value.get(PERIOD, SUBSCRIBE_PERIOD_S))
    return SubscribeRate(subscribes, max(period_s, 1)) if subscribes else None


def _has_numbers(value: object, most: Mapping[str, int]) -> bool:
    """Whether a value has some of these members and no others, each from -1 to its maximum."""
    return (
        isinstance(value, dict)
        and bool(value)
        and value.keys() <= most.keys()
        and all(is_number(each, -1, most[member]) for member, each in value.items())
    )


def _number(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _limiting(rate: MessageRate) -> MessageRate | None:
    return rate if rate.messages or rate.size_bytes else None
