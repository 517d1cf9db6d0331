"""Policies of creation, expiry, deletion and delays with the official v4 client and library."""

import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StockDriver


def test_policies_decide_what_is_created(
    broker: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_creation_policies")
    assert facts["shown"] == "partitioned 3"
    assert (facts["received"], facts["partitions"]) == (30, 3)
    for who in ("producer", "consumer", "reader"):
        assert facts[f"{who}_of_missing"] in ("TopicDoesNotExistException", "NotFoundException"), (
            who
        )
    assert facts["removed"] == "null"
    # The client's consumer of a partitioned topic hides the kind of the error.
    assert facts["missing_subscription"] == "PulsarClientException"
    assert facts["subscription_by_policy_of_topic"] == facts["known"] == "ok"
    assert facts["missing_again"] == "SubscriptionNotFoundException"


def test_policies_limit_and_switch_off_delays(
    broker: BrokerUnderTest, v4_driver_process: StockDriver, on_peer: bool
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_delay_policies")
    assert facts["applied"] == "true 50 60000"
    assert facts["too_late"] == "NotAllowedException"
    assert facts["first"] == "now"
    assert facts["waits"]
    # docs/differences.md, delayed delivery: what waits there already goes on waiting
    assert facts["when_inactive"] == ("none" if on_peer else "waits")
    assert facts["removed"] == "null"


def test_expiration_time_of_subscriptions_is_set_and_removed(
    broker: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_expiry_policies")
    assert (facts["unset"], facts["set"], facts["removed"]) == ("null", 10, "null")


@pytest.mark.parametrize(
    "restartable", [{"broker_delete_inactive_topics_frequency_s": 1}], indirect=True
)
def test_inactive_topics_are_deleted_and_others_stay(
    restartable: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, restartable, "v4_inactive_topics")
    assert facts["same"]
    assert not facts["caught-up"]
    assert facts["behind"]
    assert facts["used"]
    assert facts["excepted"]
    assert facts["made_again"]
    assert facts["removed"] == "null"


def test_deduplication_is_decided_by_namespace_and_topic(
    broker: BrokerUnderTest, v4_driver_process: StockDriver, on_peer: bool
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, broker, "v4_deduplication_policies")
    assert facts["status_before"] == facts["status_of_topic"] == "Disabled"
    assert facts["shown"]
    assert facts["applied"]
    assert facts["status"] == "Enabled"
    assert facts["values"] == ["m1", "m2", "m3", "again"]
    if on_peer:
        assert facts["snapshot_interval"] == "ok"
        return
    assert facts["snapshot_interval"].startswith("501 ")
    assert "deduplicationSnapshotInterval" in facts["snapshot_interval"]
