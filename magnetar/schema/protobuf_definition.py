"""The Avro definition that Java's Avro library makes of a protobuf message.  Pure."""

import re
from typing import Final

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileOptions

from magnetar.errors import InvalidArgument
from magnetar.schema.avro_definition import Json

__all__ = ["avro_definition_of"]

_TEXT: Final[Json] = {"type": "string", "avro.java.string": "String"}
_SIMPLE: Final[dict[int, Json]] = {
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_INT32: "int",
    FieldDescriptor.CPPTYPE_UINT32: "int",
    FieldDescriptor.CPPTYPE_INT64: "long",
    FieldDescriptor.CPPTYPE_UINT64: "long",
    FieldDescriptor.CPPTYPE_FLOAT: "float",
    FieldDescriptor.CPPTYPE_DOUBLE: "double",
}


def avro_definition_of(descriptor: Descriptor) -> Json:
    """The definition of a message.  Raises `InvalidArgument` for groups, which Java cannot define.

    A record has the name of the message.  Each field but a required one has a default.  Maps are
    lists of entries, and a `oneof` is its fields.
    """
    return _Builder().message(descriptor, around="")


class _Builder:
    def __init__(self) -> None:
        self._seen: set[str] = set()

    def message(self, descriptor: Descriptor, around: str) -> Json:
        """The definition, or the name if it is defined already."""
        space = _namespace(descriptor.file, descriptor.containing_type)
        node = self._named(descriptor.full_name, descriptor.name, space, around)
        if node is None:
            return _reference(descriptor.name, space, around)
        fields: list[Json] = []
        for field in descriptor.fields:
            built: dict[str, Json] = {"name": field.name, "type": self._field(field, space)}
            if not field.is_required:
                built["default"] = _default(field)
            fields.append(built)
        return {"type": "record"} | node | {"fields": fields}

    def _field(self, field: FieldDescriptor, around: str) -> Json:
        node = self._single(field, around)
        if field.is_repeated:
            return {"type": "array", "items": node}
        if field.message_type is not None and not field.is_required:
            return ["null", node]
        return node

    def _single(self, field: FieldDescriptor, around: str) -> Json:
        if field.type == FieldDescriptor.TYPE_GROUP:
            raise InvalidArgument(
                f"The field {field.full_name} is a group, which brokers have no definition for; "
                "make it a message, or use protobuf_of(..., native=True)."
            )
        if field.message_type is not None:
            return self.message(field.message_type, around)
        if field.enum_type is not None:
            return self._enum(field.enum_type, around)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return "bytes"
        if field.type == FieldDescriptor.TYPE_STRING:
            return _TEXT
        return _SIMPLE[field.cpp_type]

    def _enum(self, descriptor: EnumDescriptor, around: str) -> Json:
        space = _namespace(descriptor.file, descriptor.containing_type)
        node = self._named(descriptor.full_name, descriptor.name, space, around)
        if node is None:
            return _reference(descriptor.name, space, around)
        symbols: list[Json] = [value.name for value in descriptor.values]
        return {"type": "enum"} | node | {"symbols": symbols}

    def _named(self, full_name: str, name: str, space: str, around: str) -> dict[str, Json] | None:
        """The name, and the namespace if it differs from that around; None if already defined."""
        if full_name in self._seen:
            return None
        self._seen.add(full_name)
        return {"name": name} if space == around else {"name": name, "namespace": space}


def _reference(name: str, space: str, around: str) -> str:
    return name if space == around else f"{space}.{name}"


def _namespace(file: FileDescriptor, outside: Descriptor | None) -> str:
    """The place of the Java class: package, outer class, then enclosing messages joined by `$`."""
    options = FileOptions()
    file_options = file.GetOptions()
    if isinstance(file_options, FileOptions):
        options = file_options
    package = options.java_package if options.HasField("java_package") else file.package
    outer = ""
    if not options.java_multiple_files:
        outer = options.java_outer_classname or _class_of_file(file.name)
    inner: list[str] = []
    while outside is not None:
        inner.insert(0, outside.name)
        outside = outside.containing_type
    classes = "$".join([*([outer] if outer else []), *inner])
    return f"{package}.{classes}" if classes else package


def _class_of_file(name: str) -> str:
    stem = name.rpartition("/")[2].removesuffix(".proto")
    return "".join(word[:1].upper() + word[1:] for word in re.split("_", stem))


def _default(field: FieldDescriptor) -> Json:
    if field.is_repeated:
        return []
    if field.message_type is not None:
        return None
    value: object = field.default_value
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[field.default_value].name)
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, bool | int | float | str):
        return value
    return None
