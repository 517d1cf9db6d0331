"""What is done with topics wherever they are: here, or by asking the broker that has them.

Rules: a topic of another broker is closed, deleted and looked at by that broker.  A moved topic is
loaded where it was sent, so that its clients find it there; if that fails, whoever is asked for it
next takes it.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote

import structlog

from broker.placement import BrokerAddress
from protocol.names import NamespaceName, TopicDomain, TopicName, parse_topic_name
from protocol.server_error import MagnetarError

if TYPE_CHECKING:
    from broker.service import Broker

log = structlog.get_logger(__name__)

UNLOAD = "/admin/v2/brokers/topics/unload"
TAKE = "/admin/v2/brokers/topics/take"


class TopicsElsewhere:
    """See the module's rules."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker

    def owner_elsewhere(self, name: TopicName) -> BrokerAddress | None:
        """The other broker that has it; None when it is here or nobody's, as far as is known."""
        owner = self._broker.placement.known_owner(name)
        return None if owner is None or owner.broker_id == self._broker.broker_id else owner

    async def unload(self, name: TopicName, destination: str | None = None) -> None:
        """Close it where it is, for `destination` (a broker id) to take.  Raises `PeerFailed`."""
        elsewhere = self.owner_elsewhere(name)
        if elsewhere is not None:
            query = {"topic": str(name)}
            if destination is not None:
                query["destinationBroker"] = destination
            await self._broker.placement.call(elsewhere, "PUT", UNLOAD, query)
            return
        await self._broker.topics.unload(name)
        target = None if destination is None else self._broker.placement.brokers.get(destination)
        if target is None or target.broker_id == self._broker.broker_id:
            return
        try:
            await self._broker.placement.call(target, "PUT", TAKE, {"topic": str(name)})
        except MagnetarError as error:
            log.info("topic_not_taken", topic=str(name), broker=destination, error=str(error))

    async def unload_namespace(self, namespace: NamespaceName) -> None:
        """Close every topic and segment of a namespace.  Raises the first `PeerFailed`, at last."""
        names = {*self._broker.topics.loaded(), *self._broker.placement.owners()}
        failure: MagnetarError | None = None
        for text in sorted(names):
            name = parse_topic_name(text)
            if name.namespace_name != namespace or name.domain is TopicDomain.TOPIC:
                continue
            try:
                await self.unload(name)
            except MagnetarError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def stats(self, owner: BrokerAddress, name: TopicName) -> Mapping[str, object]:
        """TopicStats of another broker's persistent topic; {} if it has none of that name.

        Raises `PeerFailed`.
        """
        try:
            found = await self._broker.placement.call(owner, "GET", f"{rest_path(name)}/stats", {})
        except MagnetarError as error:
            if getattr(error, "http_status", None) is HTTPStatus.NOT_FOUND:
                return {}
            raise
        return found if isinstance(found, dict) else {}

    async def is_used(self, owner: BrokerAddress, name: TopicName) -> bool:
        """Whether another broker's persistent topic has producers or consumers."""
        stats = await self.stats(owner, name)
        subscriptions = stats.get("subscriptions")
        held = subscriptions.values() if isinstance(subscriptions, dict) else ()
        return bool(stats.get("publishers")) or any(one.get("consumers") for one in held)

    async def delete(self, owner: BrokerAddress, name: TopicName, *, force: bool) -> None:
        """Have another broker delete its persistent topic.  Raises `PeerFailed`."""
        query = {"force": str(force).lower()}
        await self._broker.placement.call(owner, "DELETE", rest_path(name), query)


def rest_path(name: TopicName) -> str:
    """The REST resource of a persistent topic."""
    return f"/admin/v2/persistent/{name.namespace_name}/{quote(name.local_name, safe='')}"
