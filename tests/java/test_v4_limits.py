"""Maxima of clients, message TTL and retention with the official v4 client and library."""

import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.conftest import RunCase
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StockDriver


def test_clients_above_a_maximum_are_refused_and_attached_ones_stay(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_limits")
    assert facts["third_producer"] == facts["at_the_maximum"] == "ProducerBusyException"
    assert facts["third_by_topic"]
    assert facts["refused_by_topic"]
    assert facts["attached_stays"] == facts["small"] == "ok"
    assert facts["too_large"]
    assert facts["third_of_subscription"] == facts["fourth_of_topic"] == "ConsumerBusyException"
    assert facts["third_subscription"] == "NotAllowedException"
    assert facts["other_type"]
    assert facts["enabled_type"]


@pytest.mark.parametrize("restartable", [{"message_expiry_check_interval_s": 1}], indirect=True)
def test_messages_older_than_their_time_to_live_count_as_acknowledged(
    restartable: BrokerUnderTest, v4_driver_process: StockDriver
) -> None:
    facts = run_on_fresh_topic(v4_driver_process, restartable, "v4_message_ttl")
    assert (facts["unset"], facts["set"], facts["removed"]) == ("null", 600, "null")
    assert facts["expired"]
    assert facts["kept_by_topic"] == 4
    assert facts["first"] == "young"


def test_old_messages_expire_on_request(run_v4_case: RunCase, on_peer: bool) -> None:
    facts = run_v4_case("v4_expired_messages")
    assert facts["left_by_id"] == 2
    # docs/differences.md, expiry up to a message
    assert facts["left_excluded"] == (1 if on_peer else 3)
    assert facts["of_one"]
    assert facts["of_the_other"] == 4
    assert facts["of_all"]


def test_acknowledged_messages_are_kept_as_long_as_retention_says(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_retention")
    assert facts["shown"] == "60 100"
    assert facts["of_topic"]
    assert facts["dropped"]
    assert facts["kept"] == "m0"
