"""The place in a shard's notifications: repeats, gaps, outages."""

from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.oxia.notifications import NotificationPosition, Step

KEPT_S = 100.0


def test_the_first_batch_tells_the_place() -> None:
    place = NotificationPosition()
    assert place.resume(0.0) is None
    assert place.take(41) is Step.FIRST
    assert place.take(42) is Step.NEXT
    assert place.resume(1.0) == 42


def test_repeated_offset_is_dropped_and_a_jump_is_a_gap() -> None:
    place = NotificationPosition()
    place.take(10)
    assert place.take(10) is Step.REPEATED
    assert place.take(9) is Step.REPEATED
    assert place.take(11) is Step.NEXT
    assert place.take(13) is Step.GAP
    assert place.take(14) is Step.NEXT


def test_a_short_outage_is_resumed() -> None:
    place = NotificationPosition(kept_s=KEPT_S)
    place.take(10)
    place.lost(1000.0, was_connected=True)
    place.lost(1020.0, was_connected=False)
    assert place.resume(1050.0) == 10
    assert place.take(11) is Step.NEXT


def test_after_half_the_time_of_keeping_nothing_is_resumed() -> None:
    place = NotificationPosition(kept_s=KEPT_S)
    place.take(10)
    place.lost(1000.0, was_connected=True)
    place.lost(1049.0, was_connected=False)
    assert place.resume(1051.0) is None
    place.lost(1052.0, was_connected=False)
    assert place.resume(1053.0) is None
    assert place.take(500) is Step.GAP
    assert place.take(501) is Step.NEXT


def test_a_stream_that_was_answered_begins_the_outage_anew() -> None:
    place = NotificationPosition(kept_s=KEPT_S)
    place.take(10)
    place.lost(1000.0, was_connected=True)
    place.lost(1049.0, was_connected=True)
    assert place.resume(1060.0) == 10


@given(st.lists(st.integers(0, 30), min_size=1))
def test_nothing_is_missed_without_a_gap(offsets: list[int]) -> None:
    """Every offset above the first is seen once, in order, or a gap is told before a later one."""
    place = NotificationPosition()
    seen: list[int] = []
    for offset in offsets:
        step = place.take(offset)
        if step in (Step.FIRST, Step.NEXT):
            seen.append(offset)
        elif step is Step.GAP:
            assert offset > seen[-1] + 1
            seen = [offset]
        else:
            assert offset <= seen[-1]
    assert seen == list(range(seen[0], seen[0] + len(seen)))
