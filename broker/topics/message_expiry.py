"""Messages that count as acknowledged because they are too old (message TTL)."""

from collections.abc import Callable, Mapping

import structlog

from broker.topics.dispatch.start_position import first_published_since
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR

log = structlog.get_logger(__name__)


async def expire_messages(topic: Topic, subscription: Subscription, before_ms: int) -> int:
    """Count the messages that were published before a time as acknowledged.

    Returns the number of entries that left the subscription's backlog.
    """
    if not subscription.backlog:
        return 0
    return await subscription.expire_before(await first_published_since(topic.ledger, before_ms))


class MessageExpiry:
    """Expires the messages of durable subscriptions of loaded topics, from time to time.

    Messages may stay `interval_s` longer than the policies say.
    """

    def __init__(
        self, loaded: Callable[[], Mapping[str, Topic]], clock: Clock, interval_s: float
    ) -> None:
        self._loaded = loaded
        self._clock = clock
        self._interval_s = interval_s
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Check until `stop`."""
        self._tasks.keep_every(self._interval_s, "message_expiry", self.check)

    async def stop(self) -> None:
        """Check no more.  May be called again."""
        await self._tasks.stop()

    async def check(self) -> None:
        """Expire the messages that are too old now, topic by topic."""
        for topic in list(self._loaded().values()):
            ttl_s = topic.policies.message_ttl_s
            if not ttl_s or topic.closing:
                continue
            before_ms = self._clock.now_ms() - ttl_s * 1000
            for subscription in topic.followers:
                if subscription.durable and subscription.name != COMPACTION_CURSOR:
                    await self._expire(topic, subscription, before_ms)

    async def _expire(self, topic: Topic, subscription: Subscription, before_ms: int) -> None:
        try:
            expired = await expire_messages(topic, subscription, before_ms)
        except MagnetarError as error:
            log.warning(
                "messages_not_expired",
                topic=str(topic.name),
                subscription=subscription.name,
                error=str(error),
            )
            return
        except Exception:
            log.exception("message_expiry_failed", topic=str(topic.name))
            return
        if expired:
            log.info(
                "messages_expired",
                topic=str(topic.name),
                subscription=subscription.name,
                entries=expired,
            )
