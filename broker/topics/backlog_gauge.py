"""Size and age of a topic's backlog, as backlog quotas count them: cheap enough for each check."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, NamedTuple, Protocol
from weakref import ref

import structlog

from broker.policies.backlog_quotas import BacklogQuota, QuotaType
from broker.topics.dispatch.entry_facts import publish_time_ms
from broker.topics.dispatch.source import ReadableTopic
from broker.topics.subscription import Subscription
from broker.topics.weak_references import require_present
from config.bounds import BACKLOGS_READ_AT_ONCE, READ_BATCH_BYTES
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR

log = structlog.get_logger(__name__)


class BacklogQuotaExceeded(PeerError):
    """The backlog is over its quota, and producers wait: try again, or acknowledge messages."""

    code: ClassVar[ServerError] = ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR


class BacklogQuotaFailure(BacklogQuotaExceeded):
    """The backlog is over its quota, and producers fail: acknowledge messages first."""

    code: ClassVar[ServerError] = ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION


class GaugedTopic(ReadableTopic, Protocol):
    """A topic with subscriptions."""

    @property
    def followers(self) -> Sequence[Subscription]:
        """Its subscriptions, and the positions of replicators."""
        ...


class OldestMessage(NamedTuple):
    """The oldest message that a subscription has not acknowledged."""

    subscription: str
    position: Position
    published_ms: int
    """By the producer's clock; 0 if that cannot be read."""


class BacklogGauge:
    """Measures the backlog of one topic.

    Durable subscriptions count, without `__compaction`: it holds data for compaction, not for
    consumers, and would lose it for ever.  The size is that of the ledgers behind the slowest
    mark-delete position, in proportion within its ledger; no entries are read for it.  For the age
    one entry is read, when another one has become the oldest.
    """

    __slots__ = ("_oldest", "_topic", "evictions")

    def __init__(self, topic: GaugedTopic) -> None:
        self._topic = ref(topic)
        self._oldest: OldestMessage | None = None
        self.evictions = dict.fromkeys(QuotaType, 0)
        """Number of times that subscriptions lost messages, by the quota, since the load."""

    async def subscriptions(self) -> AsyncIterator[Subscription]:
        """The subscriptions that have a backlog, BACKLOGS_READ_AT_ONCE in a turn of the loop."""
        known = require_present(self._topic).followers
        for number, each in enumerate(known, start=1):
            if self.counts(each):
                yield each
            if number % BACKLOGS_READ_AT_ONCE == 0:
                await asyncio.sleep(0)

    @staticmethod
    def counts(subscription: Subscription) -> bool:
        """Whether a subscription has a backlog that quotas know."""
        return bool(
            subscription.durable and subscription.name != COMPACTION_CURSOR and subscription.backlog
        )

    async def size_bytes(self) -> int:
        """Bytes behind the slowest subscription; 0 without a backlog."""
        slowest: Position | None = None
        async for each in self.subscriptions():
            at = each.cursor.mark_delete
            slowest = at if slowest is None else min(slowest, at)
        return 0 if slowest is None else require_present(self._topic).ledger.size_after(slowest)

    async def oldest(self) -> OldestMessage | None:
        """The oldest message of all backlogs; None without any.  Raises the errors of reading."""
        found: tuple[Position, str] | None = None
        async for each in self.subscriptions():
            first = (each.cursor.first_unacknowledged(EARLIEST), each.name)
            found = first if found is None else min(found, first)
        if found is None:
            return None
        position, subscription = found
        known = self._oldest
        if known is None or known.position != position:
            entries = await require_present(self._topic).ledger.read(
                position, max_entries=1, max_bytes=READ_BATCH_BYTES
            )
            if not entries:
                return None  # it has just been trimmed
            # As for TTL, one whose time cannot be read is older than all others.
            known = OldestMessage(subscription, position, publish_time_ms(entries[0].data))
        self._oldest = known._replace(subscription=subscription)
        return self._oldest

    async def exceeds(self, quota: BacklogQuota) -> bool:
        """Whether the backlog reaches a quota.  Raises the errors of reading."""
        if quota.type is QuotaType.SIZE:
            return quota.is_exceeded_by_size(await self.size_bytes())
        now_ms = require_present(self._topic).context.clock.now_ms()
        oldest = await self.oldest()
        return quota.is_exceeded_by_age(None if oldest is None else oldest.published_ms, now_ms)

    async def require_room(self) -> None:
        """Raise `BacklogQuotaExceeded` if a quota that refuses producers is reached."""
        topic = require_present(self._topic)
        for quota in (topic.policies.size_quota, topic.policies.age_quota):
            if quota is not None and not quota.evicts and await self._is_known_to_exceed(quota):
                failure = BacklogQuotaFailure if quota.fails_producers else BacklogQuotaExceeded
                limit = f"{quota.limit} {'bytes' if quota.type is QuotaType.SIZE else 's'}"
                raise failure(
                    f"The backlog of {topic.name} has reached its quota of {limit} and takes no "
                    f"producers ({quota.policy.value}): acknowledge messages, or raise the quota."
                )

    async def _is_known_to_exceed(self, quota: BacklogQuota) -> bool:
        """Whether the backlog reaches a quota; False if that cannot be read now."""
        # New messages go to other ledgers: one that is away keeps nobody from publishing.
        try:
            return await self.exceeds(quota)
        except MagnetarError as error:
            log.warning(
                "backlog_age_unknown",
                topic=str(require_present(self._topic).name),
                error=str(error),
            )
            return False
