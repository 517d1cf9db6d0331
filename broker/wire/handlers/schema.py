"""GET_SCHEMA and GET_OR_CREATE_SCHEMA.  Errors are sent inside the commands' own responses."""

from collections.abc import Mapping
from typing import cast

from broker.policies.schema_compatibility import SchemaType
from broker.topics.schemas import (
    definition_from_wire,
    definition_to_wire,
    is_large,
    may_add_schema,
    version_bytes,
    version_number,
)
from broker.topics.topic import TopicNotFound
from broker.wire.connection import Connection, Handler
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name, segment_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandGetOrCreateSchemaResponse,
    CommandGetSchemaResponse,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError


async def get_schema(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """GET_SCHEMA: the requested version of a topic's schema, or the newest."""
    request = command.get_schema
    response = CommandGetSchemaResponse(request_id=request.request_id)
    wanted = request.schema_version if request.HasField("schema_version") else b""
    try:
        name = parse_topic_name(request.topic)
        version = version_number(wanted) if wanted else None
        found = await connection.broker.schemas.get(name.schema_id, version)
        response.schema.CopyFrom(definition_to_wire(found.definition))
        response.schema_version = version_bytes(found.version)
    except MagnetarError as error:
        response.error_code = cast("WireError", int(error.code))
        response.error_message = str(error)
    connection.send(BaseCommand(type=BaseCommand.GET_SCHEMA_RESPONSE, get_schema_response=response))


async def get_or_create_schema(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """GET_OR_CREATE_SCHEMA: the version of a schema, added to the history if it is compatible.

    Bytes have no version here, as in Pulsar: a producer or consumer of bytes brings that schema
    itself.
    """
    request = command.get_or_create_schema
    response = CommandGetOrCreateSchemaResponse(request_id=request.request_id)
    try:
        name = parse_topic_name(request.topic)
        policies = await connection.broker.policies.require_of(name)
        await _require_topic(connection, name)
        definition = definition_from_wire(request.schema)
        version: int | None = None
        if definition.kind is not SchemaType.NONE:
            async with connection.costly_if(is_large(definition)):
                version = await connection.broker.schemas.add(
                    name.schema_id,
                    definition,
                    policies.schema_compatibility,
                    may_add=may_add_schema(policies, request.producer_name),
                )
        response.schema_version = b"" if version is None else version_bytes(version)
    except MagnetarError as error:
        response.error_code = cast("WireError", int(error.code))
        response.error_message = str(error)
    connection.send(
        BaseCommand(
            type=BaseCommand.GET_OR_CREATE_SCHEMA_RESPONSE,
            get_or_create_schema_response=response,
        )
    )


async def _require_topic(connection: Connection, name: TopicName) -> None:
    """Raise `TopicNotFound` unless there is a topic, ordinary or scalable, that has the history."""
    # A history without a topic would be deleted with none, and count in no maximum of topics.
    topics = connection.broker.topics
    whole = segment_name(name).parent if name.domain is TopicDomain.SEGMENT else name
    if not (await topics.may_be_opened(whole) or await topics.has_scalable_twin(whole)):
        raise TopicNotFound(f"Topic {whole} does not exist, and takes no schema: create it first.")


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.GET_SCHEMA: get_schema,
    BaseCommand.GET_OR_CREATE_SCHEMA: get_or_create_schema,
}
