"""A8: one broker ends the transaction, another one has the topic and hears of it late."""

from dataclasses import dataclass

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId
from tests.support.raw_client import Delivery, RawConsumer
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from txn.coordinators import Coordinators
from txn.records import TxnState

TOPIC = "persistent://public/default/t"
MESSAGES = 6
EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


@dataclass
class Stage:
    """A stream consumer at one broker; transactions begin and end at another one."""

    owner: Node
    coordinators: Coordinators
    consumer: RawConsumer
    epoch: int = 0

    async def begin(self) -> TxnId:
        coordinator = self.coordinators.led()[0].coordinator_id
        return await self.coordinators.begin(coordinator, 60_000, None)

    async def end(self, txn: TxnId, state: TxnState) -> None:
        """A11: after an abort all is asked for again."""
        await self.coordinators.end_transaction(txn, state, None)
        if state is TxnState.ABORTED:
            self.epoch += 1
            self.consumer.redeliver(epoch=self.epoch)

    async def receive(self) -> Delivery:
        while True:
            delivery = await self.consumer.receive()
            if delivery.command.consumer_epoch >= self.epoch:
                return delivery

    async def acknowledge(self, txn: TxnId, delivery: Delivery) -> None:
        ack = self.consumer.ack_command([delivery.message_id], True, None)
        ack.txnid_most_bits, ack.txnid_least_bits = txn
        await self.consumer.client.request(pb.BaseCommand.ACK, ack)


@pytest.fixture
async def stage(cluster: Cluster) -> Stage:
    first, owner = await cluster.add(), await cluster.add()
    client = await owner.client()
    producer = await client.create_producer(TOPIC)
    assert owner.owns(TOPIC)
    for number in range(MESSAGES):
        await producer.send(str(number).encode())
    consumer = await client.subscribe(TOPIC, "s", EARLIEST, permits=1000)
    coordinators = first.broker.transactions.coordinators
    await until(coordinators.led)
    return Stage(owner, coordinators, consumer)


@pytest.mark.parametrize("aborted", [(), (0,), (1, 3), (0, 2, 4)], ids=str)
async def test_each_message_is_processed_once_in_order(
    stage: Stage, aborted: tuple[int, ...]
) -> None:
    """Nothing is told while it goes on: what an abort gives back comes first all the same."""
    stage.owner.view.watching.clear()
    processed: list[str] = []
    for number in range(MESSAGES + len(aborted)):
        delivery = await stage.receive()
        txn = await stage.begin()
        await stage.acknowledge(txn, delivery)
        if number in aborted:
            await stage.end(txn, TxnState.ABORTED)
        else:
            await stage.end(txn, TxnState.COMMITTED)
            processed.append(delivery.payload.decode())
    assert processed == [str(number) for number in range(MESSAGES)]
    stage.owner.view.watching.set()
    subscription = stage.owner.broker.topics.loaded()[TOPIC].subscriptions["s"]
    await until(lambda: subscription.backlog == 0)
