"""A retention policy that is lowered frees what a topic with clients has kept."""

from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import asking_broker

TOPIC = "persistent://public/default/t"
NAMESPACE = "/admin/v2/namespaces/public/default"
OF_TOPIC = "/admin/v2/persistent/public/default/t"


@pytest.mark.parametrize("where", [NAMESPACE, OF_TOPIC])
@pytest.mark.parametrize("minutes", [-1, 10_000])
async def test_acknowledged_data_goes_when_retention_is_lowered(
    tmp_path: Path, where: str, minutes: int
) -> None:
    bounds = {"ledger_max_entries": 2, "ledger_min_age_s": 0}
    async with running(tmp_path, **bounds) as broker, asking_broker(broker) as rest:
        keep = {"retentionTimeInMinutes": minutes, "retentionSizeInMB": -1}
        await rest.done("POST", f"{NAMESPACE}/retention", keep)
        client = await RawClient.open("127.0.0.1", broker.port)
        earliest = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
        consumer = await client.subscribe(TOPIC, "s", earliest, permits=10)
        producer = await client.create_producer(TOPIC)
        for _ in range(5):
            await producer.send(b"x")
            await consumer.ack_answered((await consumer.receive()).message_id)
        (topic,) = broker.topics.loaded().values()
        # The sequence ids of producers are read from entries after their last snapshot.
        await topic.sequence_store.save()
        assert topic.ledger.entry_count == 5
        lower = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
        await rest.done("POST", f"{where}/retention", lower)
        await until(lambda: topic.ledger.entry_count == 1)
        await client.close()
