"""Records of clusters that change while messages are sent: none is lost, and none is doubled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from broker.replication.remote_cluster import RemoteCluster
from broker.replication.topic_replication import ReplicatedTopic
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from magnetar.protocol.ids import Position
from magnetar.protocol.names import parse_topic_name
from magnetar.wire.attachment import AttachmentState
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import TOPIC, Cluster

Pair = tuple[Cluster, Cluster]
CLUSTER = "/admin/v2/clusters/west"


class Load:
    """Messages that are published one after the other."""

    def __init__(self) -> None:
        self.published: list[bytes] = []

    async def more(self, count: int = 30) -> None:
        """Wait until so many more were published."""
        most = len(self.published) + count
        await until(lambda: len(self.published) >= most)


@asynccontextmanager
async def load_on(cluster: Cluster) -> AsyncIterator[Load]:
    """Publish until the end, which waits for the last receipt."""
    load, done = Load(), asyncio.Event()

    async def publish() -> None:
        client = await cluster.client()
        producer = await client.create_producer(TOPIC)
        while not done.is_set():
            payload = b"%d" % len(load.published)
            await producer.send(payload)
            load.published.append(payload)
        await client.close()

    task = asyncio.create_task(publish())
    try:
        yield load
    finally:
        done.set()
        await task


async def assert_all_once(pair: Pair, load: Load) -> None:
    east, west = pair
    await until(east.is_done, 60)
    count = west.broker.topics.loaded()[TOPIC].ledger.entry_count
    assert await west.payloads(count) == load.published


def failure_of(cluster: Cluster) -> str:
    """Why nothing is sent to west; empty also while the replicator is made anew."""
    replicator = cluster.replicators().get("west")
    return "" if replicator is None else replicator.failure or ""


async def test_messages_go_to_the_new_address_of_a_cluster(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    async with load_on(east) as load:
        await load.more()
        await west.stop()
        before = west.settings.pop("port")
        await load.more()
        await west.start()
        assert west.broker.port != before
        await east.ask("POST", CLUSTER, west.record)
        await load.more()
    await assert_all_once(pair, load)


async def test_a_namespace_that_the_other_cluster_lacks_is_named_with_that_cluster(
    pair: Pair,
) -> None:
    east, west = pair
    namespace, topic = "/admin/v2/namespaces/public/other", "persistent://public/other/t"
    await east.ask("PUT", namespace, {})
    await east.ask("POST", f"{namespace}/replication", ["east", "west"])
    await east.publish(b"1", topic=topic)
    replicator = east.replicators(topic)["west"]
    lacks = "At cluster 'west': The namespace public/other does not exist"
    await until(lambda: lacks in (replicator.failure or ""))
    await west.ask("PUT", namespace, {})
    await until(lambda: east.is_done(topic))
    assert replicator.failure is None


async def test_a_record_that_changes_often_loses_and_doubles_nothing(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    async with load_on(east) as load:
        for number in range(10):
            await east.ask("POST", CLUSTER, west.record | {"listenerName": f"l{number}"})
            await load.more(5)
        await east.ask("POST", CLUSTER, west.record)
        await load.more()
    await assert_all_once(pair, load)


async def test_a_record_that_leads_back_to_the_cluster_itself_doubles_nothing(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    await east.ask("POST", CLUSTER, east.record)
    async with load_on(east) as load:
        await load.more()
        await until(lambda: "own cluster 'east'" in failure_of(east))
        assert east.broker.topics.loaded()[TOPIC].ledger.entry_count <= len(load.published) + 1
        await east.ask("POST", CLUSTER, west.record)
        await load.more()
    await assert_all_once(pair, load)


async def test_messages_wait_while_a_record_is_gone_and_are_sent_once_it_is_back(
    pair: Pair,
) -> None:
    east, west = pair
    await west.messages(0)
    async with load_on(east) as load:
        await load.more()
        # Over REST it is refused, as a tenant names it.
        await east.rest.refused(412, "DELETE", CLUSTER)
        await east.broker.metadata.delete("/admin/clusters/west")
        await until(lambda: not east.replicators())
        await load.more()
        shown = (await east.stats())["replication"]["west"]
        assert "no cluster 'west'" in shown["lastFailure"]
        assert shown["replicationBacklog"] >= 30
        await east.ask("PUT", CLUSTER, west.record)
        await load.more()
    await assert_all_once(pair, load)


async def test_why_no_replicator_can_be_made_is_logged_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"0")
    replications = east.broker.replications
    reach, tries = replications.cluster, list[str]()

    def cluster(name: str) -> RemoteCluster:
        tries.append(name)
        return reach(name)

    monkeypatch.setattr(replications, "cluster", cluster)
    with capture_logs() as logs:
        for _ in range(2):
            await east.broker.metadata.delete("/admin/clusters/west")
            await until(lambda: not east.replicators())
            tries.clear()
            await until(lambda: len(tries) >= 3)
            await east.ask("PUT", CLUSTER, west.record)
            await until(lambda: bool(east.replicators()))
    events = [each["event"] for each in logs if each["event"] == "replication_not_changed"]
    assert len(events) == 2, "once for each time that it was away"


async def test_a_record_that_changes_while_a_replicator_is_made_is_obeyed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    open_replicator_cursor, changes = Topic.open_replicator_cursor, iter((True, False))

    async def open_and_change(topic: Topic, name: str, start: Position) -> Subscription:
        opened = await open_replicator_cursor(topic, name, start)
        for insecure in changes if name.endswith("west") else ():
            record = west.record | {"tlsAllowInsecureConnection": insecure}
            await east.ask("POST", CLUSTER, record)
            break
        return opened

    await west.messages(0)
    # West's replicator may have had it loaded already, and the replicator made.
    await until(lambda: TOPIC in east.broker.topics.loaded())
    await east.broker.topics.unload(parse_topic_name(TOPIC))
    monkeypatch.setattr(Topic, "open_replicator_cursor", open_and_change)
    async with load_on(east) as load:
        await load.more()
    assert next(changes, None) is None, "the second change was made"
    await assert_all_once(pair, load)


async def test_a_replicator_whose_end_is_cancelled_leaves_the_other_cluster(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"0")
    await until(east.is_done)
    replicator = east.replicators()["west"]
    closing = asyncio.create_task(replicator.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait((closing,))
    assert closing.cancelled()
    assert replicator.producer.state is AttachmentState.CLOSED


async def test_a_record_on_which_the_broker_fails_is_tried_again_once_it_is_changed(
    pair: Pair,
) -> None:
    east, west = pair
    await west.messages(0)
    url = "pulsar+ssl://127.0.0.1:1"
    unusable = {"brokerClientTlsEnabled": True, "brokerClientTrustCertsFilePath": "a\0b"}
    await east.ask("POST", CLUSTER, west.record | unusable | {"brokerServiceUrlTls": url})
    async with load_on(east) as load:
        await load.more()
        shown = (await east.stats())["replication"]["west"]
        assert "its log has the cause" in shown["lastFailure"]
        await east.ask("POST", CLUSTER, west.record)
        await load.more()
    await assert_all_once(pair, load)


async def test_topics_learn_of_a_changed_record_in_several_turns_of_the_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "LISTENERS_CALLED_AT_ONCE", 1)
    east, west = pair
    for number in range(3):
        await east.publish(b"0", topic=f"persistent://public/default/t{number}")
    restart, restarted, at_once = ReplicatedTopic.restart, list[ReplicatedTopic](), list[int]()

    def noted(topic: ReplicatedTopic, remote: str) -> None:
        restarted.append(topic)
        restart(topic, remote)

    monkeypatch.setattr(ReplicatedTopic, "restart", noted)
    east.broker.clusters.on_change(lambda _: at_once.append(len(restarted)))
    await east.ask("POST", CLUSTER, west.record | {"tlsAllowInsecureConnection": True})
    await until(lambda: len(set(restarted)) == 3)
    assert at_once[0] == 1
