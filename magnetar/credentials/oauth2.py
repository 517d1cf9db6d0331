"""`OAuth2Tokens`: the tokens of one client of an issuer, kept until they are about to expire."""

import threading
import time
from collections.abc import Callable

from magnetar.bounds import OAUTH2_EARLY_S, OAUTH2_FRESH_S, OAUTH2_UNKNOWN_LIFETIME_S
from magnetar.credentials.kinds import IssuedToken, OAuth2Credentials

__all__ = ["OAuth2Tokens"]


def _fetched(credentials: OAuth2Credentials) -> IssuedToken:
    # Most clients have no issuer, and need no HTTP.
    from magnetar.credentials.token_fetch import fetch_token

    return fetch_token(credentials)


class OAuth2Tokens:
    """The tokens of one client of an issuer.  Any thread may use it.

    `fetch` and `clock` are replaced by tests; the clock is in seconds and monotonic.
    """

    def __init__(
        self,
        credentials: OAuth2Credentials,
        *,
        fetch: Callable[[OAuth2Credentials], IssuedToken] = _fetched,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._credentials = credentials
        self._fetch = fetch
        self._clock = clock
        self._fetching = threading.Lock()
        self._token: IssuedToken | None = None
        self._asked_at = 0.0
        self._refused = False

    def refused(self) -> None:
        """Note that a broker refused the token: `get` fetches another one, unless it is fresh."""
        self._refused = True

    def kept(self, *, anew: bool = False) -> str | None:
        """The token that is kept, or None if another one must be fetched; does not block.

        `anew`: a broker asks for another token than it has.
        """
        token = self._token
        if token is None:
            return None
        age_s = self._clock() - self._asked_at
        lifetime_s = OAUTH2_UNKNOWN_LIFETIME_S if token.lifetime_s is None else token.lifetime_s
        if age_s >= lifetime_s - min(OAUTH2_EARLY_S, lifetime_s / 10):
            return None
        if (anew or self._refused) and age_s >= min(OAUTH2_FRESH_S, lifetime_s / 2):
            return None
        return token.text

    def get(self, *, anew: bool = False) -> str:
        """The token, fetched unless one is kept; blocks.  Raises `AuthenticationFailed`."""
        with self._fetching:
            kept = self.kept(anew=anew)
            if kept is not None:
                return kept
            # Its life begins before the issuer answers, so it never seems longer than it is.
            asked_at = self._clock()
            token = self._fetch(self._credentials)
            self._token, self._asked_at, self._refused = token, asked_at, False
            return token.text
