"""What a topic knows of its replication to other clusters."""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from broker.topics.source_positions import REPLICATOR_PREFIX
from broker.topics.subscription_markers import Snapshot
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    PositionsTold,
    SubscriptionState,
)


def is_replicator_cursor(name: str) -> bool:
    """Whether a cursor is that of a replicator, and no subscription."""
    return name.startswith(REPLICATOR_PREFIX)


class OutboundStats(NamedTuple):
    """What is sent to one other cluster, since the topic was loaded."""

    messages: int
    bytes: int
    messages_per_s: float
    bytes_per_s: float
    expired: int
    """Entries that were too old to be sent."""
    expired_per_s: float
    backlog: int
    """Entries that the other cluster does not have yet."""
    connected: bool
    delay_s: float
    """How long the oldest entry that was sent waits for its receipt."""
    connection: str | None
    """The address of the other cluster's broker; None while there is no connection."""
    connected_ms: int
    failure: str | None
    """Why nothing is sent; None if nothing is known to be wrong."""
    opened_batches: int = 0
    """Batches of a segment that were opened, as their messages are for several segments there."""
    dropped: int = 0
    """Messages of a non-persistent topic that were not sent."""
    dropped_per_s: float = 0.0
    incomplete_list: str | None = None
    """Which clusters the other cluster's list lacks; None if none is known to be missing."""

    @classmethod
    def not_begun(cls, backlog: int, failure: str) -> "OutboundStats":
        """That of a cluster to which nothing can be sent yet."""
        return cls(
            messages=0,
            bytes=0,
            messages_per_s=0.0,
            bytes_per_s=0.0,
            expired=0,
            expired_per_s=0.0,
            backlog=backlog,
            connected=False,
            delay_s=0.0,
            connection=None,
            connected_ms=0,
            failure=failure,
        )


class SubscriptionPositions(Protocol):
    """The replicated subscriptions of a segment, by source positions."""

    async def state(self, cluster: str) -> SubscriptionState:
        """How far they have come, for another cluster."""
        ...

    async def take_positions(self, told: PositionsTold) -> CopiesLeft:
        """Acknowledge what is acknowledged in the cluster that it is from.

        Raises `StaleSender` if a newer layout of that topic is known.
        """
        ...

    async def note_complete(self, cluster: str, subscriptions: Collection[str]) -> None:
        """Note durably of which subscriptions nothing of a cluster is missing here."""
        ...

    async def take_answer(self, answer: CopiesAnswered) -> None:
        """Acknowledge what is acknowledged in a cluster that has copies of it."""
        ...


class TopicReplication(Protocol):
    """Sends the entries of one loaded topic to other clusters, as its policies say."""

    @property
    def positions(self) -> SubscriptionPositions | None:
        """Its replicated subscriptions, if it is a segment that is replicated by itself."""
        ...

    @property
    def idle(self) -> bool:
        """Whether the other clusters have all that they are to get."""
        ...

    async def open(self) -> None:
        """Make the cursors of replicators that are missing: the topic is being loaded.

        Then no message is stored before.  Raises `MetadataError`.
        """
        ...

    def apply(self) -> None:
        """Begin and end to replicate as the policies of the topic say now."""
        ...

    @property
    def cached_snapshots(self) -> int:
        """Most snapshots that a replicated subscription remembers; 0: none is replicated."""
        ...

    def subscriptions_changed(self) -> None:
        """Note that a subscription is to be replicated from now on, or no longer."""
        ...

    def subscription_passed(self, subscription: str, snapshot: Snapshot) -> None:
        """Note that a replicated subscription has consumed everything up to a snapshot."""
        ...

    def topic_sealed(self) -> None:
        """Note that nothing will be appended to the topic any more."""
        ...

    def sample_rates(self, now_s: float) -> None:
        """Read the counters of what is sent; `now_s` is the event loop's time."""
        ...

    def outbound_stats(self, now_s: float) -> Mapping[str, OutboundStats]:
        """What is sent, by the other cluster."""
        ...

    async def close(self) -> None:
        """Send nothing more: the topic is closed here.  Bounded in time."""
        ...


class NoReplication:
    """That of a topic which is never sent to other clusters."""

    idle = True
    cached_snapshots = 0
    positions = None

    @classmethod
    def of(cls, topic: object) -> "NoReplication":
        """That of any topic."""
        return cls()

    async def open(self) -> None:
        """Do nothing."""

    def apply(self) -> None:
        """Do nothing."""

    def send(self, entry: bytes) -> None:
        """Do nothing."""

    def subscriptions_changed(self) -> None:
        """Do nothing."""

    def subscription_passed(self, subscription: str, snapshot: Snapshot) -> None:
        """Do nothing."""

    def topic_sealed(self) -> None:
        """Do nothing."""

    def sample_rates(self, now_s: float) -> None:
        """Do nothing."""

    def outbound_stats(self, now_s: float) -> Mapping[str, OutboundStats]:
        """None."""
        return {}

    async def close(self) -> None:
        """Do nothing."""


class NonPersistentReplication(Protocol):
    """Sends the messages of one non-persistent topic to other clusters, as its policies say."""

    def apply(self) -> None:
        """Begin and end to replicate as the policies of the topic say now."""
        ...

    def send(self, entry: bytes) -> None:
        """Send an entry that was published, or drop it."""
        ...

    def sample_rates(self, now_s: float) -> None:
        """Read the counters of what is sent; `now_s` is the event loop's time."""
        ...

    def outbound_stats(self, now_s: float) -> Mapping[str, OutboundStats]:
        """What is sent, by the other cluster."""
        ...

    async def close(self) -> None:
        """Send nothing more: the topic is closed here.  Bounded in time."""
        ...
