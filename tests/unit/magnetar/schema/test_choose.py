"""Which schema stands for a type, and the one that reads anything."""

import pytest

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.auto import AUTO
from magnetar.schema.choose import schema_for
from magnetar.schema.json import JsonSchema
from magnetar.schema.plain import BOOL, BYTES, DOUBLE, INT64, STRING
from magnetar.schema.protobuf import ProtobufSchema
from tests.unit.magnetar.schema.golden import JAVA
from tests.unit.magnetar.schema.samples import Small, SmallDict, SmallModel


def test_python_type_chooses_its_schema() -> None:
    assert schema_for(bytes) is BYTES
    assert schema_for(str) is STRING
    assert schema_for(bool) is BOOL
    assert schema_for(int) is INT64
    assert schema_for(float) is DOUBLE
    assert schema_for(STRING) is STRING
    for kind in (Small, SmallModel, SmallDict):
        assert isinstance(schema_for(kind), JsonSchema)
    chosen = schema_for(pb.KeyValue)
    assert isinstance(chosen, ProtobufSchema)
    assert chosen.info.type == pb.Schema.Type.Protobuf


@pytest.mark.parametrize("kind", [list, object, None, 3, "str"])
def test_types_that_none_stands_for(kind: object) -> None:
    with pytest.raises(InvalidArgument):
        schema_for(kind)  # type: ignore[arg-type]


class Writers:
    def __init__(self, kind: int, data: bytes = b"") -> None:
        self._schema = pb.Schema(name="", schema_data=data, type=kind)  # type: ignore[arg-type]

    async def of_version(self, version: bytes) -> pb.Schema:
        return self._schema


@pytest.mark.parametrize(
    ("kind", "definition", "data", "value"),
    [
        (1, "", b"text", "text"),
        (8, "", b"\0\0\0\x07", 7),
        (2, JAVA["small_definition"], b'{"value":3}', {"value": 3}),
        (4, JAVA["small_definition"], bytes.fromhex("02027306"), {"sensor": "s", "value": 3}),
        (3, "{}", b"\x0a\x00", b"\x0a\x00"),
    ],
)
async def test_auto_reads_by_the_topics_schema(
    kind: int, definition: str, data: bytes, value: object
) -> None:
    schema = AUTO.of_topic(Writers(kind, definition.encode()))
    assert not schema.knows(b"v")
    with pytest.raises(InvalidMessage):
        schema.decode(data, b"v")
    await schema.learn(b"v")
    assert schema.decode(data, b"v") == value
    assert schema.decode(data, None) == data


async def test_auto_with_broken_schemas_and_payloads() -> None:
    schema = AUTO.of_topic(Writers(4, b"{"))
    await schema.learn(b"v")
    with pytest.raises(InvalidMessage, match="definition"):
        schema.decode(b"", b"v")
    schema = AUTO.of_topic(Writers(2))
    await schema.learn(b"v")
    with pytest.raises(InvalidMessage):
        schema.decode(b"{", b"v")
    with pytest.raises(InvalidArgument):
        AUTO.encode("text")
    assert AUTO.encode(b"bytes") == b"bytes"
    assert AUTO.info is None
