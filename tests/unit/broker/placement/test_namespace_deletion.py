"""Topics that one broker creates while another one deletes their namespace."""

from collections.abc import Awaitable, Callable, Mapping

import pytest

from broker.admin.namespaces import delete_namespace
from broker.app.service import Broker
from broker.policies.namespaces import NamespaceNotFound, NotEmpty
from magnetar.protocol.names import NamespaceName, TopicDomain, parse_topic_name
from magnetar.protocol.server_error import MagnetarError, ServerError
from tests.unit.broker.placement.cluster import Cluster, Node

SPACE = NamespaceName("public", "gone")
RECORD = f"/admin/policies/{SPACE}"
ORDINARY = parse_topic_name(f"persistent://{SPACE}/t")
SCALABLE = parse_topic_name(f"topic://{SPACE}/t")
NON_PERSISTENT = parse_topic_name(f"non-persistent://{SPACE}/t")

Creation = Callable[[Broker], Awaitable[object]]
CREATIONS: Mapping[str, tuple[Creation, str]] = {
    "ordinary": (lambda broker: broker.topics.create(ORDINARY), "/managed-ledgers/"),
    "first use": (lambda broker: broker.topics.get(ORDINARY, create=True), "/managed-ledgers/"),
    "partitioned": (
        lambda broker: broker.topics.partitioned.create(ORDINARY, 2),
        "/admin/partitioned-topics/",
    ),
    "partitioned, non-persistent": (
        lambda broker: broker.topics.partitioned.create(NON_PERSISTENT, 2),
        "/admin/partitioned-topics/",
    ),
    "scalable": (
        lambda broker: broker.scalable.create(SCALABLE, segments=1, properties={}),
        "/topics/",
    ),
}
"""Ways to create a topic, and the root of the record that each writes."""
each_creation = pytest.mark.parametrize(
    ("creation", "root"), CREATIONS.values(), ids=list(CREATIONS)
)


async def two_brokers(cluster: Cluster) -> tuple[Node, Node]:
    """Two brokers that both know a namespace without topics."""
    first, second = await cluster.add(), await cluster.add()
    await first.broker.namespaces.create(SPACE)
    await second.broker.namespaces.require(SPACE)
    return first, second


def run_before(
    node: Node, method: str, work: Callable[[], Awaitable[object]], key_starts: str
) -> None:
    """Do `work` once, before the first write of a record with such a key by a broker."""
    write, is_done = getattr(node.view, method), False

    async def write_after(key: str, *args: object, **settings: object) -> object:
        nonlocal is_done
        if key.startswith(key_starts) and not is_done:
            is_done = True
            await work()
        return await write(key, *args, **settings)

    setattr(node.view, method, write_after)


async def topics_in(broker: Broker) -> list[str]:
    return [
        *await broker.topics.list_names(SPACE),
        *await broker.topics.partitioned.list(SPACE, TopicDomain.NON_PERSISTENT),
        *await broker.scalable.list(SPACE, {}),
    ]


@each_creation
async def test_topic_is_not_created_in_a_namespace_that_was_deleted_before_its_record_was_written(
    cluster: Cluster, creation: Creation, root: str
) -> None:
    first, second = await two_brokers(cluster)

    async def delete() -> None:
        await delete_namespace(first.broker, SPACE, force=False)

    run_before(second, "put", delete, f"{root}{SPACE}/")
    with pytest.raises(NamespaceNotFound, match="does not exist"):
        await creation(second.broker)
    assert await topics_in(second.broker) == []
    # Under the same name it is created later.
    await first.broker.namespaces.create(SPACE)
    await creation(first.broker)
    assert len(await topics_in(first.broker)) > 0


@each_creation
async def test_topic_is_not_created_between_the_last_look_into_a_namespace_and_its_deletion(
    cluster: Cluster, creation: Creation, root: str
) -> None:
    first, second = await two_brokers(cluster)

    async def create() -> None:
        with pytest.raises(MagnetarError) as refused:
            await creation(second.broker)
        assert refused.value.code is ServerError.TOPIC_NOT_FOUND

    run_before(first, "delete", create, RECORD)
    await delete_namespace(first.broker, SPACE, force=False)
    assert await topics_in(second.broker) == []
    with pytest.raises(NamespaceNotFound):
        await first.broker.namespaces.require(SPACE)


@each_creation
async def test_namespace_stays_with_a_topic_that_is_created_just_before_it_is_marked(
    cluster: Cluster, creation: Creation, root: str
) -> None:
    first, second = await two_brokers(cluster)
    run_before(first, "put", lambda: creation(second.broker), RECORD)
    with pytest.raises(NotEmpty):
        await delete_namespace(first.broker, SPACE, force=False)
    assert len(await topics_in(first.broker)) > 0
    assert (await first.broker.namespaces.require(SPACE)).auto_topic_creation is None


async def test_namespace_whose_deletion_was_interrupted_takes_no_topics_until_it_is_repeated(
    cluster: Cluster,
) -> None:
    first, second = await two_brokers(cluster)

    async def die() -> None:
        await first.kill()
        raise ConnectionResetError

    run_before(first, "delete", die, RECORD)
    with pytest.raises(ConnectionResetError):
        await delete_namespace(first.broker, SPACE, force=False)
    with pytest.raises(NamespaceNotFound, match=f"DELETE /admin/v2/namespaces/{SPACE}"):
        await second.broker.topics.create(ORDINARY)
    assert await topics_in(second.broker) == []
    await delete_namespace(second.broker, SPACE, force=False)
    assert await second.broker.namespaces.list("public") == ["public/default"]
