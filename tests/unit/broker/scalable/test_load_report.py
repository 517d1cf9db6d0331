"""When the owner of a segment writes its load, and since when the leader counts it as quiet."""

import pytest

from broker.scalable.auto_scale_policy import Rates
from broker.scalable.load_report import (
    EarlierReport,
    Load,
    LoadBoard,
    LoadReport,
    SegmentMeter,
    decode_report,
    encode_report,
)

LIMITS = Rates(100, 100, 100, 100)


def load(msg_in: float, backlog: int = 0) -> Load:
    return Load(Rates(msg_in), backlog)


@pytest.mark.parametrize(
    ("before", "now", "written"),
    [
        (None, 0.0, True),
        (100.0, 125.0, False),
        (100.0, 126.0, True),
        (100.0, 74.0, True),
        (0.0, 0.2, False),
        (0.0, 0.3, True),
        (0.3, 0.0, True),
    ],
)
def test_a_load_is_written_when_a_rate_has_moved(
    before: float | None, now: float, written: bool
) -> None:
    assert load(now).differs(None if before is None else load(before), 0.25) is written


def test_a_backlog_is_written_when_it_has_moved() -> None:
    assert not load(0, 250).differs(load(0, 0), 0.25)
    assert load(0, 251).differs(load(0, 0), 0.25)


def test_a_meter_turns_counters_into_rates() -> None:
    meter = SegmentMeter(90)
    assert meter.sample(100, (50, 500, 0, 0), 3) == Load(Rates(5, 50), 3)
    assert meter.rates_now(105, (60, 500, 5, 0)) == Rates(2, 0, 1)
    assert meter.sample(110, (50, 500, 10, 100), 0) == Load(Rates(0, 0, 1, 10))


def test_a_report_survives_its_record() -> None:
    written = Load(Rates(1.5, 2, 3, 4), 7)
    earlier = (EarlierReport(3, 1_000, Rates(5, 6, 7, 8)), EarlierReport(4, 2_000, Rates(1)))
    assert decode_report(encode_report(written, earlier)) == (written, earlier)
    assert decode_report(b'{"msgRateIn":1,"bytesRateIn":2,"msgRateOut":3,"bytesRateOut":4}') == (
        Load(Rates(1, 2, 3, 4)),
        (),
    )


def quiet_since_ms(board: LoadBoard) -> int | None:
    return board.loads()[0].quiet_since_ms


def test_a_load_below_the_limits_stays_quiet_when_it_moves() -> None:
    board = LoadBoard()
    board.use_limits(LIMITS)
    for at_ms, number, rate, quiet_ms in (
        (10, 0, 500, None),
        (20, 1, 50, 20),
        (30, 2, 10, 20),
        (40, 3, 150, None),
        (50, 4, 0, 50),
    ):
        board.take(0, LoadReport(load(rate), at_ms, number))
        assert quiet_since_ms(board) == quiet_ms


def test_a_missed_report_may_have_been_busy() -> None:
    board = LoadBoard()
    board.use_limits(LIMITS)
    board.take(0, LoadReport(load(50), 10, 1))
    board.take(0, LoadReport(load(50), 10, 1))
    assert quiet_since_ms(board) == 10
    board.take(0, LoadReport(load(10), 40, 3))
    assert quiet_since_ms(board) == 40


@pytest.mark.parametrize(("second", "quiet_ms"), [(60.0, 10), (150.0, 40)])
def test_a_missed_report_that_is_repeated_counts(second: float, quiet_ms: int) -> None:
    board = LoadBoard()
    board.use_limits(LIMITS)
    first = LoadReport(load(50), 10, 1)
    board.take(0, first)
    missed = LoadReport(load(second), 30, 2, first.and_earlier(4))
    board.take(0, LoadReport(load(10), 40, 3, missed.and_earlier(4)))
    assert quiet_since_ms(board) == quiet_ms


def test_only_so_many_reports_are_repeated() -> None:
    report = LoadReport(load(0), 0, 0)
    for number in range(1, 10):
        report = LoadReport(load(number), number, number, report.and_earlier(3))
    assert [each.number for each in report.earlier] == [6, 7, 8]


def test_other_limits_begin_with_the_newest_reports() -> None:
    board = LoadBoard()
    board.use_limits(LIMITS)
    board.take(0, LoadReport(load(50), 10, 0))
    board.take(0, LoadReport(load(10), 40, 1))
    board.use_limits(Rates(20, 100, 100, 100))
    assert quiet_since_ms(board) == 40
    board.use_limits(Rates(5, 100, 100, 100))
    assert quiet_since_ms(board) is None


def test_segments_that_are_gone_are_forgotten() -> None:
    board = LoadBoard()
    board.take(0, LoadReport(load(1), 10, 0))
    board.take(1, LoadReport(load(2), 10, 0))
    board.keep([1, 2])
    assert set(board.loads()) == {1}
