"""Backlogs of topics that are not loaded, for the metrics."""

from collections.abc import Mapping
from typing import NamedTuple

from broker.topics.topic import Topic
from config.bounds import UNLOADED_BACKLOGS


class UnloadedBacklog(NamedTuple):
    """The entries that subscriptions of an unloaded topic have not acknowledged."""

    namespace: str
    entries: Mapping[str, int]
    """By subscription; those without a backlog are left out."""


class UnloadedBacklogs:
    """Remembers the backlogs of topics that this broker unloaded because nobody used them.

    An abandoned subscription has to stay in the metrics though its topic is unloaded.  It does
    until the topic is loaded or deleted anywhere, or UNLOADED_BACKLOGS others were unloaded later.
    After a start nothing is remembered: to know the backlogs, all topics would have to be loaded.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, UnloadedBacklog] = {}

    @property
    def by_topic(self) -> Mapping[str, UnloadedBacklog]:
        """The backlogs by the topics' names, the oldest first."""
        return self._by_topic

    def remember(self, topic: Topic) -> None:
        """Remember the backlogs of a topic that was just unloaded."""
        entries = {
            name: subscription.backlog
            for name, subscription in topic.subscriptions.items()
            if subscription.durable and subscription.backlog
        }
        if not entries:
            return
        name = str(topic.name)
        self.forget(name)
        self._by_topic[name] = UnloadedBacklog(str(topic.name.namespace_name), entries)
        if len(self._by_topic) > UNLOADED_BACKLOGS:
            del self._by_topic[next(iter(self._by_topic))]

    def forget(self, name: str) -> None:
        """Forget a topic that is loaded or deleted, here or elsewhere."""
        self._by_topic.pop(name, None)
