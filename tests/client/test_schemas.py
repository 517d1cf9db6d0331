"""Schemas of the client on a broker: registered, checked, versioned, found again."""

import asyncio
import dataclasses
from typing import Any

import pydantic
import pytest

import magnetar
from magnetar.errors import IncompatibleSchema, InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema import AUTO, BYTES, INT32, Schema, SchemaReader, avro_of, json_of, protobuf_of
from tests.client.conftest import MakeTopic


@dataclasses.dataclass
class Reading:
    sensor: str
    value: int


class ReadingModel(pydantic.BaseModel):
    sensor: str
    value: int


READINGS = [Reading("größer", -1), Reading("b", 1 << 60)]
AVRO_TEXT = '{"type":"record","name":"Text","fields":[{"name":"n","type":"int"}]}'


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (BYTES, [b"", b"\x00\xff"]),
        (str, ["plain", "日本語", "😀", ""]),
        (INT32, [0, -(2**31)]),
        (Reading, READINGS),
        (ReadingModel, [ReadingModel(sensor="a", value=1)]),
        (avro_of(Reading), READINGS),
        (avro_of(AVRO_TEXT), [{"n": 3}]),
        (pb.KeyValue, [pb.KeyValue(key="k", value="v")]),
        (protobuf_of(pb.KeyValue, native=True), [pb.KeyValue(key="k", value="v")]),
    ],
)
async def test_sent_value_is_read(
    client: magnetar.Client,
    topic: MakeTopic,
    schema: Schema[object] | type[object],
    values: list[object],
) -> None:
    made = await topic(name=None)
    async with (
        client.producer(made.name, schema=schema) as producer,
        client.stream_consumer(
            made.name, "sub", schema=schema, initial_position=magnetar.InitialPosition.EARLIEST
        ) as consumer,
    ):
        for value in values:
            await producer.send(value)
        assert [(await consumer.receive(20)).value for _ in values] == values


async def test_a_schema_that_does_not_go_with_the_topics(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    @dataclasses.dataclass
    class Other:
        sensor: str
        value: list[str]

    made = await topic()
    async with client.producer(made.name, schema=Reading) as producer:
        await producer.send(READINGS[0])
        with pytest.raises(IncompatibleSchema):
            async with client.producer(made.name, schema=Other) as other:
                await other.send(Other("s", []))
        with pytest.raises(IncompatibleSchema):
            await client.queue_consumer(made.name, "sub", schema=str)
        await producer.send(READINGS[1])


async def test_value_that_does_not_fit_its_schema_is_not_sent(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with (
        client.producer(made.name, schema=Reading) as producer,
        client.queue_consumer(
            made.name, "sub", schema=Reading, initial_position=magnetar.InitialPosition.EARLIEST
        ) as consumer,
    ):
        with pytest.raises(InvalidArgument):
            await producer.send(Reading("s", "text"))  # type: ignore[arg-type]
        await producer.send(READINGS[0])
        assert (await consumer.receive(20)).value == READINGS[0]


async def test_undecodable_value_raises(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    async with (
        client.producer(made.name) as producer,
        client.queue_consumer(
            made.name, "sub", schema=json_of(Reading), initial_position=_EARLIEST
        ) as consumer,
    ):
        # Nothing is checked for bytes, on a topic whose first schema is the consumer's.
        await producer.send(b"{")
        message = await consumer.receive(20)
        assert message.data == b"{"
        for _ in range(2):
            with pytest.raises(InvalidMessage):
                _ = message.value
        await consumer.ack(message)


_EARLIEST = magnetar.InitialPosition.EARLIEST


async def test_avro_is_read_by_the_schema_that_wrote_it(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    newer: type[Any] = dataclasses.make_dataclass(
        "Reading",
        [
            ("place", str | None, dataclasses.field(default=None)),
            ("sensor", str, dataclasses.field(default="")),
            ("value", int, dataclasses.field(default=0)),
        ],
    )
    made = await topic(segments=2)
    async with client.producer(made.name, schema=avro_of(Reading)) as old:
        await old.send(READINGS[0], key="a")
    async with client.producer(made.name, schema=avro_of(newer)) as fresh:
        await fresh.send(newer("here", "s", 2), key="b")
    for kind, expected in (
        (avro_of(Reading), {READINGS[0].sensor: -1, "s": 2}),
        (avro_of(newer), {READINGS[0].sensor: -1, "s": 2}),
    ):
        async with client.queue_consumer(
            made.name, f"sub-{len(kind.info.schema_data)}", schema=kind, initial_position=_EARLIEST
        ) as consumer:
            messages = [await consumer.receive(20) for _ in range(2)]
            assert {each.value.sensor: each.value.value for each in messages} == expected
            assert {each.schema_version for each in messages} == {
                (0).to_bytes(8, "big"),
                (1).to_bytes(8, "big"),
            }


async def test_auto_asks_the_broker(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    async with (
        client.producer(made.name, schema=avro_of(Reading)) as producer,
        client.queue_consumer(
            made.name, "sub", schema=AUTO, initial_position=_EARLIEST
        ) as consumer,
    ):
        await producer.send(READINGS[0])
        assert (await consumer.receive(20)).value == {"sensor": "größer", "value": -1}


async def test_a_version_that_the_topic_does_not_have(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name, schema=str) as producer:
        await producer.send("x")
    reader = SchemaReader(client.context, made.name)
    first = (0).to_bytes(8, "big")
    found = await asyncio.gather(*(reader.of_version(first) for _ in range(3)))
    assert {each.type for each in found} == {pb.Schema.Type.String}
    assert found[0] is found[1] is found[2]
    for _ in range(2):
        with pytest.raises(InvalidMessage):
            await reader.of_version((7).to_bytes(8, "big"))
