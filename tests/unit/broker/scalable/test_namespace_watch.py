"""Watching a namespace: snapshot or nothing, then differences."""

import pytest

from broker.scalable import namespace_watch
from broker.topics.topic_listing import topics_hash
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.scalable.node import Node, Peer

A, B = "topic://public/default/a", "topic://public/default/b"


async def create(node: Node, name: str, **properties: str) -> None:
    await node.scalable.create(parse_topic_name(name), segments=1, properties=properties)


def watch(
    peer: Peer,
    *,
    namespace: str = "public/default",
    filters: dict[str, str] | None = None,
    current_hash: str | None = None,
) -> int:
    watch_id = peer.new_id()
    pairs = list((filters or {}).items())
    peer.broker.scalable.namespace_watches.open(
        peer.as_connection(), watch_id, namespace, pairs, current_hash
    )
    return watch_id


async def update(peer: Peer) -> pb.CommandWatchScalableTopicsUpdate:
    """The next (and by now only) update."""
    kind = pb.BaseCommand.WATCH_SCALABLE_TOPICS_UPDATE
    await until(lambda: any(command.type == kind for command in peer.sent))
    (command,) = peer.taken(kind)
    return command.watch_scalable_topics_update


def diff(told: pb.CommandWatchScalableTopicsUpdate) -> tuple[list[str], list[str]]:
    assert told.WhichOneof("event") == "diff"
    return list(told.diff.added), list(told.diff.removed)


async def test_a_snapshot_then_differences(node: Node) -> None:
    await create(node, A)
    peer = node.peer()
    watch_id = watch(peer)
    first = await update(peer)
    assert (first.watch_id, list(first.snapshot.topics)) == (watch_id, [A])
    await create(node, B)
    assert diff(await update(peer)) == ([B], [])
    await node.scalable.delete(parse_topic_name(A), force=True)
    assert diff(await update(peer)) == ([], [A]), "a deletion is told as one"


async def test_an_empty_namespace_has_an_empty_snapshot(node: Node) -> None:
    peer = node.peer()
    watch(peer)
    first = await update(peer)
    assert first.WhichOneof("event") == "snapshot"
    assert not first.snapshot.topics


async def test_changes_in_quick_succession_are_sent_in_one_update(node: Node) -> None:
    peer = node.peer()
    watch(peer)
    await update(peer)
    names = [f"topic://public/default/t{n}" for n in range(5)]
    for name in names:
        await create(node, name)
    await node.scalable.delete(parse_topic_name(names[0]), force=True)
    assert diff(await update(peer)) == (names[1:], [])


async def test_namespace_watch_ignores_splits_and_consumers(node: Node) -> None:
    await create(node, A)
    peer = node.peer()
    watch(peer)
    await update(peer)
    await node.scalable.split(parse_topic_name(A), 0)
    await peer.register("c", topic=A)
    await create(node, B)
    assert diff(await update(peer)) == ([B], [])


async def test_an_equal_hash_is_answered_with_nothing(node: Node) -> None:
    await create(node, A)
    peer = node.peer()
    watch(peer, current_hash=topics_hash([A]))
    await create(node, B)
    assert diff(await update(peer)) == ([B], [])
    watch(peer, current_hash=topics_hash([A]))
    assert list((await update(peer)).snapshot.topics) == [A, B]


async def test_only_topics_with_the_properties_are_there(node: Node) -> None:
    await create(node, A, team="x", tier="1")
    peer = node.peer()
    watch(peer, filters={"team": "x", "tier": "1"})
    assert list((await update(peer)).snapshot.topics) == [A]
    await create(node, "topic://public/default/c", team="x")
    await create(node, B, team="x", tier="1", more="yes")
    assert diff(await update(peer)) == ([B], [])


@pytest.mark.parametrize("namespace", ["public/nowhere", "nonsense"])
async def test_a_namespace_that_is_not_there_is_an_error(node: Node, namespace: str) -> None:
    peer = node.peer()
    watch(peer, namespace=namespace)
    told = await update(peer)
    assert told.HasField("error")
    assert told.message
    assert told.WhichOneof("event") is None
    assert not peer.closing


async def test_a_closed_watch_gets_no_events(node: Node) -> None:
    peer, other = node.peer(), node.peer()
    watch_id = watch(peer)
    watch(other)
    await update(peer)
    await update(other)
    node.scalable.namespace_watches.close(peer.as_connection(), watch_id)
    node.scalable.namespace_watches.close(peer.as_connection(), 99)
    await create(node, A)
    await update(other)
    assert not peer.sent


async def test_watches_of_one_connection_are_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(
        monkeypatch, "SESSIONS_PER_CONNECTION", 1, in_module="broker.scalable.namespace_watch"
    )
    peer = node.peer()
    watch(peer)
    await update(peer)
    watch(peer)
    assert (await update(peer)).error == pb.TooManyRequests


async def test_watches_that_were_refused_do_not_count(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(
        monkeypatch, "SESSIONS_PER_CONNECTION", 1, in_module="broker.scalable.namespace_watch"
    )
    peer = node.peer()
    for _ in range(2):
        watch(peer, namespace="public/nowhere")
        assert (await update(peer)).error != pb.TooManyRequests
    watch(peer)
    assert not (await update(peer)).HasField("error")


@pytest.mark.parametrize(
    ("names", "expected"),
    # CRC32C (Castagnoli) of "" is 0, of "123456789" e3069283; bytes are written lowest first.
    [([], "00000000"), (["123456789"], "839206e3")],
)
def test_hashes(names: list[str], expected: str) -> None:
    assert topics_hash(names) == expected


def test_the_hash_does_not_depend_on_the_order() -> None:
    assert topics_hash([A, B]) == topics_hash([B, A]) != topics_hash([A])


async def test_a_watch_that_breaks_closes_the_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = node.peer()
    watch(peer)
    await update(peer)

    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(namespace_watch._Watch, "apply", fails)
    await create(node, A)
    await until(lambda: peer.closing)
