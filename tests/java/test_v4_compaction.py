"""The official v4 client and admin library on compacted topics."""

import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StockDriver

KEPT = 16
"""Keys of which the newest value is not null, of 20."""
ROUND = 61
"""Messages of a round: three of each key, and one without a key."""


@pytest.mark.parametrize("compression", ["NONE", "LZ4"])
@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
def test_readers_and_consumers_of_a_compacted_topic(
    broker: BrokerUnderTest, v4_driver_process: StockDriver, *, batching: bool, compression: str
) -> None:
    facts = run_on_fresh_topic(
        v4_driver_process, broker, "v4_compaction", batching=batching, compression=compression
    )
    assert facts["not_run"] == "NOT_RUN"
    assert facts["status"] == facts["status_again"] == "SUCCESS"
    assert facts["same_before"]
    assert facts["same"]
    assert facts["same_between"]
    assert facts["same_again"]
    assert facts["count"] == facts["count_again"] == KEPT
    assert facts["count_between"] == KEPT + ROUND
    assert facts["count_from_middle"] == KEPT // 2
    assert facts["same_Exclusive"]
    assert facts["same_Failover"]
    assert facts["plain_is_whole"]
    assert "reader_waited" not in facts


@pytest.mark.parametrize("partitions", [0, 2], ids=["unpartitioned", "partitioned"])
def test_table_views_of_a_compacted_topic(
    broker: BrokerUnderTest, v4_driver_process: StockDriver, partitions: int
) -> None:
    facts = run_on_fresh_topic(
        v4_driver_process, broker, "v4_compacted_table", batching=True, partitions=partitions
    )
    assert facts["status"] == "SUCCESS"
    for table in ("early", "late", "early_again", "late_again"):
        assert facts[table], table


def test_threshold_of_a_namespace(broker: BrokerUnderTest, v4_driver_process: StockDriver) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_compaction_threshold")
    assert facts["thresholds"] == f"[null, {1 << 40}, null]"
