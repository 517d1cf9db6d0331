"""Exponents, and the tables of the benchmark of segments."""

import pytest

from bench.auto_scale_plot import Point, text_plot
from bench.growth_figures import exponent, exponents, growth_table, markdown, value_table
from bench.segments.rows import AT_REST, BY_SEGMENTS


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_exponent_of_a_power_is_that_power(power: float) -> None:
    points = [(x, 3 * x**power) for x in (10, 30, 100, 300, 1000)]
    assert exponent(points) == pytest.approx(power)


def test_no_exponent_without_two_sizes_or_with_zeros() -> None:
    assert exponent([(10, 5.0)]) is None
    assert exponent([(10, 5.0), (30, 0.0)]) is None


def test_table_has_each_size_and_both_exponents() -> None:
    figures = {size: {"push_bytes": 2.0 * size} for size in (10, 100, 1000)}
    assert exponents(BY_SEGMENTS, figures) == {"push_bytes": pytest.approx((1.0, 1.0))}
    lines = growth_table(BY_SEGMENTS, figures)
    assert lines[0] == ["", "10", "100", "1,000", "exponent", "of the last two"]
    (push,) = [line for line in lines if line[0] == "push of a layout, bytes"]
    assert push[1:] == ["20", "200", "2,000", "1.00", "1.00"]


def test_markdown_has_a_rule_below_the_header() -> None:
    text = markdown(value_table(AT_REST, {"topics": 10_000}))
    head, rule, first, *_ = text.splitlines()
    assert (head, rule) == ("|  | value |", "| --- | ---: |")
    assert first.endswith("| 10,000 |")


def test_plot_has_a_row_for_each_segment_and_rates_in_eighths() -> None:
    points = [Point(1, 1, 60, 60), Point(2, 3, 600, 300), Point(3, 2, 60, 360)]
    lines = text_plot(points).splitlines()
    assert lines[1:4] == ["   3 | # ", "   2 | ##", "   1 |###"]
    assert lines[-2:] == ["sent |181", "read |145"]
