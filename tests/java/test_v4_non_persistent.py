"""The official v4 client and admin library on non-persistent topics."""

import uuid

import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.stock_driver import StockDriver


@pytest.mark.parametrize("partitions", [0, 2], ids=["unpartitioned", "partitioned"])
@pytest.mark.parametrize("kind", ["Exclusive", "Shared", "Failover", "Key_Shared"])
def test_v4_consumer_of_a_non_persistent_topic_gets_what_comes_while_it_is_connected(
    broker: BrokerUnderTest, v4_driver_process: StockDriver, kind: str, partitions: int
) -> None:
    facts = v4_driver_process.start(
        "v4_non_persistent",
        broker.url,
        broker.admin_url,
        topic=f"v4-non-persistent-{uuid.uuid4().hex[:8]}",
        web=broker.admin_url,
        type=kind,
        partitions=partitions,
        batching=partitions > 0,
    ).result()
    assert facts["seen"] == 20
    assert not facts["saw_earlier"]
    assert not facts["more"]
    assert facts["listed"]
    assert facts["has_statistics"]
    assert facts["refusals"] == ["405"]
    assert facts["pattern"] == "pattern"
