"""Keys of issuers of tokens by OpenID Connect: the documents, and how long keys are used.  Pure.

The time is given.  The discovery document of an issuer (OpenID Connect Discovery 1.0) names
the URL of its keys, a JSON Web Key Set (RFC 7517).  Rules:

O1. Nothing is fetched but for an issuer of the settings, and of its document and key set.
O2. The document names the same issuer, and a URL that is https if the settings ask for that.
O3. A key is for signatures, public, and bound to its `alg` if it has one; other keys are left out.
O4. Keys are fetched again when they are `refresh_s` old.  Until OIDC_EXPIRY_FACTOR of that time the
    old ones are used meanwhile, also if the fetch fails.
O5. A key id that is unknown has the keys fetched again, but not within `unknown_key_refresh_s` of
    the last fetch: anybody can write any key id into a token.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from jwt import PyJWKSet
from jwt.exceptions import PyJWTError

from config.bounds import (
    OIDC_EXPIRY_FACTOR,
    OIDC_FETCH_RETRY_S,
    OIDC_KEYS,
    OIDC_REFRESH_RETRY_S,
    OIDC_TEXT_BYTES,
)
from security.errors import InvalidSecret
from security.token_keys import PAIR_ALGORITHMS, VerificationKey, verification_key

DISCOVERY_PATH: Final = "/.well-known/openid-configuration"
_MEMBERS: Final = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
"""The members of a public key, by its type."""


class InvalidIssuer(ValueError):
    """A document of an issuer, or its URL, cannot be used; the message is for the operator."""


def require_issuer_url(url: str, *, require_https: bool) -> None:
    """Raises `InvalidIssuer` unless the URL may be fetched."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:  # A port or an address of IPv6 that is none.
        raise InvalidIssuer("It is no URL.") from error
    if len(url) > OIDC_TEXT_BYTES or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidIssuer("The URL is too long, or has characters that no URL has.")
    if parts.scheme != "https" and (require_https or parts.scheme != "http"):
        raise InvalidIssuer(
            f"The URL must begin with https://{'' if require_https else ' or http://'}."
        )
    if not parts.hostname or not port_is_valid or "@" in parts.netloc or "#" in url:
        raise InvalidIssuer("The URL must have a host, and neither a user nor a fragment.")


def discovery_url(issuer: str) -> str:
    """The URL of the discovery document of an issuer."""
    return issuer.removesuffix("/") + DISCOVERY_PATH


def keys_url(document: bytes, issuer: str, *, require_https: bool) -> str:
    """Return the URL of the keys, as a discovery document names it.  Raises `InvalidIssuer`."""
    members = _json_object(document, "The discovery document")
    if members.get("issuer") != issuer:  # O2
        raise InvalidIssuer("The discovery document names another issuer.")
    url = members.get("jwks_uri")
    if not isinstance(url, str):
        raise InvalidIssuer("The discovery document has no jwks_uri.")
    try:
        require_issuer_url(url, require_https=require_https)
    except InvalidIssuer as error:
        raise InvalidIssuer(
            f"The jwks_uri of the discovery document is refused. {error}"
        ) from error
    return url


def parse_keys(document: bytes) -> tuple[VerificationKey, ...]:
    """Return the keys of a key set that may sign tokens.

    Others are left out, as an issuer may have keys for other purposes.  Raises `InvalidIssuer` if
    the document is no key set, has more than OIDC_KEYS keys, or none that is usable.
    """
    listed = _json_object(document, "The key set").get("keys")
    if not isinstance(listed, list):
        raise InvalidIssuer("The key set has no list of keys.")
    if len(listed) > OIDC_KEYS:
        raise InvalidIssuer(f"The key set has {len(listed)} keys, more than {OIDC_KEYS}.")
    parsed = (_parse_key(member) for member in listed if isinstance(member, dict))
    keys = tuple(key for key in parsed if key is not None)
    if not keys:
        raise InvalidIssuer("The key set has no public key that may sign tokens.")
    return keys


def _parse_key(members: Mapping[str, object]) -> VerificationKey | None:
    """The key; None if it is not for signatures of tokens, or is damaged (O3)."""
    kind, algorithm = members.get("kty"), members.get("alg")
    if not isinstance(kind, str) or kind not in _MEMBERS or not _may_sign_tokens(members):
        return None
    # Only members of a known type: the library raises errors of many kinds for others.
    public = {name: members.get(name) for name in _MEMBERS[kind]}
    if not all(isinstance(value, str) and value.isascii() for value in public.values()):
        return None
    key_id = str(members["kid"]) if "kid" in members else None
    try:
        (parsed,) = PyJWKSet([{"kty": kind, **public}]).keys
        key = verification_key(parsed.key, "A key", key_id)
    except (PyJWTError, InvalidSecret):
        return None
    if algorithm is None:
        return key
    bound = key.algorithms & {str(algorithm)}
    return VerificationKey(key.material, bound, key_id) if bound else None


def _may_sign_tokens(members: Mapping[str, object]) -> bool:
    """Whether the members that are not the key itself allow it to be used (O3)."""
    key_id, operations = members.get("kid", ""), members.get("key_ops", ["verify"])
    return (
        # A private key that is published proves nothing.
        "d" not in members
        and members.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
        and isinstance(key_id, str)
        and len(key_id) <= OIDC_TEXT_BYTES
        and (members.get("alg") is None or members["alg"] in PAIR_ALGORITHMS)
    )


def _json_object(document: bytes, name: str) -> dict[str, object]:
    try:
        members = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise InvalidIssuer(f"{name} is not JSON.") from error
    if not isinstance(members, dict):
        raise InvalidIssuer(f"{name} is no JSON object.")
    return members


class Step(enum.Enum):
    """How a token gets its keys."""

    USE = enum.auto()
    """By those that were found."""
    USE_AND_REFRESH = enum.auto()
    """By those that were found, while they are fetched again."""
    FETCH = enum.auto()
    """By a fetch that it waits for."""
    UNKNOWN_KEY = enum.auto()
    """Not at all: the issuer has no such key."""
    UNAVAILABLE = enum.auto()
    """Not at all: the last fetch failed a moment ago."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The next step for a token, and the keys for its key id."""

    step: Step
    keys: tuple[VerificationKey, ...] = ()


class IssuerKeys:
    """The keys of one issuer.  Times are seconds of a monotonic clock of the caller."""

    __slots__ = ("_failed", "_fetched_at_s", "_keys", "_refresh_s", "_tried_at_s", "_unknown_s")

    def __init__(self, *, refresh_s: float, unknown_key_refresh_s: float) -> None:
        self._refresh_s = refresh_s
        self._unknown_s = unknown_key_refresh_s
        self._keys: tuple[VerificationKey, ...] = ()
        self._fetched_at_s = 0.0
        self._tried_at_s: float | None = None
        self._failed = False

    def fetched(self, keys: tuple[VerificationKey, ...], now_s: float) -> None:
        """Replace the keys."""
        self._keys = keys
        self._fetched_at_s = self._tried_at_s = now_s
        self._failed = False

    def failed(self, now_s: float) -> None:
        """Note a fetch that failed; the keys stay (O4)."""
        self._tried_at_s = now_s
        self._failed = True

    def lookup(self, key_id: str | None, now_s: float) -> Lookup:
        """Say how a token with this key id gets its keys.

        A token without a key id is taken only if the issuer has one key alone.
        """
        age_s = now_s - self._fetched_at_s
        since_try_s = float("inf") if self._tried_at_s is None else now_s - self._tried_at_s
        if not self._keys or age_s >= self._refresh_s * OIDC_EXPIRY_FACTOR:
            may_try = not self._failed or since_try_s >= OIDC_FETCH_RETRY_S
            return Lookup(Step.FETCH if may_try else Step.UNAVAILABLE)
        found = self._find(key_id)
        if not found:  # O5
            may_try = since_try_s >= self._unknown_s
            return Lookup(Step.FETCH if may_try else Step.UNKNOWN_KEY)
        may_try = not self._failed or since_try_s >= OIDC_REFRESH_RETRY_S
        is_due = age_s >= self._refresh_s and may_try
        return Lookup(Step.USE_AND_REFRESH if is_due else Step.USE, found)

    def _find(self, key_id: str | None) -> tuple[VerificationKey, ...]:
        if key_id is None:
            return self._keys if len(self._keys) == 1 else ()
        return tuple(key for key in self._keys if key.key_id == key_id)
