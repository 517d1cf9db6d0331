"""Tokens (JWT, RFC 7519) in the compact form of JWS (RFC 7515).  Pure.

A token is read once, within bounds, and then tried with each key that fits its algorithm.  Rules:

K1. The algorithm is one that fits the key (`token_keys`).  No key fits `none`, in any spelling.
K2. A header that has `crit` is refused: it names what must be understood, and nothing is.
K3. Claims are read after the signature was found valid.
K4. JSON is that of its standard: no name twice, no `NaN`.
K5. Nothing in a token raises anything but `CredentialsRefused`, and its detail has none of it.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import jwt

from config.bounds import TOKEN_BYTES
from security.errors import CredentialsRefused, Refusal
from security.identity import Identity, InvalidRole, Method, Role, role_of
from security.token_keys import ALGORITHMS, SigningKey, TokenKeys, VerificationKey

_COMPACT: Final = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_BLANKS: Final = b" \t\r\n"
_LATEST_S: Final = 2.0**53
"""The last time that is taken: whole seconds are exact in a float up to it."""
RESERVED_HEADERS: Final = frozenset({"alg", "b64", "crit", "zip"})
"""Names of a header that change how a token is read."""


@dataclass(frozen=True, slots=True)
class SignedToken:
    """A token that was read, and not yet verified."""

    header: Mapping[str, object]
    algorithm: str
    """One of `ALGORITHMS`."""
    key_id: str | None
    payload: bytes = field(repr=False)
    signed: bytes = field(repr=False)
    """The bytes that the signature is of."""
    signature: bytes = field(repr=False)

    def claims(self) -> Mapping[str, object]:
        """The claims.  Raises `CredentialsRefused` if they are no JSON object."""
        return _json_object(self.payload, "claims")


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Requirements of claims.

    `role_claim` is the claim that has the role: a text, or a list of which the first one counts.
    With `audience_claim` that claim must be `audience`, or a list that has it.  Times may be off by
    `clock_skew_s`.
    """

    role_claim: str = "sub"
    audience_claim: str | None = None
    audience: str | None = None
    clock_skew_s: float = 0.0


class TokenChecker:
    """Checks tokens that are signed with one of some keys."""

    def __init__(self, keys: TokenKeys, rules: TokenRules) -> None:
        self._keys = keys
        self._rules = rules

    def check(self, data: bytes, now_s: float) -> Identity:
        """Return the identity that a token proves at a time of the wall clock, in seconds.

        The identity expires when the token does, later by the clock skew.  Raises
        `CredentialsRefused` alone.
        """
        claims, expires_at_s = verified_claims(data, self._keys, now_s, self._rules.clock_skew_s)
        _require_audience(claims, self._rules)
        return Identity(role_of_claims(claims, self._rules.role_claim), Method.TOKEN, expires_at_s)


def parse_token(data: bytes) -> SignedToken:
    """Read a token; blanks and newlines around it do not count.  Raises `CredentialsRefused`."""
    parts = _split(data)
    header = _json_object(_base64url(parts[1]), "header")
    if "crit" in header:  # K2
        raise _refused("The header has `crit`.")
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in ALGORITHMS:  # K1
        raise _refused("The header names no algorithm that is taken.")
    return SignedToken(
        header,
        str(algorithm),
        key_id if isinstance(key_id, str) else None,
        _base64url(parts[2]),
        parts.string[: parts.end(2)],
        _base64url(parts[3]),
    )


def decode_unverified(data: bytes) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The header and claims of a token that may be forged, for people to read.

    Raises `CredentialsRefused` if they cannot be read.
    """
    parts = _split(data)
    header, claims = _base64url(parts[1]), _base64url(parts[2])
    return _json_object(header, "header"), _json_object(claims, "claims")


def verifies(token: SignedToken, keys: Iterable[VerificationKey]) -> bool:
    """Whether the signature is of one of the keys, as far as the algorithm fits them."""
    # Names of `ALGORITHMS` are known to the library, which raises otherwise.
    algorithm = jwt.get_algorithm_by_name(token.algorithm)
    return any(
        algorithm.verify(token.signed, key.material, token.signature)
        for key in keys
        if token.algorithm in key.algorithms  # K1
    )


def verified_claims(
    data: bytes, keys: TokenKeys, now_s: float, clock_skew_s: float = 0.0
) -> tuple[Mapping[str, object], float | None]:
    """The claims of a token of one of the keys, and when it expires, in seconds; None is never.

    Raises `CredentialsRefused`.
    """
    token = parse_token(data)
    candidates = keys.candidates(token.algorithm, token.key_id)
    if not candidates:
        raise _refused(f"No key is for the algorithm {token.algorithm}.")
    if not verifies(token, candidates):
        raise _refused(f"No key has signed it ({token.algorithm}, {len(candidates)} tried).")
    claims = token.claims()  # K3
    return claims, require_valid_time(claims, now_s, clock_skew_s)


def require_valid_time(
    claims: Mapping[str, object], now_s: float, clock_skew_s: float = 0.0
) -> float | None:
    """Compare `exp` and `nbf` with the time; return when the token expires, or None.

    Raises `CredentialsRefused`.
    """
    not_before_s, expires_s = _time(claims, "nbf"), _time(claims, "exp")
    if not_before_s is not None and now_s + clock_skew_s < not_before_s:
        raise _refused(f"It is valid in {not_before_s - now_s:.0f} s.")
    if expires_s is None:
        return None
    expires_s += clock_skew_s
    if now_s >= expires_s:
        raise _refused(f"It expired {now_s - expires_s:.0f} s ago.", expired=True)
    return expires_s


def create_token(
    key: SigningKey,
    claims: Mapping[str, object],
    *,
    algorithm: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Sign a token; its header has `alg` and what is in `headers`.

    Raises ValueError if the algorithm does not fit the key, or a header is reserved.
    """
    chosen = algorithm or key.algorithms[0]
    if chosen not in key.algorithms:
        raise ValueError(
            f"The algorithm {chosen} does not fit the key: use {' or '.join(key.algorithms)}."
        )
    if reserved := RESERVED_HEADERS & set(headers or ()):
        raise ValueError(f"The header {min(reserved)!r} cannot be set: leave it out.")
    payload = json.dumps(claims, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # The library adds `typ` unless it is empty; Pulsar's tools write none.
    return jwt.PyJWS().encode(
        payload, key.material, algorithm=chosen, headers={"typ": "", **(headers or {})}
    )


def _refused(
    detail: str, *, reason: Refusal = Refusal.INVALID_TOKEN, expired: bool = False
) -> CredentialsRefused:
    return CredentialsRefused(reason, detail, expired=expired)


def _require_audience(claims: Mapping[str, object], rules: TokenRules) -> None:
    if rules.audience_claim is None:
        return
    value = claims.get(rules.audience_claim)
    audiences = value if isinstance(value, list) else [value]
    if rules.audience is None or rules.audience not in audiences:
        raise _refused("It is for another audience.", reason=Refusal.INVALID_AUDIENCES)


def role_of_claims(claims: Mapping[str, object], name: str) -> Role:
    """The role in a claim: a text, or a list of which the first one counts.

    Raises `CredentialsRefused`.
    """
    value = claims.get(name)
    if isinstance(value, list):
        value = next(iter(value), None)
    if not isinstance(value, str):
        raise _refused(f"The claim {name} has no role.", reason=Refusal.INVALID_ROLE)
    try:
        return role_of(value)
    except InvalidRole as error:
        raise _refused(str(error), reason=Refusal.INVALID_ROLE) from None


def _time(claims: Mapping[str, object], name: str) -> float | None:
    """A time in seconds since 1970; None if there is no such claim."""
    if name not in claims:
        return None
    value = claims[name]
    # A bool is an int, and a float may be infinite: 1e999 is.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(f"The claim {name} is no number.")
    if not 0 <= value <= _LATEST_S:
        raise _refused(f"The claim {name} is no time.")
    return float(value)


def _split(data: bytes) -> re.Match[bytes]:
    if len(data) > TOKEN_BYTES:
        raise _refused(
            f"The token is longer than {TOKEN_BYTES} bytes.", reason=Refusal.INVALID_AUTH_DATA
        )
    compact = data.strip(_BLANKS)
    if not compact:
        raise _refused("There is no token.", reason=Refusal.INVALID_AUTH_DATA)
    found = _COMPACT.fullmatch(compact)
    if found is None:
        raise _refused("The token is not three parts of base64url with dots between them.")
    return found


def _base64url(part: bytes) -> bytes:
    try:
        return base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except binascii.Error:
        raise _refused("A part of the token is damaged base64url.") from None


def _json_object(data: bytes, what: str) -> dict[str, object]:
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError):
        # ValueError is of UTF-8, JSON, K4, and of numbers with thousands of digits.  Not chained
        # (K5), as the error has the text.
        raise _refused(f"The {what} of the token are no JSON that is taken.") from None
    if not isinstance(value, dict):
        raise _refused(f"The {what} of the token are no JSON object.")
    return value


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")
