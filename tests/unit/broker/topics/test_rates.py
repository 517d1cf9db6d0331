"""Rates of counters over a sliding window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.topics.rates import RateSampler
from config.bounds import RATE_SAMPLE_S, RATE_WINDOW_S


def steady(sampler: RateSampler, until_s: int, *, per_s: int, since_s: int = 0) -> None:
    """Sample a counter that grows steadily from `since_s` on."""
    for now_s in range(since_s, until_s + 1, RATE_SAMPLE_S):
        sampler.sample(now_s, (per_s * (now_s - since_s),))


def test_new_counter_has_its_rate_before_the_first_sample() -> None:
    sampler = RateSampler(100.0, 2)
    assert sampler.rates(104.0, (40, 4000)) == (10.0, 1000.0)


def test_counters_that_were_never_changed_have_no_rate() -> None:
    sampler = RateSampler(0.0, 1)
    assert sampler.rates(0.0, (0,)) == (0.0,)
    for now_s in range(0, 1000, RATE_SAMPLE_S):
        sampler.sample(now_s, (0,))
    assert sampler.rates(1000.0, (0,)) == (0.0,)


def test_first_message_is_no_burst() -> None:
    assert RateSampler(0.0, 1).rates(0.001, (1,)) == (1.0,)


@pytest.mark.parametrize("now_s", [60, 65, 69.9, 300])
def test_steady_counter_has_its_rate_between_samples(now_s: float) -> None:
    sampler = RateSampler(0.0, 1)
    steady(sampler, int(now_s), per_s=7)
    assert sampler.rates(now_s, (int(7 * now_s),))[0] == pytest.approx(7, abs=0.02)


def test_traffic_after_a_long_rest_is_not_spread_over_the_rest() -> None:
    sampler = RateSampler(0.0, 1)
    steady(sampler, 100_000, per_s=0)
    sampler.sample(100_010, (600,))
    assert sampler.rates(100_010, (600,)) == (10.0,)
    assert sampler.rates(100_010, (600,), over_s=10) == (60.0,)


def test_rate_falls_to_zero_within_the_window_after_the_last_message() -> None:
    sampler = RateSampler(0.0, 1)
    steady(sampler, 600, per_s=10)
    for now_s in range(610, 600 + RATE_WINDOW_S, RATE_SAMPLE_S):
        sampler.sample(now_s, (6000,))
        assert sampler.rates(now_s, (6000,))[0] == pytest.approx((660 - now_s) / 6)
    assert sampler.rates(660, (6000,)) == (0.0,)
    # The next message counts from the last sample on, whatever was before it.
    sampler.sample(2000, (6000,))
    assert sampler.rates(2006, (6060,), over_s=6) == (10.0,)


def test_shorter_window_follows_a_change_sooner() -> None:
    sampler = RateSampler(0.0, 1)
    steady(sampler, 60, per_s=1)
    sampler.sample(70, (1060,))
    assert sampler.rates(70, (1060,), over_s=10) == (100.0,)
    assert sampler.rates(70, (1060,))[0] == pytest.approx(1050 / 60)


def test_number_of_samples_is_bounded() -> None:
    sampler = RateSampler(0.0, 1)
    steady(sampler, 10_000, per_s=3)
    assert 1 <= sampler.stored <= RATE_WINDOW_S / RATE_SAMPLE_S + 1
    for now_s in range(10_010, 10_010 + RATE_WINDOW_S + 1, RATE_SAMPLE_S):
        sampler.sample(now_s, (30_000,))
    assert sampler.stored == 0


@given(
    st.lists(st.tuples(st.floats(0.01, 50), st.integers(0, 1000)), min_size=1, max_size=40),
    st.floats(0, 30),
)
def test_rate_is_between_the_least_and_the_greatest_growth(
    steps: list[tuple[float, int]], later_s: float
) -> None:
    sampler, now_s, count = RateSampler(0.0, 1), 0.0, 0
    readings = [(now_s, count)]
    for pause_s, growth in steps:
        now_s, count = now_s + pause_s, count + growth
        sampler.sample(now_s, (count,))
        readings.append((now_s, count))
    now_s += later_s
    (rate,) = sampler.rates(now_s, (count,))
    within = [c for t, c in readings if t >= now_s - RATE_WINDOW_S]
    took_s = max(min(RATE_WINDOW_S, now_s), 1.0)
    least = (count - within[0]) / took_s if within else 0.0
    before = [c for t, c in readings if t <= now_s - RATE_WINDOW_S]
    greatest = (count - (before[-1] if before else 0)) / took_s
    assert least - 1e-6 <= rate <= greatest + 1e-6
