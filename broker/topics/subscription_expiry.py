"""Deletion of subscriptions that nobody uses (the policy subscriptionExpirationTime)."""

from collections.abc import Mapping
from typing import Protocol

import structlog

from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR

log = structlog.get_logger(__name__)


class ExpiringTopics(Protocol):
    """The topics of this broker."""

    def loaded(self) -> Mapping[str, Topic]:
        """The loaded topics by full name."""
        ...

    async def is_migrated(self, name: TopicName) -> bool:
        """Whether a topic or partition is, or was, a segment of a scalable topic."""
        ...


class SubscriptionExpiry:
    """Deletes unused subscriptions of this broker's ordinary topics, from time to time.

    They may stay `interval_s` longer than the policies say.
    """

    def __init__(self, topics: ExpiringTopics, clock: Clock, interval_s: float) -> None:
        self._topics = topics
        self._clock = clock
        self._interval_s = interval_s
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Check until `stop`."""
        self._tasks.keep_every(self._interval_s, "subscription_expiry", self.check)

    async def stop(self) -> None:
        """Check no more.  May be called again."""
        await self._tasks.stop()

    async def check(self) -> None:
        """Delete the subscriptions of loaded topics that are due now."""
        for topic in list(self._topics.loaded().values()):
            for subscription in list(topic.subscriptions.values()):
                if self._is_due(topic, subscription):
                    await self._expire(topic, subscription)

    def _is_due(self, topic: Topic, subscription: Subscription) -> bool:
        due_ms = expires_at_ms(topic, subscription)
        return due_ms is not None and due_ms <= self._clock.now_ms()

    async def _expire(self, topic: Topic, subscription: Subscription) -> None:
        try:
            # Subscriptions of a scalable topic's segments are its own.
            if await self._topics.is_migrated(topic.name):
                return
            expired = await topic.unsubscribe_if(
                subscription, lambda: self._is_due(topic, subscription)
            )
        except MagnetarError as error:
            log.warning(
                "subscription_not_expired",
                topic=str(topic.name),
                subscription=subscription.name,
                error=str(error),
            )
            return
        except Exception:
            log.exception("subscription_expiry_failed", topic=str(topic.name))
            return
        if expired:
            log.info("subscription_expired", topic=str(topic.name), subscription=subscription.name)


def expires_at_ms(topic: Topic, subscription: Subscription) -> int | None:
    """When a subscription is to be deleted if nobody uses it until then; None: never as it is."""
    limit_s, since_ms = (
        topic.policies.subscription_expiration_s,
        subscription.cursor.unused_since_ms,
    )
    held = subscription.messages_held
    if (
        not limit_s
        or since_ms is None
        or topic.name.domain is not TopicDomain.PERSISTENT
        or not subscription.durable
        or subscription.consumers
        or subscription.name == COMPACTION_CURSOR
        or (held is not None and held.any)
    ):
        return None
    return since_ms + 1000 * limit_s
