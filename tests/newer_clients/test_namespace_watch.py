"""WATCH_SCALABLE_TOPICS: everything once, then what changed, and nothing that is known."""

import google_crc32c
import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.newer_clients.conftest import Connect
from tests.support.raw_client import Session

Kind = pb.BaseCommand
NAMESPACE = "public/default"


def full(*names: str) -> list[str]:
    return [f"topic://{NAMESPACE}/{name}" for name in names]


async def create(broker: Broker, name: str, **properties: str) -> None:
    topic = parse_topic_name(*full(name))
    await broker.scalable.create(topic, segments=1, properties=properties)


async def delete(broker: Broker, name: str) -> None:
    await broker.scalable.delete(parse_topic_name(*full(name)), force=False)


async def next_update(session: Session) -> pb.CommandWatchScalableTopicsUpdate:
    return (await session.next()).watch_scalable_topics_update


async def differences(session: Session, count: int) -> tuple[set[str], set[str]]:
    """Added and removed over as many diffs as it takes for `count` names."""
    added: set[str] = set()
    removed: set[str] = set()
    while len(added) + len(removed) < count:
        update = await next_update(session)
        assert update.HasField("diff")
        added.update(update.diff.added)
        removed.update(update.diff.removed)
    return added, removed


def hash_of(names: list[str]) -> str:
    """As clients compute it: the CRC32C's bytes in little-endian order, in hex."""
    return int(google_crc32c.value(",".join(sorted(names)).encode())).to_bytes(4, "little").hex()


async def test_everything_once_then_what_changes(broker: Broker, connect: Connect) -> None:
    await create(broker, "a")
    client = await connect()
    session = await client.watch_namespace(NAMESPACE)
    first = await next_update(session)
    assert list(first.snapshot.topics) == full("a")
    await create(broker, "b")
    assert await differences(session, 1) == (set(full("b")), set())
    await delete(broker, "a")
    assert await differences(session, 1) == (set(), set(full("a")))


async def test_an_empty_namespace_has_an_empty_snapshot(connect: Connect) -> None:
    session = await (await connect()).watch_namespace(NAMESPACE)
    update = await next_update(session)
    assert update.HasField("snapshot")
    assert not update.snapshot.topics


async def test_watch_with_the_current_hash_gets_changes_only(
    broker: Broker, connect: Connect
) -> None:
    for name in ("b", "a"):
        await create(broker, name)
    client = await connect()
    session = await client.watch_namespace(NAMESPACE, current_hash=hash_of(full("a", "b")))
    await create(broker, "c")
    assert await differences(session, 1) == (set(full("c")), set())


async def test_watch_with_another_hash_gets_a_snapshot(broker: Broker, connect: Connect) -> None:
    await create(broker, "a")
    client = await connect()
    session = await client.watch_namespace(NAMESPACE, current_hash=hash_of(full("gone")))
    assert list((await next_update(session)).snapshot.topics) == full("a")


async def test_filters_match_properties_exactly_and_all(broker: Broker, connect: Connect) -> None:
    await create(broker, "both", team="x", tier="1")
    await create(broker, "one", team="x")
    await create(broker, "none")
    client = await connect()
    session = await client.watch_namespace(NAMESPACE, {"team": "x", "tier": "1"})
    assert list((await next_update(session)).snapshot.topics) == full("both")
    await create(broker, "other", team="x", tier="2")
    await create(broker, "more", team="x", tier="1")
    assert await differences(session, 1) == (set(full("more")), set())


async def test_a_deleted_topic_is_removed_and_may_come_again(
    broker: Broker, connect: Connect
) -> None:
    """Apache Pulsar 5.0.0-M1 was seen to push `added` for a deletion."""
    await create(broker, "a")
    session = await (await connect()).watch_namespace(NAMESPACE)
    await next_update(session)
    await delete(broker, "a")
    assert await differences(session, 1) == (set(), set(full("a")))
    await create(broker, "a")
    assert await differences(session, 1) == (set(full("a")), set())


async def test_topics_of_other_namespaces_are_not_told(broker: Broker, connect: Connect) -> None:
    client = await connect()
    session = await client.watch_namespace("public/elsewhere")
    update = await next_update(session)
    assert update.HasField("error")
    assert not update.HasField("snapshot")


async def test_a_closed_watch_tells_nothing(broker: Broker, connect: Connect) -> None:
    """Another watch of the same connection shows when the change has been told."""
    client = await connect()
    closed = await client.watch_namespace(NAMESPACE)
    await next_update(closed)
    close = pb.CommandWatchScalableTopicsClose(watch_id=closed.session_id)
    client.send(Kind.WATCH_SCALABLE_TOPICS_CLOSE, close)
    still = await client.watch_namespace(NAMESPACE)
    await next_update(still)
    await create(broker, "a")
    assert await differences(still, 1) == (set(full("a")), set())
    assert closed.updates.empty()


@pytest.mark.parametrize("settings", [{"scalable_topic_auto_create": True}])
async def test_a_watch_gets_a_topic_that_a_lookup_creates(
    connect: Connect, settings: dict[str, object]
) -> None:
    client = await connect()
    session = await client.watch_namespace(NAMESPACE)
    await next_update(session)
    await client.watch_dag(full("auto")[0])
    assert await differences(session, 1) == (set(full("auto")), set())
