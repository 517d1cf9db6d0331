"""What an owner can have sent: more than that in another cluster means a restored backup (R12)."""

import pytest

from broker.replication.sent_positions import SentPositions
from broker.topics.replicated_ranges import EVERYTHING, LAST_HASH, Mark, ReplicatedRanges
from magnetar.protocol.ids import Position

FOUND = Position(3, 9)


def told(ledger_id: int, entry_id: int) -> ReplicatedRanges:
    """Everything up to this is stored."""
    return ReplicatedRanges.nothing(0, LAST_HASH).all_raised(Mark(ledger_id, entry_id))


@pytest.fixture
def sent() -> SentPositions:
    """Of an owner that found three ledgers, and the log not terminated."""
    return SentPositions(FOUND, terminated=False)


@pytest.mark.parametrize(("stored", "went_back"), [((3, 9), False), ((3, 10), True)])
def test_more_than_was_found_in_the_log_means_that_positions_went_back(
    sent: SentPositions, stored: tuple[int, int], went_back: bool
) -> None:
    assert sent.went_back(told(*stored), Position(1, 0)) is went_back


def test_entries_that_were_sent_count(sent: SentPositions) -> None:
    sent.passed(Position(4, 2))
    assert not sent.went_back(told(4, 2), FOUND)
    assert sent.went_back(told(4, 3), FOUND)


def test_the_mark_delete_position_counts(sent: SentPositions) -> None:
    assert not sent.went_back(told(4, 2), Position(4, 2))


def test_the_place_before_the_first_entry_of_a_ledger_is_no_entry(sent: SentPositions) -> None:
    assert not sent.went_back(told(4, -1), FOUND)


def test_a_segment_that_counts_as_drained_and_was_not_went_back(sent: SentPositions) -> None:
    everything = ReplicatedRanges.nothing(0, LAST_HASH).all_raised(EVERYTHING)
    assert sent.went_back(everything, FOUND)
    sent.drained()
    assert not sent.went_back(everything, FOUND)
    assert not SentPositions(FOUND, terminated=True).went_back(everything, FOUND)
