"""Metrics of transactions, by the names that dashboards query."""

import contextlib

from prometheus_client.parser import text_string_to_metric_families

from broker.metrics import make_registry, metrics_text
from broker.service import Broker
from protocol import pulsar_pb2 as pb
from protocol.ids import Position
from tests.support.raw_client import BrokerError
from tests.unit.broker.transactions.conftest import TransactionClient
from txn.records import Claim
from txn.txn_id import TxnId


def samples(broker: Broker) -> dict[tuple[str, str], float]:
    """Value by metric name and its one label of interest."""
    text = metrics_text(make_registry(broker)).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("pulsar_txn"):
                labels = {k: v for k, v in sample.labels.items() if k != "cluster"}
                found[sample.name, ",".join(labels.values())] = sample.value
    return found


async def test_metrics_of_transactions(broker: Broker, txn_client: TransactionClient) -> None:
    first, second = await txn_client.begin(1), await txn_client.begin(1)
    await txn_client.begin(2)
    await txn_client.end(first)
    await txn_client.end(second, pb.ABORT)
    with contextlib.suppress(BrokerError):
        await txn_client.end(second, pb.COMMIT)
    await broker.transactions.store.put_claim(Claim(TxnId(2, 0), "x", 1, Position(0, 0)))
    found = samples(broker)
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
