"""Schemas: what one client registers the other one writes and reads with."""

from collections.abc import Callable
from typing import Any

import pytest

import magnetar
from magnetar.consume.settings import InitialPosition
from magnetar.errors import IncompatibleSchema
from magnetar.schema.auto import AUTO
from magnetar.schema.avro import avro_of
from magnetar.schema.json import json_of
from magnetar.schema.schema import Schema
from tests.client.conftest import Topic, rest
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient, JavaFailed
from tests.interop.records import KINDS, Point, PointWithUnit, as_told

EARLIEST = InitialPosition.EARLIEST
STRUCTURED = ("json_reading", "avro_reading", "protobuf")
SchemaOf = Callable[[type], Schema[Any]]


async def versions(topic: Topic) -> int:
    """How many schemas the topic has had."""
    path = f"/schemas/public/default/{topic.local_name}/schemas"
    status, answer = await rest(topic.service, "GET", path)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return len(answer["getSchemaResponses"])


@pytest.mark.parametrize(
    ("kind", "first"),
    [*((kind, "ours") for kind in KINDS), *((kind, "java") for kind in STRUCTURED)],
)
async def test_both_write_and_read(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, kind: str, first: str
) -> None:
    schema, values = KINDS[kind]
    where = await topic()
    expected = [as_told(value) for value in values]

    async def java_writes() -> None:
        producer = await java.producer(where.name, kind)
        await producer.send(expected)
        await producer.close()

    async def ours_writes() -> None:
        async with client.producer(where.name, schema=schema) as producer:
            for value in values:
                await producer.send(value)

    writes = [java_writes, ours_writes]
    for write in writes if first == "java" else reversed(writes):
        await write()
    consumer = await java.stream(where.name, "java", kind)
    assert [message.value for message in await consumer.receive(2 * len(values))] == 2 * expected
    await consumer.close()
    received: list[Any] = []
    async with client.stream_consumer(
        where.name, "ours", schema=schema, initial_position=EARLIEST
    ) as reader:
        while len(received) < 2 * len(values):
            received.append((await reader.receive(10)).value)
    assert received == 2 * values


@pytest.mark.parametrize("kind", ["json_point", "avro_point", "protobuf", "string"])
async def test_the_same_definition_is_one_version(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, kind: str
) -> None:
    """Where it has no lists: the Java client's definition names their Java classes."""
    schema, values = KINDS[kind]
    where = await topic()
    producer = await java.producer(where.name, kind)
    await producer.send([as_told(values[0])])
    async with client.producer(where.name, schema=schema) as ours:
        await ours.send(values[0])
    assert await versions(where) == 1
    await producer.close()


@pytest.mark.parametrize(("form", "schema_of"), [("json", json_of), ("avro", avro_of)])
async def test_records_grow(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, form: str, schema_of: SchemaOf
) -> None:
    """Each reads what the other wrote with an older and with a newer class."""
    old, new = schema_of(Point), schema_of(PointWithUnit)
    where = await topic()
    for write_old in (True, False):
        kind = f"{form}_point" if write_old else f"{form}_point_with_unit"
        told = {"name": "java", "x": 1} if write_old else {"name": "java", "x": 1, "unit": "K"}
        producer = await java.producer(where.name, kind)
        await producer.send([told])
        await producer.close()
        value = Point("ours", 2) if write_old else PointWithUnit("ours", 2, "K")
        async with client.producer(where.name, schema=old if write_old else new) as ours:
            await ours.send(value)
    units = [("java", None), ("ours", None), ("java", "K"), ("ours", "K")]
    consumer = await java.stream(where.name, "java", f"{form}_point_with_unit")
    received = [message.value for message in await consumer.receive(4)]
    assert [(each["name"], each["unit"]) for each in received] == units  # type: ignore[index]
    await consumer.close()
    for schema, subscription in ((old, "old"), (new, "new"), (AUTO, "auto")):
        async with client.queue_consumer(
            where.name, subscription, schema=schema, initial_position=EARLIEST
        ) as reader:
            values = [(await reader.receive(10)).value for _ in range(4)]
        if schema is old:
            assert values == [Point(name, 1 if name == "java" else 2) for name, _ in units]
        elif schema is new:
            assert [(value.name, value.unit) for value in values] == units
        else:
            assert [value["name"] for value in values] == [name for name, _ in units]


async def test_java_finds_our_schema_by_itself(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    where = await topic()
    async with client.producer(where.name, schema=avro_of(Point)) as producer:
        await producer.send(Point("ours", 2))
    consumer = await java.queue(where.name, "java", "auto")
    assert [message.value for message in await consumer.receive(1)] == [{"name": "ours", "x": 2}]
    await consumer.close()


async def test_incompatible_schema_is_refused(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    where, other = await topic(), await topic()
    producer = await java.producer(where.name, "json_point")
    await producer.send([{"name": "java", "x": 1}])
    with pytest.raises(IncompatibleSchema):
        async with client.producer(where.name, schema=str) as ours:
            await ours.send("text")
    async with client.producer(other.name, schema=str) as ours:
        await ours.send("text")
    with pytest.raises(JavaFailed, match="IncompatibleSchema"):
        await (await java.producer(other.name, "json_point")).send([{"name": "java", "x": 1}])
    await producer.close()
