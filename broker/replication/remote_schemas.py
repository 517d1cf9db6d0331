"""`RemoteSchemas`: the versions that another cluster gives to the schemas of a topic."""

from typing import Protocol

from broker.topics.schemas import SchemaRegistry, definition_to_wire, version_number
from magnetar.protocol.pulsar_pb2 import Schema


class SchemaTaker(Protocol):
    """The other cluster."""

    async def schema_version(self, schema: Schema) -> bytes:
        """Its version of a schema, which it adds if it lacks it.  Raises `RemoteRefused`."""
        ...


class RemoteSchemas:
    """Maps the versions of one topic's schemas to those of one other cluster.

    A schema is registered there, by its content, before the first message that has it.
    """

    def __init__(self, registry: SchemaRegistry, schema_id: str) -> None:
        self._registry = registry
        self._schema_id = schema_id
        self._versions: dict[bytes, bytes] = {}

    def known(self, version: bytes) -> bytes | None:
        """The other cluster's version; None if `learn` is to be called."""
        return self._versions.get(version)

    def forget(self) -> None:
        """Learn all again: the topic there may be a new one, without schemas."""
        self._versions.clear()

    async def learn(self, version: bytes, taker: SchemaTaker) -> None:
        """Register the schema there.

        Raises `RemoteRefused`, `SchemaNotFound` for one that was deleted here, `MetadataError`.
        """
        found = await self._registry.get(self._schema_id, version_number(version))
        self._versions[version] = await taker.schema_version(definition_to_wire(found.definition))
