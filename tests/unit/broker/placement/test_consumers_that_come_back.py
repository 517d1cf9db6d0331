"""L9 over two brokers: the next owner knows the consumers of an owner that was killed."""

from magnetar.protocol.txn_id import TxnId
from tests.support.raw_client import RawConsumer
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.placement.test_coordinators import led
from tests.unit.broker.topics.dispatch.test_outdated_messages import refused, use
from tests.unit.broker.topics.test_end_to_end import EARLIEST, FAILOVER, fill, options
from tests.unit.broker.topics.test_transactional_acks import Stage, got, payloads

TOPIC = "persistent://public/default/handed-over"


class NodeStage(Stage):
    """One of several brokers, and the transactions of a coordinator that it leads."""

    async def begin(self) -> TxnId:
        coordinators = self.broker.transactions.coordinators
        (first, *_) = (each.coordinator_id for each in coordinators.led())
        return await coordinators.begin(first, 60_000, None)


async def subscribe(node: Node, name: str) -> tuple[NodeStage, RawConsumer]:
    client = await node.client()
    wanted = options(FAILOVER, initial_position=EARLIEST, consumer_name=name)
    consumer = await client.subscribe(TOPIC, "s", wanted, permits=10)
    return NodeStage(node.broker, client), consumer


async def test_messages_in_hand_are_used_once_though_the_owner_was_killed(
    cluster: Cluster,
) -> None:
    first, second = await cluster.add(), await cluster.add()
    await until(lambda: bool(led(first) and led(second)))
    await fill(await first.client(), 4, topic=TOPIC)
    stage, consumer = await subscribe(first, "first")
    hand = await got(consumer, 4)
    await use(stage, consumer, hand[:1])
    await first.kill()
    await cluster.all_know(second)
    stage, other = await subscribe(second, "other")
    messages = await got(other, 3)
    assert payloads(messages) == ["1", "2", "3"]
    await use(stage, other, messages[:1])
    await other.close()
    stage, consumer = await subscribe(second, "first")
    messages = await got(consumer, 2)
    assert payloads(messages) == ["2", "3"]
    await refused(stage, consumer, hand[2])
    await use(stage, consumer, messages)
