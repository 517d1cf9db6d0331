"""Grace periods, in which a lost ordered consumer keeps its segments."""

from broker.policies.namespaces import NamespaceNotFound, Namespaces
from broker.scalable.live_topics import LiveTopic


class GracePeriods:
    """The grace periods of topics.

    That of the topic holds, else that of its namespace, else the broker's setting.  A change
    counts for consumers that are lost afterwards.
    """

    def __init__(self, namespaces: Namespaces, default_s: int) -> None:
        self._namespaces = namespaces
        self._default_s = default_s

    async def follow(self, live: LiveTopic) -> None:
        """Follow the policies of a topic's namespace from now on.  Raises `MetadataError`."""
        try:
            await self._namespaces.require(live.name.namespace_name)
        except NamespaceNotFound:
            return  # a topic may be older than the deletion of its namespace

    def grace_s(self, live: LiveTopic) -> int:
        """The grace period of a consumer that is lost now, in seconds."""
        namespace = self._namespaces.known(live.name.namespace_name)
        for grace_s in (live.stored.record.consumer_grace_s, namespace.consumer_grace_s):
            if grace_s is not None:
                return grace_s
        return self._default_s
