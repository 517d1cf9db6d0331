"""Policies of rates with the official clients.

Times are lower bounds: a rate says how long that many messages take at least.
"""

import pytest

from tests.java.conftest import RunCase
from tests.java.expectations import assert_every_message_once

PER_SECOND = 50
MESSAGES = 150
LEAST_MS = (MESSAGES - PER_SECOND) * 1000 // PER_SECOND - 10
"""The tokens of the first second are there at once.  10 ms are left for the clocks."""
KINDS = ["Exclusive", "Shared", "Failover", "Key_Shared"]


@pytest.mark.parametrize("in_bytes", [False, True], ids=["messages", "bytes"])
def test_receipts_come_at_the_publish_rate(run_v4_case: RunCase, *, in_bytes: bool) -> None:
    facts = run_v4_case("v4_publish_rate", messages=MESSAGES, bytes=in_bytes, size=1000)
    assert facts["took_ms"] >= LEAST_MS
    assert facts["other"]


@pytest.mark.parametrize("policy", ["topic", "subscriptions", "one"])
@pytest.mark.parametrize("in_bytes", [False, True], ids=["messages", "bytes"])
def test_messages_come_at_the_dispatch_rate(
    run_v4_case: RunCase, policy: str, *, in_bytes: bool
) -> None:
    facts = run_v4_case(
        "v4_dispatch_rate", messages=MESSAGES, policy=policy, bytes=in_bytes, size=1000
    )
    assert facts["received"] == MESSAGES
    assert facts["took_ms"] >= LEAST_MS


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_that_waits_gets_all_when_the_rate_is_removed(
    run_v4_case: RunCase, kind: str
) -> None:
    facts = run_v4_case("v4_dispatch_rate_removed", type=kind)
    assert (facts["first"], facts["others"]) == (1, 99)


def test_a_consumer_that_subscribes_too_often_is_refused(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_subscribe_rate")
    assert facts["first"] == facts["other_name"] == facts["without_rate"] == "ok"
    assert facts["again"] == "NotAllowedException"


def test_the_admin_library_sets_shows_and_removes_rates(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_rate_policies")
    for level in ("topic", "global", "namespace"):
        assert facts[level], level
        assert facts[f"{level}_removed"], level
        assert facts[f"{level}_replicator"] == "ok"


def test_rates_hold_for_the_segment_of_a_scalable_topic(run_case: RunCase, on_peer: bool) -> None:
    if on_peer:
        pytest.skip("5.0.0-M1 has no policies of a scalable topic: 404")
    facts = run_case("rates", messages=MESSAGES, mode="ASYNC_UNBATCHED")
    assert_every_message_once(facts, at_least=MESSAGES)
    assert facts["published_ms"] >= LEAST_MS
    assert facts["delivered_ms"] >= LEAST_MS
