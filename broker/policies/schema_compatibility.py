"""Compatibility of a new schema, or of a reader's schema, with a topic's schemas.  Pure."""

import enum
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import avro.schema
from avro.errors import AvroException
from avro.schema import make_avsc_object

from broker.policies.avro_compatibility import SchemaTooComplex, mismatches
from config.bounds import MAX_AVRO_SCHEMA_BYTES
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
SHOWN_CHARACTERS = 300
"""Characters of a parser's error that are passed on."""
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


class CheckPart(NamedTuple):
    """A part of a check of schemas, of bounded work."""

    parsed_bytes: int
    """Bytes of the definitions that are parsed in it; 0 if it needs next to no time."""
    run: Callable[[], None]
    """Do it.  Raises `IncompatibleSchema`."""


def successor_parts(
    new: SchemaDefinition, history: Sequence[SchemaDefinition], strategy: CompatibilityStrategy
) -> Iterator[CheckPart]:
    """The parts of the check that `new` may be added after `history` (oldest first).

    Run each before the next one is taken: this and they raise `IncompatibleSchema`.  The type of a
    topic's schemas changes only under ALWAYS_COMPATIBLE.
    """
    candidate = _Definition(new)
    yield candidate.part()
    if not history or strategy is CompatibilityStrategy.ALWAYS_COMPATIBLE:
        return
    if strategy is CompatibilityStrategy.ALWAYS_INCOMPATIBLE:
        raise IncompatibleSchema(
            "The namespace's strategy ALWAYS_INCOMPATIBLE allows no new schema on this topic: "
            "use the one it has, or change the strategy."
        )
    for old in history if strategy in TRANSITIVE else history[-1:]:
        yield _part_for(old, partial(_check_with, candidate, old, strategy))


def reader_parts(
    reader: SchemaDefinition, history: Sequence[SchemaDefinition], strategy: CompatibilityStrategy
) -> Iterator[CheckPart]:
    """The parts of the check that a consumer with `reader` can read what `history` wrote.

    See `successor_parts`.
    """
    candidate = _Definition(reader)
    yield candidate.part()
    if not history or strategy is CompatibilityStrategy.ALWAYS_COMPATIBLE:
        return
    for writer in history if strategy in TRANSITIVE else history[-1:]:
        yield _part_for(writer, partial(_check_consumer_with, candidate, writer))


def _part_for(old: SchemaDefinition, run: Callable[[], None]) -> CheckPart:
    return CheckPart(len(old.data) if old.kind in AVRO_DEFINED else 0, run)


def _check_with(new: "_Definition", old: SchemaDefinition, strategy: CompatibilityStrategy) -> None:
    _check_kinds(new.schema, old)
    known = _Definition(old)
    if strategy in NEW_READS_OLD:
        _check_reads(new, known, f"the new schema cannot read data of an old one ({strategy.name})")
    if strategy in OLD_READS_NEW:
        _check_reads(known, new, f"an old schema cannot read new data ({strategy.name})")


def _check_consumer_with(reader: "_Definition", writer: SchemaDefinition) -> None:
    _check_kinds(reader.schema, writer)
    complaint = "the consumer's schema cannot read the topic's data"
    _check_reads(reader, _Definition(writer), complaint)


def _check_kinds(first: SchemaDefinition, second: SchemaDefinition) -> None:
    if first.kind is not second.kind:
        raise IncompatibleSchema(
            f"The topic has schemas of type {second.kind.name}, not {first.kind.name}: use that "
            "type, or another topic."
        )


def _check_reads(reader: "_Definition", writer: "_Definition", complaint: str) -> None:
    kind = reader.schema.kind
    if reader.schema.same_as(writer.schema) or (
        kind not in AVRO_DEFINED and kind not in STRUCTURED
    ):
        return
    if kind in STRUCTURED:
        raise IncompatibleSchema(
            f"Schemas of type {kind.name} must stay as they are: use the topic's own, or "
            "set the namespace's strategy to ALWAYS_COMPATIBLE."
        )
    try:
        found = mismatches(reader.avro(), writer.avro())
    except SchemaTooComplex as error:
        raise IncompatibleSchema(
            f"The {kind.name} schema cannot be compared with the topic's, as {error}: make it "
            "simpler, or set the namespace's strategy to ALWAYS_COMPATIBLE."
        ) from error
    if found:
        places = ", ".join(sorted({each.place for each in found}))
        details = ", ".join(sorted({each.reason for each in found}))
        raise IncompatibleSchema(
            f"Incompatible schema: {complaint}, at {places} ({details}): give new fields a default."
        )


class _Definition:
    """A definition that is parsed once."""

    def __init__(self, schema: SchemaDefinition) -> None:
        self.schema = schema
        self._avro: avro.schema.Schema | None = None

    def part(self) -> CheckPart:
        """The check that a JSON or AVRO schema is an Avro definition of bounded size."""
        if self.schema.kind not in AVRO_DEFINED:
            return CheckPart(0, lambda: None)
        return CheckPart(len(self.schema.data), self._require_parsed)

    def _require_parsed(self) -> None:
        self.avro()

    def avro(self) -> avro.schema.Schema:
        """The Avro definition.  Raises `IncompatibleSchema`."""
        if self._avro is None:
            self._avro = _parse(self.schema)
        return self._avro


def _parse(schema: SchemaDefinition) -> avro.schema.Schema:
    size = len(schema.data)
    if size > MAX_AVRO_SCHEMA_BYTES:
        raise IncompatibleSchema(
            f"The {schema.kind.name} schema has {size} bytes, and {MAX_AVRO_SCHEMA_BYTES} is the "
            "most: make it smaller, for example by leaving out docs."
        )
    try:
        return make_avsc_object(json.loads(schema.data))
    except (AvroException, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise IncompatibleSchema(
            f"The {schema.kind.name} schema is not an Avro definition "
            f"({_shortened(str(error))}): correct it."
        ) from error


def _shortened(text: str) -> str:
    # The parser's errors quote the whole schema.
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
