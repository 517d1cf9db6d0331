"""GET_SCHEMA and GET_OR_CREATE_SCHEMA.  Errors are sent inside the commands' own responses."""

from collections.abc import Mapping
from typing import cast

from broker.policies.schema_compatibility import SchemaType
from broker.topics.schemas import (
    VERSION_BYTES,
    definition_from_wire,
    definition_to_wire,
    is_large,
    version_bytes,
)
from broker.wire.connection import Connection, Handler
from magnetar.protocol.names import parse_topic_name
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
        version = int.from_bytes(wanted, "big") if len(wanted) == VERSION_BYTES else None
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
        policies = await connection.broker.namespaces.require(name.namespace_name)
        definition = definition_from_wire(request.schema)
        version: int | None = None
        if definition.kind is not SchemaType.NONE:
            async with connection.costly_if(is_large(definition)):
                version = await connection.broker.schemas.add(
                    name.schema_id, definition, policies.schema_compatibility
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


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.GET_SCHEMA: get_schema,
    BaseCommand.GET_OR_CREATE_SCHEMA: get_or_create_schema,
}
