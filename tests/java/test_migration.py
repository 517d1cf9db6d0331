"""An ordinary topic is made scalable while the official clients are attached to it."""

import uuid

import pytest

from tests.conftest import Report
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.conftest import RunCase
from tests.java.expectations import assert_every_message_once, assert_key_order
from tests.java.stock_driver import StockDriver

READERS = ("stream", "queue", "checkpoint")


@pytest.mark.parametrize("partitions", [0, 3], ids=["unpartitioned", "partitioned"])
@pytest.mark.parametrize("mode", ["AWAITED", "ASYNC_UNBATCHED", "ASYNC_BATCHED"])
def test_clients_of_an_ordinary_topic_go_on_when_it_becomes_scalable(
    run_case: RunCase, report: Report, on_peer: bool, partitions: int, mode: str
) -> None:
    # docs/differences.md, migration: the peer takes the checkpoint consumer for a v4 client, so it
    # has to be forced, and gives a stream consumer segments that do not exist.
    of_peer = {"force": True, "withoutStream": True} if on_peer else {}
    facts = run_case(
        "migrate_under_load", mode=mode, partitions=partitions, messagesBetween=150, **of_peer
    )
    readers = READERS[1:] if on_peer else READERS
    report(
        f"migration of {partitions or 1} topic(s), {mode}: {facts['sent']} messages, "
        f"{facts[f'{readers[0]}_order_breaks']} order breaks"
    )
    assert facts["active_segments"] == max(partitions, 1) + 1
    for reader in readers:
        assert facts[f"{reader}_complete"], facts
        if on_peer and mode != "AWAITED":
            # What was in flight may be stored twice: docs/differences.md, seal
            assert facts[f"{reader}_missing"] == 0, facts
        else:
            assert_every_message_once(facts, f"{reader}_")
    if mode == "AWAITED":
        assert_key_order(facts, "checkpoint_" if on_peer else "stream_")


def test_v4_clients_prevent_a_migration_unless_it_is_forced(
    broker: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    topic = f"v4-migration-{uuid.uuid4().hex[:8]}"
    started = v4_driver_process.start("v4_migration", broker.url, broker.admin_url, topic=topic)
    facts = started.result()
    assert facts["status_with_consumer"] == 409
    assert facts["status_with_producer"] == 409
    assert facts["status_forced"] == 204
    assert facts["refusal"] == "TopicTerminatedException"
    assert facts["new_producer"] == "TopicTerminatedException"
    assert facts["old_message"] == "before"
    assert facts["status_again"] == 409
