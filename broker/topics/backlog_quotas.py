"""The check of backlog quotas: what is done with topics whose backlog reaches one."""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from broker.policies.backlog_quotas import BacklogQuota, QuotaType
from broker.topics.message_expiry import expire_messages
from broker.topics.topic import Topic
from config.bounds import QUOTA_CHECK_TOPICS
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock

log = structlog.get_logger(__name__)


class BacklogQuotas:
    """Checks the backlogs of loaded topics against their quotas, from time to time.

    A backlog may be over its quota for `interval_s` before producers are closed or subscriptions
    lose messages.  New producers are refused at once: see `BacklogGauge.require_room`.
    """

    def __init__(
        self, loaded: Callable[[], Mapping[str, Topic]], clock: Clock, interval_s: float
    ) -> None:
        self._loaded = loaded
        self._clock = clock
        self._interval_s = interval_s
        self._tasks = BackgroundTasks(log)
        self._checking = asyncio.Lock()
        self.evictions = dict.fromkeys(QuotaType, 0)
        """Number of times that subscriptions of a topic lost messages, by the quota."""

    def start(self) -> None:
        """Check until `stop`."""
        self._tasks.keep_every(self._interval_s, "backlog_quotas", self.check)

    async def stop(self) -> None:
        """Check no more.  May be called again."""
        await self._tasks.stop()

    async def check(self) -> None:
        """Check all topics once, one after the other; a check that runs already ends first."""
        async with self._checking:
            for number, topic in enumerate(list(self._loaded().values()), start=1):
                for quota in (topic.policies.size_quota, topic.policies.age_quota):
                    if quota is not None and not topic.closing:
                        await self._enforce(topic, quota)
                if number % QUOTA_CHECK_TOPICS == 0:
                    await asyncio.sleep(0)

    async def _enforce(self, topic: Topic, quota: BacklogQuota) -> None:
        try:
            if not await topic.backlog.exceeds(quota):
                return
            if quota.evicts:
                await self._evict(topic, quota)
            elif topic.producers and not topic.sealing:
                await self._close_producers(topic, quota)
        except MagnetarError as error:
            log.warning(
                "backlog_quota_not_enforced",
                topic=str(topic.name),
                quota=quota.type.value,
                error=str(error),
            )
        except Exception:
            log.exception("backlog_quota_check_failed", topic=str(topic.name))

    async def _close_producers(self, topic: Topic, quota: BacklogQuota) -> None:
        log.info(
            "producers_closed_by_backlog_quota",
            topic=str(topic.name),
            quota=quota.type.value,
            limit=quota.limit,
            producers=len(topic.producers),
        )
        await topic.close_producers()

    async def _evict(self, topic: Topic, quota: BacklogQuota) -> None:
        """Have the slowest subscriptions lose their oldest messages, as far as the quota says.

        Messages stay that are behind an open transaction.
        """
        now_ms = self._clock.now_ms()
        end = topic.ledger.with_size_after(quota.kept_bytes)
        evicted: dict[str, int] = {}
        async for subscription in topic.backlog.subscriptions():
            if quota.type is QuotaType.SIZE:
                entries = await subscription.expire_before(end)
            else:
                entries = await expire_messages(topic, subscription, quota.kept_since_ms(now_ms))
            if entries:
                evicted[subscription.name] = entries
        if evicted:
            topic.backlog.evictions[quota.type] += 1
            self.evictions[quota.type] += 1
            log.warning(
                "backlog_evicted",
                topic=str(topic.name),
                quota=quota.type.value,
                limit=quota.limit,
                entries=evicted,
            )
