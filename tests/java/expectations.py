"""What every set of readers must have seen, whatever the broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.java.stock_driver import CaseFailed
from tests.support.json_line_process import Facts


def assert_every_message_once(
    facts: Facts, prefix: str = "", *, at_least: int = 1, repeated: int = 0
) -> None:
    """Everything acknowledged was received, nothing but `repeated` twice, nothing never sent."""
    assert facts["sent"] >= at_least
    assert facts["send_failures"] == 0, facts["send_failure_examples"]
    assert facts["acknowledged"] == facts["sent"] - facts["lost_by_client"]
    assert facts[f"{prefix}missing"] == 0, facts[f"{prefix}missing_examples"]
    assert facts[f"{prefix}duplicates"] == repeated, facts[f"{prefix}duplicate_examples"]
    assert facts[f"{prefix}unexpected"] == 0
    assert facts[f"{prefix}received"] == facts["acknowledged"]


def assert_key_order(facts: Facts, prefix: str = "", *, hand_overs: int = 0) -> None:
    """Within each key, first deliveries came in the order of sending.

    For each segment that changed hands the client may have handed out one message too early:
    docs/differences.md, closing.
    """
    assert facts[f"{prefix}order_breaks"] == 0, facts[f"{prefix}order_break_examples"]
    assert facts[f"{prefix}handed_out_while_closing"] <= hand_overs


def assert_every_transaction_whole(facts: Facts) -> None:
    """Stored: all of each committed one, nothing of an aborted one, one output for each input."""
    assert facts["torn"] == []
    assert facts["committed_but_missing"] == []
    assert facts["aborted_but_stored"] == []
    assert facts["inputs_missing"] == 0
    assert facts["inputs_stored_twice"] == 0
    assert facts["inputs_twice"] == 0
    assert facts["stored_twice"] == []


@contextmanager
def peer_may_fail_a_commit(on_peer: bool) -> Iterator[None]:
    """Allow that the peer fails a transaction's sends while the layout changes.

    It does so in some runs: docs/differences.md, seal.
    """
    try:
        yield
    except CaseFailed as failure:
        if on_peer and "TransactionHasOperationFailed" in str(failure):
            pytest.xfail("the peer refused a send of the transaction while the layout changed")
        raise
