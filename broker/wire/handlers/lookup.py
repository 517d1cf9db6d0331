"""LOOKUP and PARTITIONED_METADATA.  Errors are sent inside the commands' own responses."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, cast

from broker.placement import LookupResult, Placement
from broker.topics.registry import TopicRegistry
from broker.topics.reserved_names import COORDINATORS, coordinator_of
from broker.topics.topic import TopicNotFound
from broker.transactions.service import Transactions
from broker.wire.connection import Connection, Handler
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandLookupTopicResponse,
    CommandPartitionedTopicMetadataResponse,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

LISTENERS = frozenset({"", "internal"})
"""Names of the broker's only listener: "internal" is Pulsar's default."""


class UnknownListener(PeerError):
    """The broker listens under no such name: look up without one."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


def lookup(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """LOOKUP: the broker that serves a name of any domain; the topic need not exist.

    A name with an owner is answered Connect.  One without goes to the broker that is chosen for it:
    Connect if that is this one, or if another broker sent the client here (`authoritative`), else
    Redirect, so that the chosen one confirms it.  A name of a v4 coordinator is answered with its
    leader.
    """
    request = command.lookup
    response = CommandLookupTopicResponse(request_id=request.request_id)
    try:
        name = parse_topic_name(request.topic)
        require_listener(request.advertised_listener_name)
        placed = placed_for_client(connection.broker, name, authoritative=request.authoritative)
        response.response = (
            CommandLookupTopicResponse.Connect
            if placed.connect
            else CommandLookupTopicResponse.Redirect
        )
        if placed.address.url:
            response.broker_service_url = placed.address.url
        if placed.address.url_tls is not None:
            response.broker_service_url_tls = placed.address.url_tls
        response.authoritative = True
        response.proxy_through_service_url = False
    except MagnetarError as error:
        response.response = CommandLookupTopicResponse.Failed
        response.error = cast("WireError", int(error.code))
        response.message = str(error)
    connection.send(BaseCommand(type=BaseCommand.LOOKUP_RESPONSE, lookup_response=response))


def require_listener(name: str) -> None:
    """Raise `UnknownListener` for any but the broker's only listener."""
    # The address of another listener would not be meant for the client.
    if name not in LISTENERS:
        raise UnknownListener(
            f"The broker has no listener {name!r}: leave the listener's name out of the client's "
            "settings."
        )


class LookupServices(Protocol):
    """The parts of a broker that lookups use."""

    placement: Placement
    topics: TopicRegistry
    transactions: Transactions


def placed_for_client(
    broker: LookupServices, name: TopicName, *, authoritative: bool
) -> LookupResult:
    """Return the broker that a client connects to for a name.

    Raises `PlacementNotReady`; as `TopicRegistry.require_served`; and for the name of a coordinator
    as `Transactions.address_of_coordinator`.
    """
    placement = broker.placement
    number = coordinator_of(name)
    if number is not None:
        address = broker.transactions.address_of_coordinator(number)
        return LookupResult(address, connect=True, here=address.broker_id == placement.broker_id)
    if name == COORDINATORS:
        return LookupResult(placement.me, connect=True, here=True)
    broker.topics.require_served(name)
    # Every broker serves the layouts of all scalable topics.
    if name.domain is TopicDomain.TOPIC and not placement.draining:
        return LookupResult(placement.me, connect=True, here=True)
    return placement.place(name, authoritative=authoritative)


async def partitioned_metadata(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """PARTITIONED_METADATA: the number of a topic's partitions.

    The name of v4 coordinators has one for each coordinator, or 0 if they are switched off.
    """
    request = command.partitioned_metadata
    response = CommandPartitionedTopicMetadataResponse(request_id=request.request_id)
    try:
        response.partitions = await _partitions_of(
            connection,
            parse_topic_name(request.topic),
            create=request.metadata_auto_creation_enabled,
        )
        response.response = CommandPartitionedTopicMetadataResponse.Success
    except MagnetarError as error:
        response.response = CommandPartitionedTopicMetadataResponse.Failed
        response.error = cast("WireError", int(error.code))
        response.message = str(error)
    connection.send(
        BaseCommand(
            type=BaseCommand.PARTITIONED_METADATA_RESPONSE,
            partitioned_metadata_response=response,
        )
    )


async def _partitions_of(connection: Connection, name: TopicName, *, create: bool) -> int:
    """The number of partitions; creating a topic is a costly request, asking for one is not."""
    if name == COORDINATORS:
        return connection.broker.settings.coordinators_of_v4_clients
    topics = connection.broker.topics
    try:
        return await topics.partitions_of(name, create=False)
    except TopicNotFound:
        if not create:
            raise
    async with connection.costly():
        return await topics.partitions_of(name, create=True)


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.LOOKUP: lookup,
    BaseCommand.PARTITIONED_METADATA: partitioned_metadata,
}
