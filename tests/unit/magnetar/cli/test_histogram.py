"""Percentiles are those of the sorted values, but for the width of a bucket."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.cli.histogram import BUCKETS_MAX, VALUE_MAX_US, Histogram

PERCENTS = (0.0, 1.0, 50.0, 95.0, 99.0, 99.9, 100.0)


def filled(values: list[int]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


def true_percentile(values: list[int], percent: float) -> int:
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


@given(st.lists(st.integers(0, VALUE_MAX_US), min_size=1, max_size=200), st.sampled_from(PERCENTS))
def test_a_percentile_is_never_below_and_hardly_above(values: list[int], percent: float) -> None:
    truth = true_percentile(values, percent)
    found = filled(values).percentile_us(percent)
    assert truth <= found <= truth + truth // 128


def test_small_values_are_exact() -> None:
    values = list(range(256))
    histogram = filled(values)
    for percent in PERCENTS:
        assert histogram.percentile_us(percent) == true_percentile(values, percent)


def test_many_values_take_few_counts() -> None:
    rng = random.Random(1)
    histogram = filled([int(rng.lognormvariate(8, 4)) for _ in range(20_000)])
    histogram.record(10**18)
    assert histogram.max_us == VALUE_MAX_US
    assert len(histogram._counts) <= BUCKETS_MAX
    assert histogram.count == 20_001


@pytest.mark.parametrize("percent", PERCENTS)
def test_nothing_counted_is_nothing(percent: float) -> None:
    assert Histogram().percentile_us(percent) == 0


def test_a_clock_that_is_behind_counts_as_no_time() -> None:
    histogram = Histogram()
    histogram.record(-5, times=3)
    assert (histogram.count, histogram.percentile_us(50), histogram.max_us) == (3, 0, 0)
