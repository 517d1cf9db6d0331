"""Deletion of topics that nobody uses (the policy inactiveTopicPolicies)."""

from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

import structlog

from broker.placement import OwnedElsewhere
from broker.policies.namespaces import NamespaceNotFound, TenantNotFound
from broker.topics.offloading import Offloads
from broker.topics.registry import TopicRegistry
from broker.topics.topic import Topic, TopicNotFound
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

NOT_OURS: Final = (TopicNotFound, NamespaceNotFound, TenantNotFound, OwnedElsewhere)
"""Errors of loading a topic that is gone, or another broker's to care for."""


class InactiveTopicsHost(Protocol):
    """The parts of a broker that `InactiveTopics` uses."""

    settings: Settings
    topics: TopicRegistry
    offloads: Offloads


class InactiveTopics:
    """Deletes loaded ordinary topics that had no clients at every check for long enough.

    The time counts from the first check that finds a topic inactive, at the earliest since it was
    loaded.  `now_s` is monotonic.
    """

    def __init__(self, broker: InactiveTopicsHost, now_s: Callable[[], float]) -> None:
        self._broker = broker
        self._now_s = now_s
        self._since: dict[ref[Topic], tuple[int, float]] = {}
        """Number of client changes, and the time, when a topic was first found inactive."""
        self._undeleted: dict[TopicName, None] = {}
        """Topics whose deletion failed: they are closed by then, and checks see loaded ones."""
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Check until `stop`."""
        self._tasks.keep_every(
            self._broker.settings.broker_delete_inactive_topics_frequency_s,
            "inactive_topics",
            self.check,
        )

    async def stop(self) -> None:
        """Check no more.  May be called again."""
        await self._tasks.stop()

    async def check(self) -> None:
        """Delete the topics that are due now."""
        await self._load_undeleted()
        now_s = self._now_s()
        since: dict[ref[Topic], tuple[int, float]] = {}
        due: list[tuple[Topic, int]] = []
        for topic in self._broker.topics.loaded().values():
            if not self._is_inactive(topic):
                continue
            before, changes = self._since.get(ref(topic)), topic.client_changes
            noted = before if before is not None and before[0] == changes else (changes, now_s)
            since[ref(topic)] = noted
            if now_s - noted[1] >= _inactive_limit_s(topic):
                due.append((topic, changes))
        self._since = since
        for topic, changes in due:
            await self._delete(topic, changes)

    async def _load_undeleted(self) -> None:
        """Load topics whose deletion failed, so that their time begins anew."""
        for name in list(self._undeleted):
            try:
                await self._broker.topics.get(name, create=False)
            except NOT_OURS:
                pass
            except MagnetarError as error:
                # The next check tries again; until then the store may be away.
                log.debug("undeleted_topic_not_loaded", topic=str(name), error=str(error))
                return
            del self._undeleted[name]

    def _is_inactive(self, topic: Topic) -> bool:
        return is_deletable(topic) and topic.idle and not self._broker.offloads.is_running(topic)

    async def _delete(self, topic: Topic, changes: int) -> None:
        def still_inactive() -> bool:
            # Policies may have changed while other topics were deleted.
            return topic.client_changes == changes and self._is_inactive(topic)

        try:
            if await self._broker.topics.is_migrated(topic.name):
                return
            deleted = await self._broker.topics.delete_if(topic, still_inactive)
        except MagnetarError as error:
            log.warning("inactive_topic_not_deleted", topic=str(topic.name), error=str(error))
            self._undeleted[topic.name] = None
            return
        except Exception:
            log.exception("inactive_topic_deletion_failed", topic=str(topic.name))
            self._undeleted[topic.name] = None
            return
        if deleted:
            log.info("inactive_topic_deleted", topic=str(topic.name))


def is_deletable(topic: Topic) -> bool:
    """Whether the policies have a topic deleted if no client comes."""
    policy, retention = topic.policies.inactive_topics, topic.policies.retention
    if policy is None or topic.name.domain is not TopicDomain.PERSISTENT:
        return False
    if retention is not None and retention.time_ms < 0:
        return False
    subscriptions = topic.subscriptions.values()
    if not policy.caught_up:
        return not subscriptions
    return not any(
        each.backlog or (each.messages_held is not None and each.messages_held.any)
        for each in subscriptions
    )


def _inactive_limit_s(topic: Topic) -> float:
    """How long a topic has to be inactive: for the time of the policy and that of retention."""
    policy, retention = topic.policies.inactive_topics, topic.policies.retention
    retention_s = 0 if retention is None else retention.time_ms / 1000
    return max(0 if policy is None else policy.max_inactive_s, retention_s)
