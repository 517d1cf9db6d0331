"""Changes of tenants and namespaces by several requests, or several brokers, at the same time."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import TypedDict, Unpack

import pytest

from broker.policies.namespaces import (
    JsonObject,
    NamespaceChanged,
    NamespaceNotFound,
    Namespaces,
    NotEmpty,
    TenantChanged,
    TenantNotFound,
)
from config.settings import Settings
from magnetar.protocol.names import NamespaceName
from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import IndexEntry, PutResult, Session, Version
from tests.support.waiting import until

OURS: JsonObject = {"adminRoles": ["ours"]}
THEIRS: JsonObject = {"adminRoles": ["theirs"]}


@pytest.fixture
async def brokers() -> AsyncIterator[tuple[Namespaces, Namespaces]]:
    """The namespaces as two brokers of a cluster see them."""
    metadata = MemoryMetadataStore(SystemClock())
    ours, theirs = Namespaces(metadata, Settings()), Namespaces(metadata, Settings())
    await ours.start()
    await ours.create_tenant("t", {"adminRoles": []})
    yield ours, theirs
    await ours.stop()
    await theirs.stop()


async def allow(_replaced: JsonObject) -> None:
    """Allow any change."""


async def allow_deletion() -> None:
    """Find no topics."""


async def test_update_of_a_tenant_is_refused_when_another_one_came_between(
    brokers: tuple[Namespaces, Namespaces],
) -> None:
    ours, theirs = brokers

    async def while_theirs_is_written(_replaced: JsonObject) -> None:
        await theirs.update_tenant("t", dict(THEIRS), allow)

    with pytest.raises(TenantChanged, match="was changed or deleted by another request"):
        await ours.update_tenant("t", dict(OURS), while_theirs_is_written)
    assert await ours.tenant("t") == THEIRS
    await ours.update_tenant("t", dict(OURS), allow)
    assert await theirs.tenant("t") == OURS


async def test_tenant_that_is_deleted_while_it_is_updated_stays_deleted(
    brokers: tuple[Namespaces, Namespaces],
) -> None:
    ours, theirs = brokers

    async def while_it_is_deleted(_replaced: JsonObject) -> None:
        await theirs.delete_tenant("t")

    with pytest.raises(TenantChanged):
        await ours.update_tenant("t", dict(OURS), while_it_is_deleted)
    assert "t" not in await ours.tenants()


async def test_namespace_that_another_broker_has_deleted_does_not_come_back_with_a_policy(
    brokers: tuple[Namespaces, Namespaces],
) -> None:
    ours, theirs = brokers
    name = NamespaceName("t", "n")
    await ours.create(name)
    await ours.require(name)
    await theirs.delete(name, allow_deletion)
    with pytest.raises(NamespaceNotFound):
        await ours.change(name, lambda record: record.update(deleted=False))
    assert await theirs.list("t") == []


async def test_a_namespace_that_gets_a_topic_while_it_is_deleted_stays_as_it_was(
    brokers: tuple[Namespaces, Namespaces],
) -> None:
    ours, theirs = brokers
    name = NamespaceName("t", "n")
    await ours.create(name)
    before = (await theirs.require(name)).raw
    checks = 0

    async def find_a_topic_the_second_time() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            # So none is made after this check, which is the last one.
            await until(lambda: theirs.known(name).auto_topic_creation is False)
            # A change that comes now stays too.
            await theirs.change(name, lambda record: record.update(deduplicationEnabled=True))
            raise NotEmpty("There is a topic.")

    with pytest.raises(NotEmpty):
        await ours.delete(name, find_a_topic_the_second_time)
    assert (await ours.require(name)).raw == {**before, "deduplicationEnabled": True}


async def test_a_namespace_that_is_changed_while_it_is_deleted_is_checked_again(
    brokers: tuple[Namespaces, Namespaces],
) -> None:
    ours, theirs = brokers
    name = NamespaceName("t", "n")
    await ours.create(name)
    checks = 0

    async def change_a_policy_the_second_time() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            await theirs.change(name, lambda record: record.update(deduplicationEnabled=True))

    await ours.delete(name, change_a_policy_the_second_time)
    assert checks == 3
    assert await theirs.list("t") == []


async def test_a_namespace_that_others_change_each_time_is_not_deleted(
    brokers: tuple[Namespaces, Namespaces],
) -> None:
    ours, theirs = brokers
    name = NamespaceName("t", "n")
    await ours.create(name)
    numbers = count()

    async def change_a_property() -> None:
        await theirs.change(name, lambda record: record.update(properties={"n": next(numbers)}))

    with pytest.raises(NamespaceChanged, match="try again"):
        await ours.delete(name, change_a_property)
    assert (await theirs.require(name)).auto_topic_creation is None


class Conditions(TypedDict, total=False):
    """What `put` may be asked besides."""

    partition: str | None
    expect: Version | None
    session: Session | None
    sequence: bool
    indexes: Sequence[IndexEntry]


class Interrupted(MemoryMetadataStore):
    """Does something else, once, after it has shown or stored records below that of a tenant."""

    then: Callable[[], Awaitable[None]] | None = None
    then_of_put: Callable[[], Awaitable[None]] | None = None

    async def children(self, key: str) -> list[str]:
        found = await super().children(key)
        then, self.then = self.then, None
        if then is not None:
            await then()
        return found

    async def put(self, key: str, value: bytes, **settings: Unpack[Conditions]) -> PutResult:
        done = await super().put(key, value, **settings)
        if key == "/admin/policies/t/n" and self.then_of_put is not None:
            await self.then_of_put()
        return done


async def test_a_tenant_that_gets_a_namespace_while_it_is_deleted_stays() -> None:
    metadata = Interrupted(SystemClock())
    ours, theirs = Namespaces(metadata, Settings()), Namespaces(metadata, Settings())
    await ours.create_tenant("t", OURS)
    metadata.then = lambda: theirs.create(NamespaceName("t", "n"))
    with pytest.raises(NotEmpty):
        await ours.delete_tenant("t")
    assert await ours.list("t") == ["t/n"]
    assert await ours.tenant("t") == OURS


async def test_no_namespace_stays_of_a_tenant_that_is_deleted_while_it_is_created() -> None:
    metadata = Interrupted(SystemClock())
    namespaces = Namespaces(metadata, Settings(max_namespaces_per_tenant=1))
    await namespaces.create_tenant("t", OURS)

    async def delete_with_the_namespace_unseen() -> None:
        await metadata.delete("/admin/policies/t")

    metadata.then_of_put = delete_with_the_namespace_unseen
    with pytest.raises(TenantNotFound):
        await namespaces.create(NamespaceName("t", "n"))
    assert await metadata.children("/admin/policies/t") == []
