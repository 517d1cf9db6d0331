"""The provider for tokens (JWT), and its keys and rules as the settings name them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from config.settings import Settings
from security.errors import InvalidSecret
from security.identity import Identity, Method
from security.key_source import KeySource, key_source
from security.providers import Credentials
from security.secret_files import is_file, read_public, read_secret
from security.token_keys import TokenKeys, VerificationKey, public_key, secret_key
from security.tokens import TokenChecker, TokenRules


class TokenProvider:
    """Checks tokens.  Its keys may be replaced while it is in use."""

    name = "token"
    method = Method.TOKEN

    def __init__(
        self, keys: TokenKeys, rules: TokenRules, now_s: Callable[[], float] = time.time
    ) -> None:
        self._rules = rules
        self._checker = TokenChecker(keys, rules)
        self._now_s = now_s

    def use_keys(self, keys: TokenKeys) -> None:
        """Check with other keys from now on."""
        self._checker = TokenChecker(keys, self._rules)

    async def authenticate(self, credentials: Credentials) -> Identity:
        """Return the identity that a token proves.  Raises `CredentialsRefused`."""
        # On the loop: its length and the number of keys are bounded, to some milliseconds.
        return self._checker.check(credentials.data, self._now_s())


def token_rules(settings: Settings) -> TokenRules:
    """The requirements of claims, of the settings."""
    return TokenRules(
        settings.token_auth_claim,
        settings.token_audience_claim or None,
        settings.token_audience or None,
        settings.token_clock_skew_s,
    )


def load_token_keys(settings: Settings) -> TokenKeys:
    """Read the keys that the settings name.  Raises `InvalidSecret`, also if there is none."""
    keys: list[VerificationKey] = [
        *(
            secret_key(source.read(read_secret), source.name, source.key_id)
            for source in _secret_sources(settings)
        ),
        *(
            public_key(source.read(read_public), source.name, source.key_id)
            for source in _public_sources(settings)
        ),
    ]
    if not keys:
        raise InvalidSecret(
            "No key of tokens is set: name one in token_secret_keys or token_public_keys, which "
            "`magnetar tokens create-secret-key` or `create-key-pair` makes."
        )
    return TokenKeys(keys)


def token_key_files(settings: Settings) -> tuple[Path, ...]:
    """The files that `load_token_keys` reads.  Raises `InvalidSecret`."""
    sources = (*_secret_sources(settings), *_public_sources(settings))
    return tuple(source.path for source in sources if source.path is not None)


def _secret_sources(settings: Settings) -> Iterator[KeySource]:
    for number, secret in enumerate(settings.token_secret_keys, 1):
        yield key_source(secret.get_secret_value(), f"Key {number} of token_secret_keys", is_file)


def _public_sources(settings: Settings) -> Iterator[KeySource]:
    for number, text in enumerate(settings.token_public_keys, 1):
        yield key_source(text, f"Key {number} of token_public_keys", is_file)
