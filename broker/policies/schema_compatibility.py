"""Compatibility of a new schema, or of a reader's schema, with a topic's schemas.  Pure."""

import enum
import json
import struct
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


AVRO_DEFINED = frozenset({SchemaType.JSON, SchemaType.AVRO, SchemaType.PROTOBUF})
"""Types with an Avro definition; that of PROTOBUF says what the message class has as a record."""
PARSED = AVRO_DEFINED | {SchemaType.PROTOBUF_NATIVE, SchemaType.KEY_VALUE}
"""Types whose definition is parsed."""
PARTS = ("key", "value")
"""The schemas in one of type KEY_VALUE, by their names in its properties."""
SHOWN_CHARACTERS = 300
"""Characters of a parser's error that are passed on."""
_LENGTH = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class SchemaDefinition:
    """A schema as a client sends it: type, definition bytes, name, properties."""

    kind: SchemaType
    data: bytes
    name: str = ""
    properties: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def size_bytes(self) -> int:
        """The size of all that a client sent, in characters where that is text."""
        texts = sum(len(name) + len(text) for name, text in self.properties.items())
        return len(self.data) + len(self.name) + texts

    @property
    def parsed_bytes(self) -> int:
        """The size of what is parsed when it is checked; 0 if nothing is."""
        if self.kind not in PARSED:
            return 0
        if self.kind is not SchemaType.KEY_VALUE:
            return len(self.data)
        texts = (self.properties.get(f"{part}.schema.properties", "") for part in PARTS)
        return len(self.data) + sum(map(len, texts))

    def same_as(self, other: "SchemaDefinition") -> bool:
        """Whether type and definition bytes are equal: then both are one version."""
        return (
            self.kind is other.kind
            and self.data == other.data
            and self._part_kinds() == other._part_kinds()
        )

    def _part_kinds(self) -> tuple[str, str] | None:
        # The definitions of simple keys and values are empty, whatever their types are.
        if self.kind is not SchemaType.KEY_VALUE:
            return None
        return _part_kind(self, "key"), _part_kind(self, "value")


def _part_kind(schema: SchemaDefinition, part: str) -> str:
    # The name that Java's client gives to the type of bytes, which is NONE on the wire.
    return schema.properties.get(f"{part}.schema.type", "BYTES")


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
    if strategy is CompatibilityStrategy.ALWAYS_INCOMPATIBLE:
        if reader.same_as(history[-1]):
            return
        raise IncompatibleSchema(
            "The strategy ALWAYS_INCOMPATIBLE lets consumers read this topic with its newest "
            "schema only: subscribe with that one or without, or change the strategy."
        )
    for writer in history if strategy in TRANSITIVE else history[-1:]:
        yield _part_for(writer, partial(_check_consumer_with, candidate, writer))


def _part_for(old: SchemaDefinition, run: Callable[[], None]) -> CheckPart:
    return CheckPart(old.parsed_bytes, run)


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
    if reader.schema.same_as(writer.schema):
        return
    if kind in AVRO_DEFINED:
        _check_fields(reader, writer, complaint)
    elif kind is SchemaType.PROTOBUF_NATIVE:
        if reader.root_message() != writer.root_message():
            raise IncompatibleSchema(
                f"The root message {reader.root_message()} is not {writer.root_message()}, the "
                "topic's: use that one, or another topic."
            )
    elif kind is SchemaType.KEY_VALUE:
        for ours, theirs in zip(reader.key_and_value(), writer.key_and_value(), strict=True):
            _check_kinds(ours.schema, theirs.schema)
            if ours.schema.kind is SchemaType.KEY_VALUE and not ours.schema.same_as(theirs.schema):
                raise IncompatibleSchema(
                    "A pair within a pair must stay as it is: use the topic's own schema, or set "
                    "the namespace's strategy to ALWAYS_COMPATIBLE."
                )
            _check_reads(ours, theirs, complaint)


def _check_fields(reader: "_Definition", writer: "_Definition", complaint: str) -> None:
    try:
        found = mismatches(reader.avro(), writer.avro())
    except SchemaTooComplex as error:
        raise IncompatibleSchema(
            f"The {reader.schema.kind.name} schema cannot be compared with the topic's, as "
            f"{error}: make it simpler, or set the namespace's strategy to ALWAYS_COMPATIBLE."
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
        self._parts: tuple[_Definition, _Definition] | None = None
        self._root_message: str | None = None

    def part(self) -> CheckPart:
        """The check that the definition is one of its type, and of bounded size."""
        if self.schema.kind not in PARSED:
            return CheckPart(0, lambda: None)
        return CheckPart(self.schema.parsed_bytes, self._require_parsed)

    def _require_parsed(self) -> None:
        if self.schema.kind in AVRO_DEFINED:
            self.avro()
        elif self.schema.kind is SchemaType.PROTOBUF_NATIVE:
            self.root_message()
        else:
            for each in self.key_and_value():
                if each.schema.kind in PARSED - {SchemaType.KEY_VALUE}:
                    each._require_parsed()

    def avro(self) -> avro.schema.Schema:
        """The Avro definition.  Raises `IncompatibleSchema`."""
        if self._avro is None:
            self._avro = _parse(self.schema)
        return self._avro

    def root_message(self) -> str:
        """The full name of the message of a PROTOBUF_NATIVE schema.  Raises as above."""
        if self._root_message is None:
            self._root_message = _root_message(self.schema)
        return self._root_message

    def key_and_value(self) -> tuple["_Definition", "_Definition"]:
        """The schemas that a KEY_VALUE schema consists of.  Raises as above."""
        if self._parts is None:
            key, value = _key_and_value(self.schema)
            self._parts = _Definition(key), _Definition(value)
        return self._parts


def _key_and_value(schema: SchemaDefinition) -> tuple[SchemaDefinition, SchemaDefinition]:
    try:
        key, rest = _split_first(schema.data)
        value, rest = _split_first(rest)
        if rest:
            raise ValueError(f"{len(rest)} bytes follow the value's schema")
        parts = []
        for name, data in zip(PARTS, (key, value), strict=True):
            kind = _part_kind(schema, name)
            number = SchemaType.NONE if kind == "BYTES" else SchemaType[kind]
            properties = json.loads(schema.properties.get(f"{name}.schema.properties") or "{}")
            if not isinstance(properties, dict):
                raise ValueError(f"the properties of the {name}'s schema are no object")
            texts = {key: str(text) for key, text in properties.items()}
            parts.append(SchemaDefinition(number, data, properties=texts))
    except KeyError as error:
        raise IncompatibleSchema(
            f"There is no schema type {_shortened(str(error))}: use one that there is."
        ) from error
    except (ValueError, RecursionError, struct.error) as error:
        raise IncompatibleSchema(
            "The KEY_VALUE schema is not the schemas of a key and a value, each behind its length "
            f"({_shortened(str(error))}): correct it."
        ) from error
    return parts[0], parts[1]


def _split_first(data: bytes) -> tuple[bytes, bytes]:
    """The first definition, whose length is before it, and the bytes behind it.

    C++'s client gives the length -1 to an empty one.
    """
    end = _LENGTH.size + max(_LENGTH.unpack_from(data)[0], 0)
    if end > len(data):
        raise ValueError(f"{end} bytes were announced, and {len(data)} are there")
    return data[_LENGTH.size : end], data[end:]


def text_of_pair(schema: SchemaDefinition) -> str:
    """The KEY_VALUE schema as REST shows it: `{"key": ..., "value": ...}`, "" for an empty part.

    As Pulsar's SchemaUtils.convertKeyValueSchemaInfoDataToString.  Raises `IncompatibleSchema` if
    the schema is no pair.
    """
    parts = zip(("key", "value"), _key_and_value(schema), strict=True)
    return _json_text({name: _shown_part(part) for name, part in parts})


def _shown_part(part: SchemaDefinition) -> object:
    if part.kind is SchemaType.KEY_VALUE:
        return json.loads(text_of_pair(part))
    text = part.data.decode("utf-8", "replace")
    try:
        return json.loads(text) if text else ""
    except (ValueError, RecursionError):
        return text


def data_of_pair(text: str, properties: dict[str, str]) -> bytes:
    """The reverse of `text_of_pair`: the definition of a KEY_VALUE schema with `properties`.

    As Pulsar's SchemaUtils.convertKeyValueDataStringToSchemaInfoSchema.  Raises
    `IncompatibleSchema`.
    """
    try:
        pair = json.loads(text)
        if not isinstance(pair, dict) or pair.keys() != {"key", "value"}:
            raise ValueError("it is no object with the members key and value")
        parts = [_part_data(name, pair[name], properties) for name in ("key", "value")]
    except (ValueError, RecursionError) as error:
        raise IncompatibleSchema(
            f"The KEY_VALUE schema is not readable ({_shortened(str(error))}): send the text of "
            '{"key": ..., "value": ...}, each the definition of its schema, "" for one without.'
        ) from error
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _part_data(name: str, part: object, properties: dict[str, str]) -> bytes:
    if part == "":
        return b""
    text = _json_text(part)
    if properties.get(f"{name}.schema.type") != SchemaType.KEY_VALUE.name:
        return text.encode()
    inner = json.loads(properties.get(f"{name}.schema.properties") or "{}")
    if not isinstance(inner, dict):
        raise ValueError(f"the properties of the {name}'s schema are no object")
    return data_of_pair(text, inner)


def _json_text(value: object) -> str:
    # As compact as Java's clients write definitions: versions are compared by their bytes.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _root_message(schema: SchemaDefinition) -> str:
    """The root message, which has to be in the files that come along."""
    # Importing Protobuf's descriptors takes some 16 ms, and few topics have such schemas.
    from broker.policies.native_schemas import root_message  # noqa: PLC0415

    try:
        root, is_there = root_message(schema.data)
    except ValueError as error:
        raise IncompatibleSchema(
            "The PROTOBUF_NATIVE schema is not a set of file descriptors and the name of a message "
            f"({_shortened(str(error))}): correct it."
        ) from error
    if not is_there:
        raise IncompatibleSchema(
            f"The PROTOBUF_NATIVE schema has no message {_shortened(root)} in its files: add its "
            "file."
        )
    return root


def _parse(schema: SchemaDefinition) -> avro.schema.Schema:
    size = len(schema.data)
    if size > MAX_AVRO_SCHEMA_BYTES:
        raise IncompatibleSchema(
            f"The {schema.kind.name} schema has {size} bytes, and {MAX_AVRO_SCHEMA_BYTES} is the "
            "most: make it smaller, for example by leaving out docs."
        )
    try:
        # Older Java clients write names of nested classes with a dollar, which Avro forbids.
        return make_avsc_object(json.loads(schema.data), validate_names=False)
    except (AvroException, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise IncompatibleSchema(
            f"The {schema.kind.name} schema is not an Avro definition "
            f"({_shortened(str(error))}): correct it."
        ) from error


def _shortened(text: str) -> str:
    # The parser's errors quote the whole schema.
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
