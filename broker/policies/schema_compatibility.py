"""Compatibility of a new schema, or of a reader's schema, with a topic's schemas.  Pure."""

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import avro.schema

from magnetar.protocol.server_error import PeerError, ServerError


class IncompatibleSchema(PeerError):
    """The schema cannot follow what the topic has under the namespace's strategy."""

    code: ClassVar[ServerError] = ServerError.INCOMPATIBLE_SCHEMA


class SchemaType(enum.IntEnum):
    """The types of schemas, by their number on the wire (Schema.Type)."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOLEAN = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20
    AUTO_CONSUME = 21
    EXTERNAL = 22


AVRO_DEFINED = frozenset({SchemaType.JSON, SchemaType.AVRO})
STRUCTURED = frozenset({SchemaType.PROTOBUF, SchemaType.PROTOBUF_NATIVE, SchemaType.KEY_VALUE})


@dataclass(frozen=True, slots=True)
class SchemaDefinition:
    """A schema as a client sends it: type, definition bytes, name, properties."""

    kind: SchemaType
    data: bytes
    name: str = ""
    properties: dict[str, str] = field(default_factory=dict, hash=False)

    def same_as(self, other: "SchemaDefinition") -> bool:
        """Whether type and definition bytes are equal: then both are one version."""
        return self.kind is other.kind and self.data == other.data


class CompatibilityStrategy(enum.Enum):
    """Pulsar's strategies, by the names in namespace policies.

    BACKWARD: the new schema reads data of the old one.  FORWARD: the old schema reads data of the
    new one.  FULL: both.  The transitive ones compare with every version, the others with the
    newest.
    """

    ALWAYS_INCOMPATIBLE = "ALWAYS_INCOMPATIBLE"
    ALWAYS_COMPATIBLE = "ALWAYS_COMPATIBLE"
    BACKWARD = "BACKWARD"
    FORWARD = "FORWARD"
    FULL = "FULL"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"


NEW_READS_OLD = frozenset(
    {
        CompatibilityStrategy.BACKWARD,
        CompatibilityStrategy.FULL,
        CompatibilityStrategy.BACKWARD_TRANSITIVE,
        CompatibilityStrategy.FULL_TRANSITIVE,
    }
)
OLD_READS_NEW = frozenset(
    {
        CompatibilityStrategy.FORWARD,
        CompatibilityStrategy.FULL,
        CompatibilityStrategy.FORWARD_TRANSITIVE,
        CompatibilityStrategy.FULL_TRANSITIVE,
    }
)
TRANSITIVE = frozenset(
    {
        CompatibilityStrategy.BACKWARD_TRANSITIVE,
        CompatibilityStrategy.FORWARD_TRANSITIVE,
        CompatibilityStrategy.FULL_TRANSITIVE,
    }
)


def check_definition(schema: SchemaDefinition) -> None:
    """Check that JSON and AVRO schemas are Avro definitions.  Raises `IncompatibleSchema`."""
    if schema.kind in AVRO_DEFINED:
        _parse(schema)


def check_successor(
    new: SchemaDefinition, history: Sequence[SchemaDefinition], strategy: CompatibilityStrategy
) -> None:
    """Raise `IncompatibleSchema` unless `new` may be added after `history` (oldest first).

    The type of a topic's schemas changes only under ALWAYS_COMPATIBLE.
    """
    check_definition(new)
    if not history or strategy is CompatibilityStrategy.ALWAYS_COMPATIBLE:
        return
    if strategy is CompatibilityStrategy.ALWAYS_INCOMPATIBLE:
        raise IncompatibleSchema(
            "The namespace's strategy ALWAYS_INCOMPATIBLE allows no new schema on this topic: "
            "use the one it has, or change the strategy."
        )
    for old in history if strategy in TRANSITIVE else history[-1:]:
        _check_kinds(new, old)
        if strategy in NEW_READS_OLD:
            _check_reads(
                new, old, f"the new schema cannot read data of an old one ({strategy.name})"
            )
        if strategy in OLD_READS_NEW:
            _check_reads(old, new, f"an old schema cannot read new data ({strategy.name})")


def check_reader(
    reader: SchemaDefinition, history: Sequence[SchemaDefinition], strategy: CompatibilityStrategy
) -> None:
    """Raise `IncompatibleSchema` unless a consumer with `reader` can read what `history` wrote."""
    check_definition(reader)
    if not history or strategy is CompatibilityStrategy.ALWAYS_COMPATIBLE:
        return
    for writer in history if strategy in TRANSITIVE else history[-1:]:
        _check_kinds(reader, writer)
        _check_reads(reader, writer, "the consumer's schema cannot read the topic's data")


def _check_kinds(first: SchemaDefinition, second: SchemaDefinition) -> None:
    if first.kind is not second.kind:
        raise IncompatibleSchema(
            f"The topic has schemas of type {second.kind.name}, not {first.kind.name}: use that "
            "type, or another topic."
        )


def _check_reads(reader: SchemaDefinition, writer: SchemaDefinition, complaint: str) -> None:
    if reader.same_as(writer) or (
        reader.kind not in AVRO_DEFINED and reader.kind not in STRUCTURED
    ):
        return
    if reader.kind in STRUCTURED:
        raise IncompatibleSchema(
            f"Schemas of type {reader.kind.name} must stay as they are: use the topic's own, or "
            "set the namespace's strategy to ALWAYS_COMPATIBLE."
        )
    # Loaded here as in `_parse`.
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    written = _parse(writer)
    result = checker.get_compatibility(_parse(reader, known_as=written), written)
    if result.compatibility is not SchemaCompatibilityType.compatible:
        places = ", ".join(sorted(str(place) for place in result.locations)) or "/"
        details = ", ".join(sorted(str(message) for message in result.messages))
        raise IncompatibleSchema(
            f"Incompatible schema: {complaint}, at {places} ({details}): give new fields a default."
        )


def _parse(
    schema: SchemaDefinition, *, known_as: avro.schema.Schema | None = None
) -> avro.schema.Schema:
    """The Avro definition; `known_as` is a schema that a record may replace under another name."""
    # The resolver is only loaded for topics that have Avro or JSON schemas.
    from avro.errors import AvroException
    from avro.schema import RecordSchema, make_avsc_object

    try:
        definition = json.loads(schema.data)
        # As in Pulsar, the outer record may change its name: an alias has Avro's rules accept it.
        if isinstance(known_as, RecordSchema) and definition.get("type") == "record":
            definition["aliases"] = [*definition.get("aliases", ()), known_as.fullname]
        return make_avsc_object(definition)
    except (AvroException, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise IncompatibleSchema(
            f"The {schema.kind.name} schema is not an Avro definition ({error}): correct it."
        ) from error
