"""Splits and merges under the official client's load: every message once, each key in order.

Order is asked of the stream subscription. Two breaks of it happen inside the client. With batching
on, it closes the old segment's producer when it gets the layout, and sends a batch that is open
then to the new segment later, after newer messages. The broker waits for a pause in the client's
SENDs, and holds receipts back until then, which leaves no batch open while a program bounds its
messages in flight; a program that goes on sending at a rate may have one open: both are reported.
With batching off and sends in flight, the one send that is between picking its producer and using
it when that producer closes is tried again 100 ms later: at most one for each producer that closes,
and it closes one for each segment that is sealed.
"""

import pytest

from tests.conftest import Report
from tests.java.conftest import RunCase
from tests.java.expectations import assert_every_message_once, assert_key_order

MODES = ("AWAITED", "ASYNC_UNBATCHED", "ASYNC_BATCHED")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("case", "changes", "sealed", "active"),
    [("split_under_load", 2, 2, 4), ("merge_under_load", 2, 4, 2)],
    ids=["split", "merge"],
)
def test_splits_and_merges_under_load_lose_nothing(
    run_case: RunCase,
    on_peer: bool,
    report: Report,
    case: str,
    changes: int,
    sealed: int,
    active: int,
    mode: str,
) -> None:
    facts = run_case(case, mode=mode, changes=changes)
    report(
        f"{case} {mode}: {facts['sent']} messages, {facts['stream_order_breaks']} order breaks, "
        f"{facts['stream_duplicates']} stored twice, "
        f"{facts['stream_missing']} not delivered in time, "
        f"{facts['lost_by_client']} refused by the client itself"
    )
    assert facts["active_segments"] == active
    assert facts["queue_complete"], facts
    if on_peer and mode != "AWAITED":
        # The peer seals before it publishes the layout, and its client sends again what had failed,
        # after newer messages and sometimes twice; some runs leave the stream consumer stuck:
        # docs/differences.md, seal
        return
    # Each change raises the epoch; so does pruning what they sealed, if it is due by then.
    assert facts["epoch"] >= changes
    assert facts["stream_complete"], facts
    assert_every_message_once(facts, "stream_")
    assert_every_message_once(facts, "queue_")
    if mode == "AWAITED":
        assert_key_order(facts, "stream_")
    elif mode == "ASYNC_UNBATCHED":
        assert facts["stream_order_breaks"] <= sealed, facts["stream_order_break_examples"]


def test_splits_under_a_steady_rate_lose_nothing(
    run_case: RunCase, on_peer: bool, report: Report
) -> None:
    facts = run_case("split_under_load", mode="ASYNC_BATCHED", changes=2, perSecond=500, keys=50)
    report(
        f"split at 500 messages a second: {facts['sent']} messages, "
        f"{facts['stream_order_breaks']} order breaks"
    )
    if on_peer:
        return  # docs/differences.md, seal
    assert facts["stream_complete"], facts
    assert_every_message_once(facts, "stream_")


@pytest.mark.parametrize("mode", ["AWAITED", "ASYNC_BATCHED"])
def test_subscriptions_without_consumers_lose_nothing_over_a_split(
    run_case: RunCase, mode: str
) -> None:
    facts = run_case("split_before_subscribe", mode=mode)
    assert_every_message_once(facts, "stream_", at_least=200)
    assert_every_message_once(facts, "queue_", at_least=200)
    if mode == "AWAITED":
        # The client learns the new layout late. A batch that the sealed segment refused is sent
        # again after newer messages: its order is not judged.
        assert_key_order(facts, "stream_")
