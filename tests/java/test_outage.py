"""The broker is stopped or killed under load; the official client reconnects by itself.

`stored` is what a subscription that never acknowledged finds in the end. A message whose receipt
was lost with the broker is sent again by the client; without deduplication it may then be stored
twice, with it never. Subscriptions that acknowledge may see again what they acknowledged just
before a crash.
"""

import time

import pytest

from tests.conftest import Report
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.conftest import StartCase
from tests.java.expectations import assert_key_order
from tests.support.json_line_process import Facts

OUTAGE_TIMEOUT_S = 200
ENDS = {"stop": ("stop", False), "kill": ("kill", False), "kill_deduplicated": ("kill", True)}
MODES = ("AWAITED", "ASYNC_UNBATCHED", "ASYNC_BATCHED")
NOT_LONG = {
    ("stop", "ASYNC_BATCHED"),
    ("kill", "AWAITED"),
    ("kill_deduplicated", "ASYNC_UNBATCHED"),
}
"""Each end once, and each way to send once."""
OUTAGES = [
    pytest.param(
        *end,
        mode,
        id=f"{name}-{mode}",
        marks=() if (name, mode) in NOT_LONG else pytest.mark.long,
    )
    for name, end in ENDS.items()
    for mode in MODES
]
CURSOR_SETTLE_S = 2.0
"""Acknowledgements leave the client unanswered, and are durable at most 100 ms after arriving."""


def assert_nothing_lost(facts: Facts, prefix: str) -> None:
    assert facts[f"{prefix}missing"] == 0, facts[f"{prefix}missing_examples"]
    assert facts[f"{prefix}unexpected"] == 0


@pytest.mark.timeout(OUTAGE_TIMEOUT_S + 30, func_only=True)
@pytest.mark.parametrize(("end", "deduplicate", "mode"), OUTAGES)
def test_delivery_resumes_after_an_outage(
    restartable: BrokerUnderTest,
    start_case: StartCase,
    report: Report,
    on_peer: bool,
    end: str,
    mode: str,
    deduplicate: bool,
) -> None:
    rounds = 1 if on_peer else 2
    case = start_case(
        "outage", mode=mode, rounds=rounds, deduplicate=deduplicate, timeoutS=OUTAGE_TIMEOUT_S
    )
    case.wait_event("loaded")
    for number in range(1, rounds + 1):
        if end == "stop":
            restartable.stop()
        else:
            restartable.kill()
        restartable.start()
        case.signal(f"back-{number}")
        case.wait_event("loaded")
    facts = case.result()
    assert facts["stream_complete"], facts
    assert facts["queue_complete"], facts
    assert facts["send_failures"] == 0, facts["send_failure_examples"]
    assert facts["acknowledged"] == facts["sent"] - facts["lost_by_client"]
    for prefix in ("stored_", "stream_", "queue_"):
        assert_nothing_lost(facts, prefix)
    report(
        f"{end} {mode} deduplicate={deduplicate}: {facts['sent']} messages, "
        f"stored twice {facts['stored_duplicates']}, "
        f"delivered again to the stream {facts['stream_duplicates']}"
    )
    assert_key_order(facts, "stored_")
    assert_key_order(facts, "stream_")
    if deduplicate or not on_peer:
        # The peer stores what was sent again a second time unless told otherwise:
        # docs/differences.md, stop
        assert facts["stored_duplicates"] == 0, facts["stored_duplicate_examples"]


@pytest.mark.timeout(OUTAGE_TIMEOUT_S + 30, func_only=True)
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_acknowledged_messages_stay_acknowledged_after_an_outage(
    restartable: BrokerUnderTest, start_case: StartCase, report: Report, on_peer: bool, end: str
) -> None:
    case = start_case("outage_quiet", timeoutS=OUTAGE_TIMEOUT_S)
    case.wait_event("quiet")
    time.sleep(CURSOR_SETTLE_S)
    if end == "stop":
        restartable.stop()
    else:
        restartable.kill()
    restartable.start()
    case.signal("back")
    facts = case.result()
    for prefix in ("stream_", "queue_"):
        assert facts[f"{prefix}missing"] == 0
        report(f"{end} when quiet: {facts[f'{prefix}duplicates']} delivered again ({prefix[:-1]})")
        if not on_peer:
            # The peer writes cursors once a second, and counts on the next change to do it.
            assert facts[f"{prefix}duplicates"] == 0, facts[f"{prefix}duplicate_examples"]
    assert_key_order(facts, "stream_")
