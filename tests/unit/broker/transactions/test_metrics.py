"""Metrics of transactions, by the names that dashboards query."""

import contextlib
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until_awaited
from tests.unit.broker.transactions.conftest import TransactionClient
from txn.records import Claim

TOPIC = "persistent://public/default/t"
DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "transactions.md"


def documented() -> set[str]:
    """The first column of the table of metrics, `{a,b}` spelled out and labels left out."""
    _, _, section = DOCUMENT.read_text("utf-8").partition("## Metrics")
    table, _, _ = section.partition("\n## ")
    names = set[str]()
    for row in table.splitlines():
        for told in re.findall(r"`([^`]+)`", row.partition("|")[2].partition(" | ")[0]):
            name = re.sub(r"\{[^,}]*\}$", "", told)
            stem, several, rest = re.split(r"\{(.*)\}", name) if "{" in name else (name, "", "")
            names |= {f"{stem}{each}{rest}" for each in several.split(",")}
    return names


async def exported(broker: Broker) -> set[str]:
    """Names of all samples about transactions; of a histogram, without what its samples add."""
    text = await metrics_text(broker)
    return {
        family.name if family.type == "histogram" else sample.name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("pulsar_txn", "magnetar_txn"))
    }


async def samples(broker: Broker) -> dict[tuple[str, str], float]:
    """Value by metric name and its one label of interest."""
    text = await metrics_text(broker)
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(("pulsar_txn", "magnetar_txn")):
                labels = {k: v for k, v in sample.labels.items() if k != "cluster"}
                found[sample.name, ",".join(labels.values())] = sample.value
    return found


async def shows(broker: Broker, sample: tuple[str, str], value: float) -> bool:
    """Whether a sample is there with this value."""
    return (await samples(broker)).get(sample) == value


async def test_metrics_of_topics_and_subscriptions(
    broker: Broker, txn_client: TransactionClient
) -> None:
    options = pb.CommandSubscribe(
        sub_type=pb.CommandSubscribe.Exclusive, initial_position=pb.CommandSubscribe.Earliest
    )
    consumer = await txn_client.raw.subscribe(TOPIC, "s", options, permits=10)
    await txn_client.raw.subscribe(TOPIC, "without", options, permits=10)
    producer = await txn_client.raw.create_producer(TOPIC)
    await producer.send(b"x")
    await producer.send(b"y")
    committed, aborted, _ = txns = [await txn_client.begin() for _ in range(3)]
    for most, least in txns:
        await txn_client.add_partitions((most, least), TOPIC)
    for most, least in (committed, aborted):
        ack = pb.CommandAck(
            consumer_id=consumer.consumer_id,
            ack_type=pb.CommandAck.Individual,
            message_id=[(await consumer.receive()).message_id],
            txnid_most_bits=most,
            txnid_least_bits=least,
        )
        await txn_client.raw.request(pb.BaseCommand.ACK, ack)
    await txn_client.end(committed)
    await txn_client.end(aborted, pb.ABORT)
    on_topic = f"public/default,{TOPIC}"
    acks = "pulsar_txn_tp_{}_count_total"
    of_acks = f"public/default,succeed,s,{TOPIC}"
    await until_awaited(lambda: shows(broker, (acks.format("aborted"), of_acks), 1))
    await until_awaited(lambda: shows(broker, ("pulsar_txn_tb_aborted_total", on_topic), 1))
    found = await samples(broker)
    assert found["pulsar_txn_tb_active_total", on_topic] == 1
    assert found["pulsar_txn_tb_committed_total", on_topic] == 1
    assert found[acks.format("committed"), of_acks] == 1
    assert not any("without" in labels for _, labels in found), "it had no transaction"
    buckets = {name for name in await exported(broker) if "latency_le_" in name}
    assert await exported(broker) - buckets | {"pulsar_txn_execution_latency_le_*"} == documented()


async def test_outstanding_records_are_those_stored_after_a_restart(tmp_path: Path) -> None:
    """Claims and acknowledgements of before are counted, so their deletion leads to 0."""
    name = "pulsar_txn_metadata_store_outstanding_op_records"
    async with running(tmp_path) as broker:
        client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
        txn = await client.begin()
        for each in (TOPIC, TOPIC + "2"):
            await client.raw.create_producer(each)
        await client.add_partitions(txn, TOPIC)
        await client.add_partitions(txn, TOPIC + "2")
        assert (await samples(broker))[name, ""] == 2
        await client.raw.close()
    async with running(tmp_path) as broker:
        assert (await samples(broker))[name, ""] == 2
        client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
        for each in (TOPIC, TOPIC + "2"):
            await client.raw.create_producer(each)
        await client.end(txn)
        await until_awaited(lambda: shows(broker, (name, ""), 0))
        await client.raw.close()


async def test_metrics_of_transactions(broker: Broker, txn_client: TransactionClient) -> None:
    first, second = await txn_client.begin(1), await txn_client.begin(1)
    await txn_client.begin(2)
    await txn_client.end(first)
    await txn_client.end(second, pb.ABORT)
    with contextlib.suppress(BrokerError):
        await txn_client.end(second, pb.COMMIT)
    await broker.transactions.store.put_claim(Claim(TxnId(2, 0), "x", 1, Position(0, 0)))
    found = await samples(broker)
    store = "pulsar_txn_metadata_store"
    assert found[f"{store}_op_writes_total", ""] == 1
    assert found[f"{store}_outstanding_op_records", ""] == 1
    assert found[f"{store}_header_cas_total", "ok"] == 2
    assert found[f"{store}_header_cas_total", "conflict"] == 0
    assert found[f"{store}_header_cas_total", "reject"] == 1
    assert found[f"{store}_index_query_seconds_count", ""] >= 1
    assert found["pulsar_txn_created_total", "1"] == 2
    assert found["pulsar_txn_committed_total", "1"] == 1
    assert found["pulsar_txn_aborted_total", "1"] == 1
    assert found["pulsar_txn_timeout_total", "1"] == 0
    assert found["pulsar_txn_append_log_total", "1"] == 4
    assert (found["pulsar_txn_active_count", "1"], found["pulsar_txn_active_count", "2"]) == (0, 1)
    latencies = [
        value
        for (name, coordinator), value in found.items()
        if name.startswith("pulsar_txn_execution_latency_le_") and coordinator == "1"
    ]
    assert len(latencies) == 14
    assert sum(latencies) == 1
