"""Operations on whole topics and their subscriptions with the official v4 admin library."""

from tests.java.conftest import RunCase

MANY = 10_050
"""Messages: more than one request of analyze-backlog counts."""
AT_ONCE = 10_000


def test_a_backlog_is_reset_counted_and_truncated(run_v4_case: RunCase, on_peer: bool) -> None:
    facts = run_v4_case("v4_backlog_operations")
    assert facts["after_reset_behind_the_second"] == "m2"
    assert facts["peeked"] == 200
    assert facts["once"] == [AT_ONCE, AT_ONCE, AT_ONCE, 0, 0, True]
    assert facts["from_an_id"] == [3, 3, 3, 0, 0, False]
    assert facts["stored"]
    backlog, stored_bytes = facts["truncated"]
    assert backlog == 0
    # The open ledger stays there: docs/differences.md, truncate
    assert on_peer or stored_bytes == 0
    # The peer's are of its last update: docs/differences.md, broker-stats topics
    assert on_peer or facts["in_statistics_of_the_broker"]
    assert facts["partitions_truncated"] == 0


def test_the_library_counts_a_long_backlog_by_itself(run_case: RunCase, on_peer: bool) -> None:
    facts = run_case("counted_backlog")
    assert facts["once"] == [AT_ONCE, AT_ONCE, AT_ONCE, 0, 0, True]
    assert facts["until_a_number"] == [MANY, MANY, MANY, 0, 0, False]
    left = MANY - 1
    assert facts["until_the_end"] == [left, left, left, 0, 0, False]
    refusal = "is not allowed" if on_peer else "Messages have no index of the whole topic here"
    assert refusal in facts["by_index"]


def test_properties_of_a_subscription_are_given_replaced_and_shown(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_subscription_properties")
    assert facts["given"] == {"team": "a"}
    assert facts["replaced"] == facts["in_statistics"] == {"owner": "b", "since": "2026"}
    assert facts["of_a_consumer"] == {"from": "a consumer"}


def test_topics_are_listed_and_described_in_each_way(run_v4_case: RunCase, on_peer: bool) -> None:
    facts = run_v4_case("v4_listed_topics")
    persistent = ["persistent", "persistent-parts-partition-0"]
    assert facts["persistent"] == persistent
    # The peer's bundles are not this broker's one, which the case names.
    assert on_peer or facts["with_options"] == facts["with_a_query"] == persistent
    assert facts["non_persistent"] == ["non-persistent"]
    assert facts["partitioned"] == ["persistent-parts"]
    assert facts["messages"] == [1, 1, 1]
    assert facts["messages_since_unload"] == 0


def test_partitions_are_added_counted_and_deleted_in_each_way(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_overloads_of_partitions")
    assert facts["partitions"] == [2, 3]
    assert facts["messages"] == 6
    assert facts["refused"] == 412
    assert facts["left"] == facts["left_again"] == facts["partitions_left"] == []


def test_policies_of_a_topic_limit_its_subscriptions(run_v4_case: RunCase, on_peer: bool) -> None:
    facts = run_v4_case("v4_policies_of_subscriptions")
    assert facts["unacknowledged"] == {"global false": 2, "global true": 2, "topics()": 3}
    assert facts["subscribed"] == {
        "global false": False,
        "removed false": True,
        "global true": on_peer,  # docs/differences.md, global policies
        "removed true": True,
    }
    # The peer changes it in the background.
    assert on_peer or facts["deduplication"] == ["Enabled", "Disabled"]
