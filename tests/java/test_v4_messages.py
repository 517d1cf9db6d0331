"""Single messages of a topic with the official v4 client's admin library."""

import uuid

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.stock_driver import StockDriver


def test_single_messages_are_peeked_at_examined_and_skipped(
    broker: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    topic = f"v4-single-messages-{uuid.uuid4().hex[:8]}"
    started = v4_driver_process.start(
        "v4_single_messages", broker.url, broker.admin_url, topic=topic, web=broker.admin_url
    )
    facts = started.result()
    batched = ["batched 0", "batched 1", "batched 2"]
    assert facts["peeked"] == ["alone", *batched]
    assert (facts["alone"], facts["key"], facts["property"]) == ("alone", "k", "b")
    assert facts["producer"] == "alone"
    assert facts["event_time"]
    assert facts["published"]
    assert (facts["first"], facts["last"]) == ("alone", "batched 0")
    assert facts["id_since_its_time"]
    assert facts["bytes_from_it_on"]
    assert facts["after_skip"] == batched
    assert facts["terminated"] == 2
