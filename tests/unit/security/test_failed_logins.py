"""Failed logins: delays that grow, passwords that are not checked, and a bounded table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import (
    FAILED_LOGIN_BURST,
    FAILED_LOGIN_DELAY_MAX_S,
    FAILED_LOGIN_DELAY_MIN_S,
    FAILED_LOGINS_PER_S,
)
from security.addresses import address_key
from security.failed_logins import FailedLogins

ADDRESS = "192.0.2.1"


class Monotonic:
    """A clock that goes on when the test says so."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_delays_grow_from_the_shortest_to_the_longest() -> None:
    failed = FailedLogins(Monotonic())
    delays = [failed.failed("192.0.2.1").delay_s for _ in range(FAILED_LOGIN_BURST + 5)]
    assert delays[0] == FAILED_LOGIN_DELAY_MIN_S
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(FAILED_LOGIN_DELAY_MAX_S)
    assert failed.failed("192.0.2.2").delay_s == FAILED_LOGIN_DELAY_MIN_S


def test_passwords_of_an_address_are_not_checked_until_its_bucket_fills() -> None:
    clock = Monotonic()
    failed = FailedLogins(clock)
    for _ in range(FAILED_LOGIN_BURST):
        assert failed.may_check("192.0.2.1")
        failed.failed("192.0.2.1")
    assert not failed.may_check("192.0.2.1")
    assert failed.may_check("192.0.2.2")
    clock.s += 1.01 / FAILED_LOGINS_PER_S
    assert failed.may_check("192.0.2.1")
    failed.failed("192.0.2.1")
    assert not failed.may_check("192.0.2.1")
    clock.s += 3600
    for _ in range(FAILED_LOGIN_BURST):
        assert failed.may_check("192.0.2.1")
        failed.failed("192.0.2.1")
    assert (failed.count, failed.unchecked) == (2 * FAILED_LOGIN_BURST + 1, 2)


def test_failed_tokens_of_an_address_do_not_stop_its_passwords() -> None:
    failed = FailedLogins(Monotonic())
    delays = [failed.failed(ADDRESS, password=False).delay_s for _ in range(FAILED_LOGIN_BURST + 1)]
    assert delays[-1] == pytest.approx(FAILED_LOGIN_DELAY_MAX_S)
    assert failed.may_check(ADDRESS)
    assert failed.failed(ADDRESS).delay_s == pytest.approx(FAILED_LOGIN_DELAY_MAX_S)


def test_a_refusal_without_a_check_does_not_keep_the_bucket_empty() -> None:
    """A client that goes on trying is checked again all the same, at the rate of the bucket."""
    clock = Monotonic()
    failed = FailedLogins(clock)
    checked = 0
    for _ in range(1000):
        checked += failed.may_check("192.0.2.1")
        failed.failed("192.0.2.1")
        clock.s += 0.1
    assert checked == pytest.approx(FAILED_LOGIN_BURST + 100 * FAILED_LOGINS_PER_S, abs=2)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("a socket", "a socket"),
    ],
)
def test_addresses_count_by_their_network(address: str, key: str) -> None:
    assert address_key(address) == key


@given(address=st.text())
def test_any_text_has_a_short_key(address: str) -> None:
    assert len(address_key(address)) <= 64


def test_the_address_with_the_oldest_failure_is_forgotten() -> None:
    failed = FailedLogins(Monotonic(), addresses=2)
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3"):
        failed.failed(address)
    assert len(failed) == 2
    first_delay = FAILED_LOGIN_DELAY_MIN_S
    assert failed.failed("192.0.2.1").delay_s > first_delay
    assert failed.failed("192.0.2.2").delay_s == first_delay


def test_lines_of_one_address_are_limited() -> None:
    clock = Monotonic()
    failed = FailedLogins(clock)
    lines = [failed.failed("192.0.2.1").not_logged_before for _ in range(5)]
    assert lines == [0, None, None, None, None]
    assert failed.failed("192.0.2.2").not_logged_before == 0
    clock.s += 1
    assert failed.failed("192.0.2.1").not_logged_before == 4
