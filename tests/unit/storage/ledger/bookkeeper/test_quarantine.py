"""Which failures put a bookie into quarantine, and for how long."""

from config import bounds
from storage.ledger.bookkeeper.ledger_metadata import BookieId
from storage.ledger.bookkeeper.quarantine import Quarantine

A, B = BookieId("a"), BookieId("b")
STEP = bounds.BOOKIE_ERROR_SPACING_S


def test_repeated_failures_count_others_do_not() -> None:
    quarantine = Quarantine()
    assert not quarantine.failed(A, 0)
    assert not quarantine.failed(B, 0)
    assert not quarantine.failed(A, STEP)
    assert quarantine.quarantined(STEP) == set()
    assert quarantine.failed(A, 2 * STEP)
    assert quarantine.quarantined(2 * STEP) == {A}


def test_simultaneous_failures_count_as_one() -> None:
    quarantine = Quarantine()
    for _ in range(100):
        assert not quarantine.failed(A, 5.0)
    assert not quarantine.failed(A, 5.0 + STEP)
    assert quarantine.quarantined(6.0) == set()


def test_failures_far_apart_are_forgotten() -> None:
    quarantine = Quarantine()
    for turn in range(10):
        assert not quarantine.failed(A, turn * (bounds.BOOKIE_ERROR_WINDOW_S / 2 + 1))


def test_quarantine_ends_and_can_begin_again() -> None:
    quarantine = Quarantine()
    assert [quarantine.failed(A, turn * STEP) for turn in range(3)] == [False, False, True]
    start = 2 * STEP
    assert not quarantine.failed(A, start + 1)
    end = start + bounds.BOOKIE_QUARANTINE_S
    assert quarantine.quarantined(end - 0.1) == {A}
    assert quarantine.quarantined(end) == set()
    assert [quarantine.failed(A, end + turn * STEP) for turn in range(3)] == [False, False, True]


def test_old_failures_take_no_memory() -> None:
    quarantine = Quarantine()
    for number in range(100):
        quarantine.failed(BookieId(str(number)), 0)
    quarantine.quarantined(bounds.BOOKIE_ERROR_WINDOW_S)
    assert not quarantine._failures
