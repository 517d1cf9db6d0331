"""The topics that are replicated in the bench, and the load of each kind."""

import time
from collections.abc import Callable
from typing import Final, Protocol

from tests.java.broker_under_test import BrokerUnderTest

NAMESPACE: Final = "geo/bench"
PAYLOAD_BYTES: Final = 1024
BATCH: Final = 100
DELAY_S: Final = 10.0
POLL_S: Final = 0.02
PATIENCE_S: Final = 300.0


class Topics(Protocol):
    """Topics of one kind; each is named `tenant/namespace/name`."""

    def make(self, first: BrokerUnderTest, second: BrokerUnderTest, topic: str) -> None:
        """Make a topic, unless its first message does."""
        ...

    def stored(self, broker: BrokerUnderTest, topic: str) -> int:
        """Messages that a broker has stored of it; 0 while it is not there."""
        ...

    def publish(self, broker: BrokerUnderTest, topic: str, count: int, *, batched: bool) -> None:
        """Publish so many messages, and wait until all are stored."""
        ...

    def delays_ms(
        self, first: BrokerUnderTest, second: BrokerUnderTest, topic: str, rate: int
    ) -> list[float]:
        """How long each message took that is published here at this rate, until it is there."""
        ...


def until(is_so: Callable[[], bool]) -> None:
    """Poll until it is so."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)
