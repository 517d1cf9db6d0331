"""The token bucket of all rates.  Pure: the time is an argument."""

from typing import Final

_ALMOST_ONE: Final = 1 - 1e-6
"""Tokens that count as one, since sums of fractions are not exact."""


class TokenBucket:
    """Allows `rate` tokens in each `period_s`, those of one period at once.

    A taker needs one token to begin, and may take more than there are: a batch is taken as a whole,
    and its debt is paid off before the next taker (as in Pulsar).  Times are in seconds, of any
    clock that does not go back.
    """

    __slots__ = ("_at_s", "_period_s", "_rate", "_tokens")

    def __init__(self, rate: float, period_s: float, now_s: float) -> None:
        self._rate = rate
        self._period_s = period_s
        self._tokens = rate
        self._at_s = now_s

    def take(self, tokens: int, now_s: float) -> None:
        """Take tokens, also those that are not there yet."""
        self._refill(now_s)
        self._tokens -= tokens

    def wait_s(self, now_s: float) -> float:
        """Seconds until a token is there; 0 if one is."""
        self._refill(now_s)
        if self._tokens >= _ALMOST_ONE:
            return 0.0
        return (1 - self._tokens) * self._period_s / self._rate

    def change_rate(self, rate: float, now_s: float) -> None:
        """Go on at another rate, with the tokens that are there, and the debt."""
        self._refill(now_s)
        self._rate = rate
        self._tokens = min(self._tokens, rate)

    def _refill(self, now_s: float) -> None:
        if now_s > self._at_s:
            earned = (now_s - self._at_s) * self._rate / self._period_s
            self._tokens = min(self._rate, self._tokens + earned)
            self._at_s = now_s
