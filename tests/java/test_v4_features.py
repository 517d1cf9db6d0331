"""Features that applications of the official v4 client use, on `persistent://` topics."""

import pytest

from tests.java.conftest import RunCase


def test_message_is_retried_and_becomes_a_dead_letter(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_retry_letters")
    assert facts["deliveries"] == ["0", "1", "2"]
    assert facts["own"] == "p"
    assert facts["real_topic"]
    assert facts["real_subscription"] == "s"
    assert facts["same_origin"]
    assert facts["subscription_made"]
    assert facts["letter"] == "m k"
    assert facts["nothing_more"]
    assert facts["backlog"] == 0


def test_message_in_chunks_is_received_acknowledged_and_read_again(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_chunks")
    assert facts["sizes"] == [5, 123_456, 4]
    assert facts["same"]
    assert facts["acknowledged"]
    assert facts["after_seek"] == 123_456
    assert facts["read"]


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
def test_encrypted_messages_pass_through(run_v4_case: RunCase, *, batching: bool) -> None:
    facts = run_v4_case("v4_encryption", batching=batching)
    assert facts["same"]
    assert facts["hidden"]
    assert facts["key"]


def test_sticky_consumers_get_their_hash_ranges(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_sticky_ranges")
    assert facts["overlap"] == "ConsumerAssignException"
    assert facts["other_mode"] == "ConsumerBusyException"
    assert facts["count"] == 100
    for fact in ("disjoint", "both", "ordered", "upper_again", "lower_again"):
        assert facts[fact], fact


def test_keys_are_split_among_consumers_in_order(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_auto_split")
    assert facts["count"] == facts["count_after_leaving"] == 100
    for fact in ("ordered", "each_key_once", "ordered_after_leaving"):
        assert facts[fact], fact


def test_pattern_follows_topics_that_come_and_go(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_pattern")
    assert facts["same"]
    assert facts["nothing_more"]
    assert facts["again"] == "again"


@pytest.mark.parametrize("partitions", [0, 3], ids=["unpartitioned", "partitioned"])
def test_readers_begin_where_they_are_told(run_v4_case: RunCase, partitions: int) -> None:
    facts = run_v4_case("v4_reader", partitions=partitions)
    for fact in ("earliest", "latest", "by_time"):
        assert facts[fact], fact
    if not partitions:
        assert facts["after_id"]
        assert facts["at_id"]


@pytest.mark.parametrize("partitions", [0, 3], ids=["unpartitioned", "partitioned"])
def test_table_view_follows_its_topic(run_v4_case: RunCase, partitions: int) -> None:
    facts = run_v4_case("v4_table_view", partitions=partitions)
    assert facts["same"]
    assert facts["followed"]


def test_attached_clients_use_new_partitions(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_partitions_grow")
    assert facts["partitions"] == 3
    assert facts["used"] == [0, 1, 2]
    assert facts["same"]
    assert facts["subscriptions"] == ["s"]
