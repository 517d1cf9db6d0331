"""Schema histories, one for each topic name; segments and partitions share their topic's.

A version is a record at `/schemas/<schema id>/<20 digits>`, created once and never changed.
"""

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, cast

from broker.policies.applied_policies import AppliedPolicies
from broker.policies.schema_compatibility import (
    CheckPart,
    CompatibilityStrategy,
    IncompatibleSchema,
    SchemaDefinition,
    SchemaType,
    reader_parts,
    successor_parts,
)
from broker.topics.source_positions import source_cluster_of
from config.bounds import (
    MAX_SCHEMA_HISTORY_BYTES,
    MAX_SCHEMA_VERSIONS,
    RECORD_CHANGE_TRIES,
    SCHEMA_DECODE_BYTES,
    SMALL_SCHEMA_BYTES,
)
from magnetar.protocol.pulsar_pb2 import Schema
from magnetar.protocol.server_error import PeerError, ServerError
from storage.clock import Clock
from storage.metadata.keys import children_range, name_of, number
from storage.metadata.store import ABSENT, MetadataStore, Record, VersionConflict

ROOT = "/schemas"
VERSION_BYTES = 8


class SchemaNotFound(PeerError):
    """The topic has no schema, or not that version."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """One version of a topic's schema."""

    version: int
    definition: SchemaDefinition
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The deletion of a history: no version before it counts, and versions go on after it."""

    version: int


def version_bytes(version: int) -> bytes:
    """A version as on the wire: 8 bytes, big-endian."""
    return version.to_bytes(VERSION_BYTES, "big")


def version_number(version: bytes) -> int:
    """The number of a version on the wire.  Raises `SchemaNotFound` for bytes that are none."""
    if len(version) != VERSION_BYTES:
        raise SchemaNotFound(
            f"A schema version has {VERSION_BYTES} bytes, and this one has {len(version)}: use a "
            "version that came with a message, or none for the newest."
        )
    return int.from_bytes(version, "big")


def definition_from_wire(schema: Schema) -> SchemaDefinition:
    """Decode the schema that a client sent."""
    return SchemaDefinition(
        SchemaType(schema.type),
        schema.schema_data,
        schema.name,
        {item.key: item.value for item in schema.properties},
    )


def definition_to_wire(definition: SchemaDefinition) -> Schema:
    """Encode a schema for a client."""
    schema = Schema(
        name=definition.name,
        schema_data=definition.data,
        type=cast("Schema.Type", int(definition.kind)),
    )
    for key, value in definition.properties.items():
        schema.properties.add(key=key, value=value)
    return schema


def is_large(definition: SchemaDefinition) -> bool:
    """Whether a check of the schema takes so long that it is done off the loop."""
    return definition.parsed_bytes > SMALL_SCHEMA_BYTES


def may_add_schema(policies: AppliedPolicies, producer_name: str) -> bool:
    """Whether a producer of this name may add a schema to its topic's history."""
    is_remote = source_cluster_of(producer_name) is not None
    return policies.adds_schemas or (is_remote and policies.adds_replicated_schemas)


class SchemaRegistry:
    """Stores the versions of each topic's schema and checks that a new one is compatible.

    `schema_id` is `TopicName.schema_id`.
    """

    def __init__(self, metadata: MetadataStore, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        # One thread, so that checks never take more than a part of the interpreter's time.
        self._checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="schema-check")

    async def history(self, schema_id: str) -> list[SchemaVersion]:
        """All versions since the last deletion, oldest first."""
        return _alive(await self._all(schema_id))

    async def get(self, schema_id: str, version: int | None = None) -> SchemaVersion:
        """One version, the newest by default.  Raises `SchemaNotFound`."""
        for entry in reversed(await self.history(schema_id)):
            if version is None or entry.version == version:
                return entry
        missing = "no schema" if version is None else f"no schema version {version}"
        raise SchemaNotFound(
            f"The topic {schema_id} has {missing}: add one with a producer or REST."
        )

    async def add(
        self,
        schema_id: str,
        definition: SchemaDefinition,
        strategy: CompatibilityStrategy,
        *,
        may_add: bool = True,
    ) -> int | None:
        """The version of a schema in the history, added if need be; None for AUTO_CONSUME.

        Raises `IncompatibleSchema`; without `may_add` also for a schema that is not there.
        """
        # AUTO_CONSUME reads any schema and brings none.  Bytes (NONE) are a type as any other, as
        # in Pulsar: its Java client sends no schema for bytes, but its Go client does.
        if definition.kind is SchemaType.AUTO_CONSUME:
            return None
        for _ in range(RECORD_CHANGE_TRIES):
            entries = await self._all(schema_id)
            alive = _alive(entries)
            for known in alive:
                if known.definition.same_as(definition):
                    return known.version
            if not may_add:
                raise IncompatibleSchema(
                    f"The topic {schema_id} does not have this schema, and by the policy "
                    "isAllowAutoUpdateSchema clients may add none: add it with "
                    f"POST /admin/v2/schemas/{schema_id}/schema."
                )
            known_definitions = [known.definition for known in alive]
            await self.run_check(successor_parts(definition, known_definitions, strategy))
            _require_capacity(schema_id, entries, definition)
            version = entries[-1].version + 1 if entries else 0
            # Another writer may have taken the number: then read again and decide anew.
            if await self._store(schema_id, version, definition):
                return version
        raise VersionConflict(f"The schemas of {schema_id} change all the time: try again.")

    async def check_successor(
        self, schema_id: str, definition: SchemaDefinition, strategy: CompatibilityStrategy
    ) -> None:
        """Require that a schema may be added to the history.  Raises `IncompatibleSchema`."""
        known = [entry.definition for entry in await self.history(schema_id)]
        await self.run_check(successor_parts(definition, known, strategy))

    async def run_check(self, parts: Iterable[CheckPart]) -> None:
        """Run the parts of a check, each in a turn of the loop; large ones off the loop.

        Raises `IncompatibleSchema`.
        """
        loop = asyncio.get_running_loop()
        for part in parts:
            if part.parsed_bytes <= SMALL_SCHEMA_BYTES:
                part.run()
                if part.parsed_bytes:
                    await asyncio.sleep(0)
            else:
                await loop.run_in_executor(self._checker, part.run)

    async def check_consumer(
        self,
        schema_id: str,
        definition: SchemaDefinition,
        strategy: CompatibilityStrategy,
        *,
        may_add: bool = True,
    ) -> None:
        """Require that a consumer's schema reads the topic's; the first schema of a topic is added.

        Raises `IncompatibleSchema`.
        """
        if definition.kind is SchemaType.AUTO_CONSUME:
            return
        alive = await self.history(schema_id)
        if alive:
            known_definitions = [known.definition for known in alive]
            await self.run_check(reader_parts(definition, known_definitions, strategy))
        else:
            await self.add(schema_id, definition, strategy, may_add=may_add)

    async def require_none(self, schema_id: str) -> None:
        """Raise `IncompatibleSchema` if the topic has a schema: a producer has none."""
        if await self.history(schema_id):
            raise IncompatibleSchema(
                f"The topic {schema_id} has a schema, and by the policy schemaValidationEnforced "
                "its producers must have one: open the producer with a schema."
            )

    async def delete(self, schema_id: str) -> int:
        """End the history; returns the version of the tombstone."""
        for _ in range(RECORD_CHANGE_TRIES):
            entries = await self._all(schema_id)
            version = entries[-1].version + 1 if entries else 0
            if await self._store(schema_id, version, None):
                return version
        raise VersionConflict(f"The schemas of {schema_id} change all the time: try again.")

    async def forget(self, schema_id: str) -> None:
        """Delete all records: the topic itself is being deleted."""
        for entry in await self._all(schema_id):
            await self._metadata.delete(_key(schema_id, entry.version))

    async def _all(self, schema_id: str) -> list[SchemaVersion | Tombstone]:
        lo, hi = children_range(f"{ROOT}/{schema_id}")
        entries: list[SchemaVersion | Tombstone] = []
        decoded_bytes = 0
        for record in await self._metadata.scan(lo, hi):
            entries.append(_decode(record))
            decoded_bytes += len(record.value)
            if decoded_bytes >= SCHEMA_DECODE_BYTES:
                decoded_bytes = 0
                await asyncio.sleep(0)
        return entries

    async def _store(
        self, schema_id: str, version: int, definition: SchemaDefinition | None
    ) -> bool:
        value = _encode(definition, self._clock.now_ms())
        try:
            await self._metadata.put(_key(schema_id, version), value, expect=ABSENT)
        except VersionConflict:
            return False
        return True


def _require_capacity(
    schema_id: str, entries: Sequence[SchemaVersion | Tombstone], new: SchemaDefinition
) -> None:
    """Raise `IncompatibleSchema` if the history has no space for one more version."""
    if len(entries) >= MAX_SCHEMA_VERSIONS:
        raise IncompatibleSchema(
            f"The topic {schema_id} has {len(entries)} schema versions, the most there may be: use "
            "one of them."
        )
    size = sum(each.definition.size_bytes for each in entries if isinstance(each, SchemaVersion))
    if size + new.size_bytes > MAX_SCHEMA_HISTORY_BYTES:
        raise IncompatibleSchema(
            f"The schema versions of {schema_id} have {size} bytes, and with this one they would "
            f"have more than {MAX_SCHEMA_HISTORY_BYTES}: use one of them, or delete the history "
            "with ?force=true."
        )


def _alive(entries: list[SchemaVersion | Tombstone]) -> list[SchemaVersion]:
    alive: list[SchemaVersion] = []
    for entry in entries:
        if isinstance(entry, Tombstone):
            alive.clear()
        else:
            alive.append(entry)
    return alive


def _key(schema_id: str, version: int) -> str:
    return f"{ROOT}/{schema_id}/{number(version)}"


def _encode(definition: SchemaDefinition | None, timestamp_ms: int) -> bytes:
    value: dict[str, object] = {"timestamp": timestamp_ms, "deleted": definition is None}
    if definition is not None:
        value["type"] = definition.kind.name
        value["name"] = definition.name
        value["data"] = base64.b64encode(definition.data).decode()
        value["properties"] = definition.properties
    return json.dumps(value).encode()


def _decode(record: Record) -> SchemaVersion | Tombstone:
    value = json.loads(record.value)
    version = int(name_of(record.key))
    if value["deleted"]:
        return Tombstone(version)
    definition = SchemaDefinition(
        SchemaType[value["type"]],
        base64.b64decode(value["data"]),
        value["name"],
        value["properties"],
    )
    return SchemaVersion(version, definition, value["timestamp"])
