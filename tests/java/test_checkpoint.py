"""Checkpoint consumers of the official client."""

import pytest

from tests.java.conftest import RunCase
from tests.java.expectations import assert_every_message_once


def test_checkpoint_is_restored_after_a_split(run_case: RunCase) -> None:
    facts = run_case("checkpoint")
    assert facts["active_segments"] == 4
    assert facts["checkpoint_bytes"] > 0
    assert_every_message_once(facts, at_least=400)
    assert facts["extra"] == 0


def test_latest_checkpoint_starts_with_later_messages(run_case: RunCase) -> None:
    assert run_case("checkpoint_latest")["received"] == 50


@pytest.mark.parametrize("split", [False, True], ids=["still", "split"])
def test_checkpoint_group_shares_the_segments(run_case: RunCase, split: bool) -> None:
    facts = run_case("checkpoint_group", split=split)
    assert facts["missing"] == 0
    assert facts["send_failures"] == 0, facts["send_failure_examples"]
    assert facts["received"] == facts["acknowledged"] == 400 - facts["lost_by_client"]
    assert min(facts["reads"].values()) > 0
    if not split:
        # A checkpoint group has children at once, beside their parent, and a segment that changes
        # hands is read again from where its new reader was told to start.
        assert facts["order_breaks"] == 0
        assert facts["duplicates"] == facts["lost_by_client"] == 0
        assert sum(facts["reads"].values()) == 400
