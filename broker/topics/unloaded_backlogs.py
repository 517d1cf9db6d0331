"""Backlogs of topics that are not loaded, for the metrics."""

from collections.abc import Mapping
from typing import NamedTuple

from broker.topics.replication import is_replicator_cursor
from broker.topics.topic import Topic
from config.bounds import UNLOADED_BACKLOGS
from magnetar.protocol.names import TopicName


class UnloadedBacklog(NamedTuple):
    """The entries that subscriptions of an unloaded topic have not acknowledged."""

    namespace: str
    entries: Mapping[str, int]
    """By subscription; those without a backlog are left out."""


class UnloadedBacklogs:
    """Remembers the backlogs of topics that are not loaded.

    An abandoned subscription has to stay in the metrics though its topic is unloaded.  It does
    until the topic is loaded or deleted anywhere, or UNLOADED_BACKLOGS others were unloaded later.
    `StoredBacklogs` adds those of topics that were not loaded since the start.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, UnloadedBacklog] = {}
        self._expected: set[str] = set()

    @property
    def by_topic(self) -> Mapping[str, UnloadedBacklog]:
        """The backlogs by the topics' names, the oldest first."""
        return self._by_topic

    @property
    def is_full(self) -> bool:
        """Whether one more topic takes the place of the oldest one."""
        return len(self._by_topic) >= UNLOADED_BACKLOGS

    def remember(self, topic: Topic) -> None:
        """Remember the backlogs of a topic that was just unloaded."""
        durable = (each for each in topic.subscriptions.values() if each.durable)
        self._remember(topic.name, {each.name: each.backlog for each in durable})

    def expect(self, name: TopicName) -> None:
        """Note that the stored backlogs of a topic that is not loaded are about to be read."""
        self._expected.add(str(name))

    def remember_expected(self, name: TopicName, entries: Mapping[str, int]) -> None:
        """Remember what was read, unless the topic was loaded or deleted meanwhile."""
        if str(name) in self._expected:
            self._remember(name, entries)

    def _remember(self, topic_name: TopicName, entries: Mapping[str, int]) -> None:
        name = str(topic_name)
        self.forget(name)
        entries = {
            subscription: count
            for subscription, count in entries.items()
            if count and not is_replicator_cursor(subscription)
        }
        if not entries:
            return
        self._by_topic[name] = UnloadedBacklog(str(topic_name.namespace_name), entries)
        if len(self._by_topic) > UNLOADED_BACKLOGS:
            del self._by_topic[next(iter(self._by_topic))]

    def forget(self, name: str) -> None:
        """Forget a topic that is loaded or deleted, here or elsewhere."""
        self._by_topic.pop(name, None)
        self._expected.discard(name)

    def clear(self) -> None:
        """Forget all: another broker remembers them now."""
        self._by_topic.clear()
        self._expected.clear()
