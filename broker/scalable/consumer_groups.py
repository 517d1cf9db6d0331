"""What the ordered consumers of each subscription need of a layout.  Pure.

Consumers of a group that can share segments each need an entry bucket (PIP-486); those of any other
group each need a segment.  CHECKPOINT consumers never share, and one client of an older version
ends sharing in its group.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """The number of registered consumers of one subscription, and whether they can share."""

    consumers: int
    is_stream: bool = True
    """Whether it is a STREAM subscription, not a CHECKPOINT one."""
    can_share: bool = False
    """Whether all its clients, and the stored batches of all segments, allow them to share."""


def largest(groups: Collection[ConsumerGroup]) -> int:
    """The number of consumers of the group that has most; 0 without any."""
    return max((group.consumers for group in groups), default=0)


def need_segments(groups: Collection[ConsumerGroup]) -> int:
    """The segments that the groups which cannot share need."""
    return largest([group for group in groups if not group.can_share])


def need_buckets(groups: Collection[ConsumerGroup]) -> int:
    """The entry buckets that the groups which can share need."""
    return largest([group for group in groups if group.can_share])


def unable_to_share(groups: Collection[ConsumerGroup]) -> int:
    """The consumers of the largest STREAM group whose clients, or the batches, forbid sharing."""
    return largest([group for group in groups if group.is_stream and not group.can_share])
