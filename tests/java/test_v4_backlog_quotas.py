"""Backlog quotas with the official v4 client and admin library."""

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StockDriver


def test_a_held_producer_keeps_its_messages_and_comes_back_by_itself(
    broker: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_quota_hold")
    assert not facts["connected_beyond"]
    assert facts["creation_beyond"] == "ProducerBlockedQuotaExceededError"
    assert facts["sent_beyond"] == 0
    assert facts["connected_again"]
    assert facts["received"] == list(range(25))


def test_a_refused_producer_fails_and_sends_again_once_the_backlog_is_gone(
    broker: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_quota_exception")
    assert not facts["connected_beyond"]
    assert facts["send_beyond"] == "ProducerBlockedQuotaExceededException"
    assert facts["creation_beyond"] == "ProducerBlockedQuotaExceededException"
    assert facts["received"] == 20
    assert facts["creation_below"] == "ok"
    assert facts["received_below"] == [21]
    assert facts["removed"] == 0


def test_slow_consumers_lose_old_messages_and_producers_stay(
    broker: BrokerUnderTest, v4_driver_process: StockDriver, on_peer: bool
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_quota_eviction")
    assert (facts["limit_size"], facts["limit_time"]) == (10_000, -1)
    # The peer's are of its last check of the age.
    assert on_peer or (facts["oldest_of"] == "s" and facts["oldest_age"] >= 0)
    assert facts["fast_backlog"] == 2
    assert facts["connected"]
    # 90 % of 10,000 bytes have room for eight messages of a little more than 1,000; the peer rounds
    # the number of those that it evicts down.
    assert facts["left"] == list(range(11 if on_peer else 12, 20))
    # By age the peer evicts whole ledgers, and this is in one.
    assert facts["young"] == (list(range(20, 26)) if on_peer else [25])


def test_policies_that_change_under_load_disconnect_nobody(
    broker: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_quota_change")
    assert facts["sent"] == facts["received"] == 120
    assert facts["producer_disconnected"] == facts["consumer_disconnected"] == 0


def test_quotas_are_set_shown_and_removed_at_each_level(
    broker: BrokerUnderTest, v4_driver_process: StockDriver, on_peer: bool
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_quota_policies")
    assert facts["unset"] == facts["topic_unset"] == facts["removed"] == {}
    of_namespace = {
        "destination_storage": "100 -1 producer_request_hold",
        "message_age": "-1 3600 producer_exception",
    }
    assert facts["namespace"] == facts["of_policies"] == facts["topic_applied"] == of_namespace
    assert facts["topic_global"] == {"destination_storage": "50 -1 producer_exception"}
    local = {"destination_storage": "60 -1 consumer_backlog_eviction"}
    assert facts["topic_local"] == local
    # The peer shows the first level that has any, and applies as the broker here does.
    assert facts["topic_local_applied"] == (local if on_peer else of_namespace | local)
    assert facts["retention"] == facts["quota"] == 412
