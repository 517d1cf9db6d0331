"""`AvroSchema`: Avro records, which are read by the schema that they were written with."""

import datetime
import io
import json
import struct
import types
from collections.abc import Mapping
from typing import Final, Generic, TypeAlias, TypeVar, overload

import fastavro
import pydantic
import pydantic_core
from fastavro import _read_py, _write_py

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.avro_definition import DECIMAL, AvroDefinition, Json, compact, definition_of
from magnetar.schema.avro_values import Leaf, converter
from magnetar.schema.json import adapter_of, check_int, properties_of
from magnetar.schema.schema import Schema, WriterSchemas
from magnetar.schema.versions import Versions

__all__ = ["AvroSchema", "avro_of"]

T = TypeVar("T")

Parsed: TypeAlias = str | list[Json] | dict[str, Json]
"""A definition as fastavro has parsed it."""

_UNREADABLE: Final = (
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    RecursionError,
    struct.error,
    fastavro.read.SchemaResolutionError,
)
_UNPARSABLE: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    fastavro.schema.SchemaParseException,
    fastavro.schema.UnknownType,
)


def _plain_enum(value: object) -> object:
    # An enum that is text already has no `value`.
    return getattr(value, "value", value)


def _aware(value: object) -> object:
    if isinstance(value, datetime.datetime) and value.tzinfo is None:
        raise ValueError(f"{value} has no time zone")
    return value


def _whole_milliseconds(value: object) -> object:
    if isinstance(value, datetime.time) and value.microsecond % 1000:
        raise ValueError(f"{value} has parts of a millisecond")
    return value


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, set | frozenset) else value


def _text(value: object) -> object:
    return value if value is None else str(value)


_WRITTEN: Final[Mapping[str, Leaf]] = types.MappingProxyType(
    {
        "enum": _plain_enum,
        "int": check_int,
        "array": _as_list,
        "timestamp-micros": _aware,
        "timestamp-millis": _aware,
        "time-millis": _whole_milliseconds,
        DECIMAL: _text,
    }
)
_CHECKED: Final[Mapping[str, Leaf]] = types.MappingProxyType({"int": check_int})


class _Resolution:
    """Reads records of one writer's schema."""

    __slots__ = ("_read", "_reader", "_writer")

    def __init__(self, tree: Json, writer: Parsed, reader: Parsed | None) -> None:
        self._writer = writer
        self._reader = reader
        # A recursive record is read by fastavro's Python code, whose depth has a limit (some
        # hundreds).  Its C code has none, and would crash the process.
        recursive = _is_recursive(tree)
        self._read = _read_py.schemaless_reader if recursive else fastavro.schemaless_reader

    def record(self, data: bytes) -> object:
        """Read one value without a header.  Raises the errors of fastavro."""
        value: object = self._read(io.BytesIO(data), self._writer, self._reader)
        return value


class _Form(Generic[T]):
    """The parts of a schema that do not depend on a topic: definition and conversions."""

    def __init__(
        self,
        definition: AvroDefinition,
        parsed: Parsed,
        adapter: pydantic.TypeAdapter[T] | None,
        info: pb.Schema,
    ) -> None:
        self.definition = definition
        self.parsed = parsed
        self.own = _Resolution(definition.tree, parsed, None)
        self.adapter = adapter
        self.info = info
        leaves = _CHECKED if adapter is None else _WRITTEN
        self.written = converter(definition, leaves, shaped=False)
        self.write = (
            _write_py.schemaless_writer
            if _is_recursive(definition.tree)
            else fastavro.schemaless_writer
        )
        self.read = converter(definition, {}, shaped=True)

    def resolution(self, schema: pb.Schema) -> "_Resolution":
        """The reader for a writer's schema.  Raises `InvalidMessage`."""
        if schema.type != pb.Schema.Type.Avro:
            raise InvalidMessage(
                "A message was written with a schema that is not Avro's; "
                "read the topic with the schema that it has."
            )
        try:
            tree: Json = json.loads(schema.schema_data)
            return _Resolution(tree, _parse(tree), self.for_writer(tree))
        except _UNPARSABLE as error:
            raise InvalidMessage(
                f"The schema of a message is no Avro definition ({error}); correct the schema."
            ) from error

    def for_writer(self, writer: Json) -> Parsed:
        """The reader's schema, with the writer's name of the outermost record as an alias."""
        # As in Java, the outermost record may have had another name.
        tree = self.definition.tree
        if (
            not isinstance(tree, dict)
            or not isinstance(writer, dict)
            or tree.get("type") != "record"
            or writer.get("type") != "record"
            or tree.get("name") == writer.get("name")
        ):
            return self.parsed
        name, space = writer.get("name"), writer.get("namespace")
        known = tree.get("aliases")
        aliases: list[Json] = [f"{space}.{name}" if space else name]
        aliases += known if isinstance(known, list) else []
        return _parse(tree | {"aliases": aliases})


class AvroSchema(Schema[T]):
    """Encodes records as Avro, and decodes them by the schema of their writer.

    The writer's schema is fetched by the version in the message (`learn`), and resolved to this one
    by Avro's rules.  Datetimes need a time zone, and times have at most milliseconds, as in Java.
    """

    def __init__(self, form: _Form[T], writers: WriterSchemas | None = None) -> None:
        self._form = form
        self._versions = None if writers is None else Versions(writers, form.resolution)

    @property
    def info(self) -> pb.Schema:
        """The Avro definition, for the broker."""
        return self._form.info

    def of_topic(self, writers: WriterSchemas) -> "AvroSchema[T]":
        """This schema with the versions of one topic."""
        return AvroSchema(self._form, writers)

    def knows(self, version: bytes | None) -> bool:
        """Whether messages of this version, or without one, can be decoded now."""
        return self._versions is None or self._versions.knows(version)

    async def learn(self, version: bytes) -> None:
        """Fetch the writer's schema."""
        if self._versions is not None:
            await self._versions.learn(version)

    def encode(self, value: T) -> bytes:
        """Encode a value.  Raises `InvalidArgument` if a field does not have its declared type."""
        form = self._form
        try:
            plain: object = value
            if form.adapter is not None:
                plain = form.adapter.dump_python(value, by_alias=True, warnings="error")
            if form.written is not None:
                plain = form.written(plain)
            out = io.BytesIO()
            form.write(out, form.parsed, plain, disable_tuple_notation=True)
            return out.getvalue()
        except (pydantic_core.PydanticSerializationError, *_UNREADABLE) as error:
            raise InvalidArgument(
                f"The value does not fit its Avro definition ({error}); "
                "give one whose fields are of the types that it declares."
            ) from error

    def decode(self, data: bytes, version: bytes | None = None) -> T:
        """Decode a payload.  Raises `InvalidMessage`, also for a version not fetched by `learn`."""
        form = self._form
        way = form.own
        if version and self._versions is not None:
            way = self._versions.of(version)
        try:
            record = way.record(data)
            if form.read is not None:
                record = form.read(record)
            if form.adapter is not None:
                return form.adapter.validate_python(record)
        except _UNREADABLE as error:
            raise InvalidMessage(
                f"A message cannot be read by its Avro schema ({error}); "
                "read the topic with a schema that is compatible with the written messages."
            ) from error
        return record  # type: ignore[return-value]  # a definition by text: T is what Avro gives


def _parse(tree: Json) -> Parsed:
    """Parse a definition.  Raises the errors of fastavro."""
    if not isinstance(tree, str | list | dict):
        raise ValueError(f"{tree} is no type")
    parsed: Parsed = fastavro.parse_schema(tree, named_schemas={})
    return parsed


def _is_recursive(tree: Json, around: frozenset[str] = frozenset()) -> bool:
    """Whether a record contains itself; names are compared without their namespaces."""
    if isinstance(tree, str):
        return tree.rpartition(".")[2] in around
    if isinstance(tree, list):
        return any(_is_recursive(each, around) for each in tree)
    if not isinstance(tree, dict):
        return False
    if isinstance(tree.get("fields"), list):
        around |= {str(tree.get("name")).rpartition(".")[2]}
    inner = (tree.get("type"), tree.get("items"), tree.get("values"), tree.get("fields"))
    return any(_is_recursive(each, around) for each in inner)


@overload
def avro_of(kind: str | bytes) -> AvroSchema[dict[str, object]]: ...
@overload
def avro_of(
    kind: type[T], *, namespace: str | None = None, always_allow_null: bool = True
) -> AvroSchema[T]: ...
def avro_of(
    kind: type[T] | str | bytes, *, namespace: str | None = None, always_allow_null: bool = True
) -> AvroSchema[T] | AvroSchema[dict[str, object]]:
    """The Avro schema of a dataclass, pydantic model or typed dict, or that of a definition's text.

    `namespace` and `always_allow_null` are those of `json_of`; a text stays as it is, save white
    space, and its values are dicts.  Raises `InvalidArgument` for a text that is no definition,
    for other types, and for fields that Avro has no type for.
    """
    if isinstance(kind, str | bytes):
        return AvroSchema(_form_of_text(kind))
    definition = definition_of(kind, namespace=namespace, always_allow_null=always_allow_null)
    info = pb.Schema(
        name="",
        schema_data=compact(definition.tree),
        type=pb.Schema.Type.Avro,
        properties=properties_of(always_allow_null),
    )
    return AvroSchema(_Form(definition, _checked(definition.tree), adapter_of(kind), info))


def _form_of_text(text: str | bytes) -> _Form[dict[str, object]]:
    try:
        tree: Json = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"The Avro definition is no JSON ({error}); correct it.") from error
    info = pb.Schema(name="", schema_data=compact(tree), type=pb.Schema.Type.Avro)
    return _Form(AvroDefinition(tree), _checked(tree), None, info)


def _checked(tree: Json) -> Parsed:
    try:
        return _parse(tree)
    except _UNPARSABLE as error:
        raise InvalidArgument(f"This is no Avro definition ({error}); correct it.") from error
