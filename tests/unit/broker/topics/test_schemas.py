"""Schema histories and namespaces on the in-memory store."""

import asyncio
import json
import threading

import pytest
import pytest_asyncio

from broker.policies.namespaces import NamespaceExists, NamespaceNotFound, Namespaces, NotEmpty
from broker.policies.schema_compatibility import (
    CheckPart,
    CompatibilityStrategy,
    IncompatibleSchema,
    SchemaDefinition,
    SchemaType,
)
from broker.topics.schemas import SchemaNotFound, SchemaRegistry
from config.bounds import MAX_SCHEMA_HISTORY_BYTES, SMALL_SCHEMA_BYTES
from config.settings import Settings
from magnetar.protocol.names import NamespaceName
from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from tests.support.waiting import TIMEOUT_S

FULL = CompatibilityStrategy.FULL
STRING = SchemaDefinition(SchemaType.STRING, b"", "s", {"a": "b"})


def with_optional(count: int) -> SchemaDefinition:
    fields = [{"name": f"f{i}", "type": ["null", "int"], "default": None} for i in range(count)]
    definition = {"type": "record", "name": "R", "fields": fields}
    return SchemaDefinition(SchemaType.JSON, json.dumps(definition).encode())


@pytest_asyncio.fixture
async def metadata() -> MemoryMetadataStore:
    return MemoryMetadataStore(SystemClock())


@pytest_asyncio.fixture
async def registry(metadata: MemoryMetadataStore) -> SchemaRegistry:
    return SchemaRegistry(metadata, SystemClock())


async def test_versions_count_up_and_repeat_for_what_is_known(registry: SchemaRegistry) -> None:
    first, second = with_optional(1), with_optional(2)
    assert await registry.add("t/n/x", first, FULL) == 0
    assert await registry.add("t/n/x", second, FULL) == 1
    assert await registry.add("t/n/x", first, FULL) == 0
    assert (await registry.get("t/n/x")).definition == second
    assert (await registry.get("t/n/x", 0)).definition == first
    with pytest.raises(SchemaNotFound):
        await registry.get("t/n/x", 2)
    with pytest.raises(IncompatibleSchema):
        await registry.add("t/n/x", STRING, FULL)


async def test_racing_producers_agree_on_one_version(registry: SchemaRegistry) -> None:
    versions = await asyncio.gather(*(registry.add("t/n/x", STRING, FULL) for _ in range(20)))
    assert set(versions) == {0}
    assert len(await registry.history("t/n/x")) == 1


async def test_after_a_deletion_versions_go_on(registry: SchemaRegistry) -> None:
    await registry.add("t/n/x", STRING, FULL)
    assert await registry.delete("t/n/x") == 1
    with pytest.raises(SchemaNotFound):
        await registry.get("t/n/x")
    assert await registry.add("t/n/x", with_optional(1), FULL) == 2
    await registry.forget("t/n/x")
    assert await registry.add("t/n/x", STRING, FULL) == 0


async def test_consumers_bring_the_first_schema_or_must_read(registry: SchemaRegistry) -> None:
    await registry.check_consumer("t/n/x", SchemaDefinition(SchemaType.AUTO_CONSUME, b""), FULL)
    assert await registry.history("t/n/x") == []
    await registry.check_consumer("t/n/x", STRING, FULL)
    assert (await registry.get("t/n/x")).definition == STRING
    for other in (with_optional(1), SchemaDefinition(SchemaType.NONE, b"")):
        with pytest.raises(IncompatibleSchema):
            await registry.check_consumer("t/n/x", other, FULL)
    await registry.check_consumer("t/n/y", SchemaDefinition(SchemaType.NONE, b""), FULL)
    assert (await registry.get("t/n/y")).definition.kind is SchemaType.NONE


async def test_namespaces_and_their_policies(metadata: MemoryMetadataStore) -> None:
    namespaces = Namespaces(metadata, Settings())
    await namespaces.start()
    await namespaces.start()
    assert await namespaces.tenants() == ["public", "pulsar"]
    name = NamespaceName("public", "other")
    with pytest.raises(NamespaceNotFound, match="PUT /admin/v2/namespaces/public/other"):
        await namespaces.require(name)
    await namespaces.create(name)
    with pytest.raises(NamespaceExists):
        await namespaces.create(name)
    assert "deduplicationEnabled" not in (await namespaces.require(name)).raw
    await namespaces.change(name, lambda value: value.update(deduplicationEnabled=True))
    assert (await namespaces.require(name)).raw["deduplicationEnabled"] is True
    with pytest.raises(NotEmpty):
        await namespaces.delete_tenant("public")

    async def without_topics() -> None:
        """Find none."""

    await namespaces.delete(name, without_topics)
    with pytest.raises(NamespaceNotFound):
        await namespaces.require(name)
    await namespaces.stop()


async def test_a_change_by_another_broker_arrives(metadata: MemoryMetadataStore) -> None:
    ours, theirs = Namespaces(metadata, Settings()), Namespaces(metadata, Settings())
    await ours.start()
    name = NamespaceName("public", "default")
    assert (await ours.require(name)).raw.get("deduplicationEnabled") is None
    await theirs.change(name, lambda value: value.update(deduplicationEnabled=True))
    async with asyncio.timeout(TIMEOUT_S):
        while (await ours.require(name)).raw.get("deduplicationEnabled") is not True:
            await asyncio.sleep(0)
    await ours.stop()
    await theirs.stop()


async def test_bytes_of_a_history_are_bounded(registry: SchemaRegistry) -> None:
    half = MAX_SCHEMA_HISTORY_BYTES // 16
    always = CompatibilityStrategy.ALWAYS_COMPATIBLE
    for number in range(16):
        data = bytes([number]) * half
        await registry.add("t/n/x", SchemaDefinition(SchemaType.EXTERNAL, data), always)
    with pytest.raises(IncompatibleSchema, match="use one of them, or delete the history"):
        await registry.add("t/n/x", SchemaDefinition(SchemaType.EXTERNAL, b"one more"), always)
    known = SchemaDefinition(SchemaType.EXTERNAL, bytes([3]) * half)
    assert await registry.add("t/n/x", known, always) == 3


async def test_properties_and_names_count_for_the_bytes_of_a_history(
    registry: SchemaRegistry,
) -> None:
    string, full = SchemaType.STRING, CompatibilityStrategy.FULL
    text = "x" * (MAX_SCHEMA_HISTORY_BYTES // 17)
    for number in range(8):
        schema = SchemaDefinition(string, bytes([number]), text, {"p": text})
        await registry.add("t/n/x", schema, full)
    with pytest.raises(IncompatibleSchema, match="use one of them, or delete the history"):
        await registry.add("t/n/x", SchemaDefinition(string, b"", text, {"p": text}), full)


async def test_large_schemas_are_checked_off_the_loop(registry: SchemaRegistry) -> None:
    threads: list[str] = []

    def part(nbytes: int) -> CheckPart:
        return CheckPart(nbytes, lambda: threads.append(threading.current_thread().name))

    await registry.run_check([part(0), part(SMALL_SCHEMA_BYTES), part(SMALL_SCHEMA_BYTES + 1)])
    here = threading.current_thread().name
    assert threads[:2] == [here, here]
    assert threads[2].startswith("schema-check")
