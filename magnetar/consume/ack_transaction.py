"""What a segment consumer must know of what it is subscribed to, and of transactions.

Pure.  Both are protocols: who has them looks at nothing else of them.
"""

import asyncio
from typing import Protocol

__all__ = ["AckTransaction", "Subscribed"]


class Subscribed(Protocol):
    """What is subscribed to."""

    @property
    def segment_id(self) -> int:
        """Its id in the topic."""

    @property
    def topic(self) -> str:
        """The name to attach to."""


class AckTransaction(Protocol):
    """What is known of a transaction here."""

    @property
    def id(self) -> tuple[int, int]:
        """Most and least bits."""

    def acknowledging_on(self, topic: str, subscription: str) -> asyncio.Future[None] | None:
        """None: the coordinator knows; else acknowledgements wait for it."""

    def track(self, outcome: "asyncio.Future[object]") -> None:
        """The transaction waits for it before it commits, and aborts if it fails."""
