"""The token bucket in virtual time, and the subscribe rate over it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.policies.message_rate import SubscribeRate
from broker.topics.subscribe_limit import SubscribeLimit
from broker.topics.token_bucket import TokenBucket

RATES = st.integers(1, 2000)
PERIODS_S = st.integers(1, 60)
BATCHES = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 5)), min_size=1, max_size=60)


@given(RATES, PERIODS_S, BATCHES)
def test_a_patient_taker_gets_no_more_than_the_rate_and_one_batch(
    rate: int, period_s: int, batches: list[tuple[int, float]]
) -> None:
    now_s, bucket, taken = 1000.0, TokenBucket(rate, period_s, 1000.0), 0
    for size, pause_s in batches:
        now_s += pause_s
        now_s += bucket.wait_s(now_s)
        assert bucket.wait_s(now_s) == 0
        allowed = rate + (now_s - 1000.0) * rate / period_s
        assert taken <= allowed - 1 + 1e-3
        bucket.take(size, now_s)
        taken += size


@given(RATES, PERIODS_S, st.integers(1, 300))
def test_a_taker_that_always_wants_more_gets_the_whole_rate(
    rate: int, period_s: int, takes: int
) -> None:
    now_s, bucket = 0.0, TokenBucket(rate, period_s, 0.0)
    for _ in range(rate + takes):
        now_s += bucket.wait_s(now_s)
        bucket.take(1, now_s)
    assert now_s == pytest.approx(takes * period_s / rate, abs=1e-3 * period_s)


def test_a_batch_is_allowed_as_a_whole_and_paid_off() -> None:
    bucket = TokenBucket(50, 1, 0.0)
    bucket.take(1000, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx((1000 - 50 + 1) / 50)
    assert bucket.wait_s(10.0) == pytest.approx(9.02)
    assert bucket.wait_s(19.02) == 0


def test_tokens_of_one_period_at_most_are_saved() -> None:
    bucket = TokenBucket(10, 2, 0.0)
    for _ in range(10):
        assert bucket.wait_s(100.0) == 0
        bucket.take(1, 100.0)
    assert bucket.wait_s(100.0) == pytest.approx(0.2)


def test_another_rate_keeps_the_debt() -> None:
    bucket = TokenBucket(10, 1, 0.0)
    bucket.take(30, 0.0)
    bucket.change_rate(100, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(0.21)


def test_each_consumer_has_its_own_subscribe_rate() -> None:
    limit, one, two = SubscribeLimit(), ("host", "c", 0), ("host", "c", 1)
    assert all(limit.admits(one, 0.0) for _ in range(9))
    limit.apply(SubscribeRate(2, 30))
    assert [limit.admits(one, 0.0) for _ in range(3)] == [True, True, False]
    assert limit.admits(two, 0.0)
    assert not limit.admits(one, 14.0)
    assert limit.admits(one, 15.0)
    limit.apply(SubscribeRate(2, 30))
    assert not limit.admits(one, 15.0)
    limit.apply(None)
    assert limit.admits(one, 15.0)


def test_the_consumers_of_a_subscribe_rate_are_bounded() -> None:
    limit = SubscribeLimit(most_consumers=2)
    limit.apply(SubscribeRate(1, 30))
    assert all(limit.admits(("host", "c", number), 0.0) for number in range(3))
    assert not limit.admits(("host", "c", 2), 0.0)
    assert limit.admits(("host", "c", 0), 0.0)
