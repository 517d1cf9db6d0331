"""Queue consumers of the official client."""

from tests.java.conftest import RunCase
from tests.java.expectations import assert_every_message_once

DELAY_MS = 5_000
PEER_TICK_MS = 1_000
"""delayedDeliveryTickTimeMillis: unless told to be strict, the peer is early by as much."""


def test_queue_consumer_gets_keyed_messages_of_four_segments(run_case: RunCase) -> None:
    facts = run_case("queue", messages=500, segments=4)
    assert_every_message_once(facts, at_least=500)
    assert facts["left_after_acks"] == 0
    assert len(facts["message_topics"]) == 4
    assert all(topic.startswith("segment://") for topic in facts["message_topics"])


def test_two_consumers_share_one_subscription(run_case: RunCase) -> None:
    facts = run_case("queue_shared", messages=400)
    assert_every_message_once(facts, at_least=400)
    assert min(facts["shares"]) > 0
    assert sum(facts["shares"]) == 400


def test_unacknowledged_messages_come_again(run_case: RunCase) -> None:
    facts = run_case("queue_unacked")
    assert facts["first_received"] == 100
    assert facts["acknowledged_by_first"] == 50
    assert facts["second_received"] == facts["second_total"] == 50


def test_latest_subscription_skips_earlier_messages(run_case: RunCase) -> None:
    assert run_case("queue_latest")["received"] == 50


def test_negative_acknowledgement_redelivers(run_case: RunCase) -> None:
    facts = run_case("negative_ack")
    assert facts["accepted"] == facts["messages"] == 60
    assert facts["accepted_twice"] == 0
    assert facts["marked_redelivered"] == 60
    assert facts["left_after_acks"] == 0


def test_a_delayed_message_is_overtaken_and_stream_consumers_get_it_at_once(
    run_case: RunCase, on_peer: bool
) -> None:
    facts = run_case("delayed", delayMs=DELAY_MS)
    assert facts["stream_order"] == ["at", "twice", "after", "a", "b", "c"]
    assert facts["stream_done_before_due"]
    order, after_due_ms = facts["queue_order"], facts["queue_after_due_ms"]
    assert order == ["a", "b", "c", "at", "after", "twice"]
    early_ms = PEER_TICK_MS if on_peer else 0  # docs/differences.md, delayed delivery
    assert after_due_ms[2] < 0
    assert min(after_due_ms[3:5]) >= -early_ms
    assert after_due_ms[5] >= DELAY_MS - early_ms
    assert (facts["redeliveries"], facts["left"]) == (0, 0)


def test_messages_refused_too_often_go_to_the_dead_letter_topic(run_case: RunCase) -> None:
    facts = run_case("dead_letter")
    assert facts["dead_received"] == 10
    assert facts["dead_duplicates"] == 0
    # First delivery and two redeliveries of each; the third refusal buries it.
    assert facts["deliveries"] == 30
    assert facts["properties"] == ["ORIGIN_MESSAGE_ID", "REAL_SUBSCRIPTION", "REAL_TOPIC"]
    assert facts["real_subscription"] == "refuse"


def test_missing_dead_letter_topic_is_created(run_case: RunCase, on_peer: bool) -> None:
    if on_peer:
        return  # M1 never makes a topic:// by itself: docs/differences.md, auto-creation
    facts = run_case("dead_letter", autoCreateDeadLetterTopic=True)
    assert facts["dead_received"] == 10
