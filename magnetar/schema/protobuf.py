"""`ProtobufSchema`: Protobuf messages, in the forms PROTOBUF and PROTOBUF_NATIVE."""

import base64
from collections.abc import Iterable
from typing import Final, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError, EncodeError, Message

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.avro_definition import Json, compact
from magnetar.schema.json import properties_of
from magnetar.schema.protobuf_definition import avro_definition_of
from magnetar.schema.schema import Schema

__all__ = ["ProtobufSchema", "protobuf_of"]

M = TypeVar("M", bound=Message)

PARSING_INFO: Final = "__PARSING_INFO__"
"""The property with the numbers of the fields."""
FIRST_TABLE: Final = 16
"""Buckets of a new hash table in Java; twice as many whenever it is three quarters full."""


class ProtobufSchema(Schema[M]):
    """Encodes Protobuf messages as the Java client does.

    The payload is the message's own encoding.  Brokers get an Avro definition of the message in the
    form PROTOBUF, the only one of Java's v5 client, and the descriptors of its files in the form
    PROTOBUF_NATIVE.  Both are Java's byte for byte, because brokers compare them.
    """

    def __init__(self, kind: type[M], *, native: bool = False) -> None:
        descriptor = cast("Descriptor", kind.DESCRIPTOR)
        self._kind = kind
        self._info = pb.Schema(
            name="",
            schema_data=_native(descriptor) if native else compact(avro_definition_of(descriptor)),
            type=pb.Schema.Type.ProtobufNative if native else pb.Schema.Type.Protobuf,
            properties=[
                pb.KeyValue(key=PARSING_INFO, value=_parsing_info(descriptor)),
                *properties_of(always_allow_null=True),
            ],
        )

    @property
    def info(self) -> pb.Schema:
        """The Avro definition, or the descriptors, for the broker."""
        return self._info

    def encode(self, value: M) -> bytes:
        """Encode a message.  Raises `InvalidArgument` for another type or missing fields."""
        if not isinstance(value, self._kind):
            raise InvalidArgument(
                f"This is of type {type(value).__name__}, not {self._kind.__name__}; "
                "give a message of the type that the schema was made of."
            )
        try:
            return value.SerializeToString()
        except (EncodeError, ValueError) as error:
            raise InvalidArgument(
                f"The {self._kind.__name__} is not whole ({error}); set its required fields."
            ) from error

    def decode(self, data: bytes, version: bytes | None = None) -> M:
        """Decode a payload.  Raises `InvalidMessage`."""
        try:
            value = self._kind.FromString(data)
            if not value.IsInitialized():
                raise ValueError("required fields are missing")
            return value
        except (DecodeError, ValueError) as error:
            raise InvalidMessage(
                f"A message is no {self._kind.__name__} ({error}); "
                "read the topic with the type that it was written with."
            ) from error


def protobuf_of(kind: type[M], *, native: bool = False) -> ProtobufSchema[M]:
    """The schema of a message class, with `native` in the form PROTOBUF_NATIVE.

    A topic has one of the two forms.  Raises `InvalidArgument` for messages with groups, for which
    Java has no definition.
    """
    return ProtobufSchema(kind, native=native)


def _native(descriptor: Descriptor) -> bytes:
    files: dict[str, FileDescriptor] = {}

    def collect(file: FileDescriptor) -> None:
        files[file.name] = file
        for dependency in file.dependencies:
            if dependency.name not in files:
                collect(dependency)

    collect(descriptor.file)
    together = FileDescriptorSet()
    for name in _in_java_order(files):
        files[name].CopyToProto(together.file.add())
    tree: dict[str, Json] = {
        "fileDescriptorSet": base64.b64encode(together.SerializeToString()).decode("ascii"),
        "rootMessageTypeName": descriptor.full_name,
        "rootFileDescriptorName": descriptor.file.name,
    }
    return compact(tree)


def _in_java_order(names: Iterable[str]) -> list[str]:
    """The texts in the order of a Java hash map.

    The low bits of the hash, mixed with its high half, choose the bucket; texts of one bucket stay
    in their order.
    """
    listed = list(names)
    buckets = FIRST_TABLE
    while len(listed) > buckets * 3 // 4:
        buckets *= 2

    def bucket(name: str) -> int:
        code = 0
        data = name.encode("utf-16-be")
        for i in range(0, len(data), 2):
            code = (code * 31 + (data[i] << 8 | data[i + 1])) & 0xFFFFFFFF
        return (code ^ code >> 16) & (buckets - 1)

    return sorted(listed, key=bucket)


def _parsing_info(descriptor: Descriptor) -> str:
    listed: list[Json] = [
        {
            "number": field.number,
            "name": field.name,
            "type": _type_name(field.type),
            "label": _label(field),
            "definition": None,
        }
        for field in descriptor.fields
    ]
    return compact(listed).decode()


def _label(field: FieldDescriptor) -> str:
    if field.is_repeated:
        return "LABEL_REPEATED"
    return "LABEL_REQUIRED" if field.is_required else "LABEL_OPTIONAL"


def _type_name(number: int) -> str:
    return FieldDescriptorProto.Type.Name(FieldDescriptorProto.Type.ValueType(number)).removeprefix(
        "TYPE_"
    )
