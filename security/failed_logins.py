"""Failed logins by address: delays of their answers, and how many are checked.  Pure.

Each address has a bucket of FAILED_LOGIN_BURST tokens that fills by FAILED_LOGINS_PER_S.  A
failed login takes one.  The emptier the bucket, the longer the answer is held back.

Another bucket, of the same size, loses one with each failed login by password; while it is empty,
passwords from the address are refused unchecked.  Tokens and certificates are checked all the same
and do not count there: they cannot be guessed, and the valid credentials of others behind the
address of a client whose token has expired must work.

An address of IPv6 counts as its network of 64 bits, because a machine may have all addresses of
one.  The table is bounded; the address with the oldest failure leaves it first.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from config.bounds import (
    FAILED_LOGIN_ADDRESSES,
    FAILED_LOGIN_BURST,
    FAILED_LOGIN_DELAY_MAX_S,
    FAILED_LOGIN_DELAY_MIN_S,
    FAILED_LOGIN_LOGS_PER_S,
    FAILED_LOGINS_PER_S,
)
from config.log_limit import LogLimit
from security.addresses import address_key


@dataclass(frozen=True, slots=True)
class FailedLogin:
    """How to answer a failed login.

    `delay_s` is how long to hold the answer back.  `not_logged_before` is the number of failures of
    the address since its last log line, None if this one is not to be logged either.
    """

    delay_s: float
    not_logged_before: int | None


class FailedLogins:
    """The failed logins of `addresses` addresses.  `now_s` is a monotonic clock in seconds."""

    def __init__(
        self, now_s: Callable[[], float], *, addresses: int = FAILED_LOGIN_ADDRESSES
    ) -> None:
        self._now_s = now_s
        self._most_addresses = addresses
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self.count = 0
        """Logins that failed since the start."""
        self.unchecked = 0
        """Times that a password was refused unchecked."""

    def __len__(self) -> int:
        """Addresses in the table."""
        return len(self._buckets)

    def may_check(self, address: str) -> bool:
        """Whether a password from this address is to be checked."""
        bucket = self._buckets.get(address_key(address))
        if bucket is None:
            return True
        bucket.fill(self._now_s())
        if bucket.password_tokens >= 1:
            return True
        self.unchecked += 1
        return False

    def wrong_passwords(self, address: str) -> int:
        """How many wrong passwords of this address count now: 0 to FAILED_LOGIN_BURST."""
        bucket = self._buckets.get(address_key(address))
        if bucket is None:
            return 0
        bucket.fill(self._now_s())
        return FAILED_LOGIN_BURST - int(bucket.password_tokens)

    def failed(self, address: str, *, password: bool = True) -> FailedLogin:
        """Count a failed login, by password or not, and say how to answer it."""
        now_s = self._now_s()
        key = address_key(address)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self._now_s)
            if len(self._buckets) > self._most_addresses:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        self.count += 1
        used = 1 - bucket.take(now_s, password=password) / FAILED_LOGIN_BURST
        longest_more_s = FAILED_LOGIN_DELAY_MAX_S - FAILED_LOGIN_DELAY_MIN_S
        delay_s = FAILED_LOGIN_DELAY_MIN_S + longest_more_s * used
        return FailedLogin(delay_s, bucket.log_limit.take())


class _Bucket:
    __slots__ = ("_at_s", "_tokens", "log_limit", "password_tokens")

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._tokens = float(FAILED_LOGIN_BURST)
        self.password_tokens = self._tokens
        """The tokens of the bucket for passwords, at the last call of `fill`."""
        self._at_s = now_s()
        self.log_limit = LogLimit(FAILED_LOGIN_LOGS_PER_S, now_s)

    def fill(self, now_s: float) -> float:
        """Add the tokens of the time since the last call; return how many there are."""
        more = (now_s - self._at_s) * FAILED_LOGINS_PER_S
        self._tokens = min(float(FAILED_LOGIN_BURST), self._tokens + more)
        self.password_tokens = min(float(FAILED_LOGIN_BURST), self.password_tokens + more)
        self._at_s = now_s
        return self._tokens

    def take(self, now_s: float, *, password: bool) -> float:
        """Take a token, if there is a whole one; return how many there were."""
        tokens = self.fill(now_s)
        if tokens >= 1:
            self._tokens -= 1
        if password and self.password_tokens >= 1:
            self.password_tokens -= 1
        return tokens
