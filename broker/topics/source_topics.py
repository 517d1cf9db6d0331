"""What the sender of a segment has to know of its own scalable topic."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from magnetar.protocol.names import SegmentName, TopicName


class SourceTopic(NamedTuple):
    """A scalable topic as its record says, as one of its segments sees it.

    `segments` are the ids of all of them at `layout_epoch`, `ancestors` those of the segment, and
    `active` is how many are ACTIVE.
    """

    incarnation: int
    layout_epoch: int
    segments: frozenset[int]
    ancestors: frozenset[int]
    active: int


class SourceTopics(Protocol):
    """The scalable topics of this cluster."""

    def on_incarnation(self, listener: Callable[[TopicName, int | None], None]) -> None:
        """Call `listener` with a topic that is in memory and its incarnation, if it has another."""
        ...

    async def read(self, segment: SegmentName) -> SourceTopic:
        """The topic of a segment, as new as any change that was answered.

        Raises `TopicNotFound` if its layout does not have the segment any more.
        """
        ...

    async def may_send(self, segment: SegmentName, cursor: str, drained: set[int]) -> bool:
        """Whether all ancestors of a segment are drained for the cluster of this cursor (R2).

        `drained` has those that were found so before; the others that are found so are added.
        Raises `TopicNotFound`, and as the requests to the owners of the ancestors.
        """
        ...

    async def renew_incarnation(self, segment: SegmentName, incarnation: int) -> None:
        """Give the topic another number, unless it has another one than `incarnation` already.

        Its positions went back: what it sends is new to other clusters from now on.
        """
        ...
