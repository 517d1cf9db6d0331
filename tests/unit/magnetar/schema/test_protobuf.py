"""Protobuf: what brokers are told is the official Java client's, byte for byte."""

import base64
import json

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.schema.protobuf import protobuf_of
from tests.unit.magnetar.schema.golden import JAVA


@pytest.fixture(scope="module")
def pool() -> DescriptorPool:
    """The files that Java has told, and one of proto2."""
    pool = DescriptorPool()
    files = json.loads(JAVA["native_reading"]["schema_data"])["fileDescriptorSet"]
    for file in FileDescriptorSet.FromString(base64.b64decode(files)).file:
        pool.Add(file)
    pool.Add(FileDescriptorProto.FromString(base64.b64decode(JAVA["two_proto"])))
    return pool


def message(pool: DescriptorPool, name: str) -> type[Message]:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


@pytest.mark.parametrize(
    ("golden", "name"),
    [
        ("protobuf_reading", "demo.v1.Reading"),
        ("protobuf_plain", "demo.v1.Plain"),
        ("protobuf_old", "demo.v2.Old"),
        ("native_reading", "demo.v1.Reading"),
        ("native_plain", "demo.v1.Plain"),
    ],
)
def test_protobuf_schema_info_equals_javas(pool: DescriptorPool, golden: str, name: str) -> None:
    native = golden.startswith("native")
    info = protobuf_of(message(pool, name), native=native).info
    assert info.schema_data.decode() == JAVA[golden]["schema_data"]
    assert info.properties[0].key == "__PARSING_INFO__"
    assert info.properties[0].value == JAVA[golden]["parsing_info"]
    assert info.type == (20 if native else 3)


def test_messages_are_themselves(pool: DescriptorPool) -> None:
    plain = message(pool, "demo.v1.Plain")
    schema = protobuf_of(plain)
    assert schema.encode(plain(sensor="s", value=3)).hex() == "0a01731003"
    assert schema.decode(bytes.fromhex("0a01731003")) == plain(sensor="s", value=3)


def test_value_of_another_type_is_refused(pool: DescriptorPool) -> None:
    plain, old = message(pool, "demo.v1.Plain"), message(pool, "demo.v2.Old")
    with pytest.raises(InvalidArgument, match="Old"):
        protobuf_of(plain).encode(old())
    with pytest.raises(InvalidArgument, match="required"):
        protobuf_of(old).encode(old())
    with pytest.raises(InvalidMessage):
        protobuf_of(plain).decode(b"\x0a\xff")
    with pytest.raises(InvalidMessage):
        protobuf_of(old).decode(b"")


def test_groups_have_no_definition() -> None:
    file = FileDescriptorProto(name="g.proto", package="g", syntax="proto2")
    outer = file.message_type.add(name="Outer")
    outer.nested_type.add(name="Grp")
    outer.field.add(name="grp", number=1, type=10, label=1, type_name=".g.Outer.Grp")
    pool = DescriptorPool()
    pool.Add(file)
    kind = message(pool, "g.Outer")
    with pytest.raises(InvalidArgument, match="group"):
        protobuf_of(kind)
    assert protobuf_of(kind, native=True).info.type == 20
