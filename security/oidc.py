"""The provider of tokens by OpenID Connect: the method `token`.

It fetches the keys of issuers over HTTP, within bounds of size and time and without following
redirects.  One fetch of an issuer runs at a time, and all logins that need it wait for it.
`oidc_keys` decides when keys are fetched.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import aiohttp
import structlog

from config.bounds import (
    OIDC_CONNECT_S,
    OIDC_DISCOVERY_BYTES,
    OIDC_FETCH_S,
    OIDC_KEYS_BYTES,
)
from magnetar.background_tasks import BackgroundTasks
from security.errors import CredentialsRefused, Refusal
from security.identity import Identity, Method
from security.oidc_keys import (
    InvalidIssuer,
    IssuerKeys,
    Lookup,
    Step,
    discovery_url,
    keys_url,
    parse_keys,
)
from security.providers import Credentials
from security.token_keys import PAIR_ALGORITHMS, VerificationKey
from security.tokens import SignedToken, parse_token, require_valid_time, role_of_claims, verifies

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OidcRules:
    """The settings of the provider.

    A token must be for one of `audiences`, by one of `issuers`.  `role_claim` is the claim that has
    the role: a text, or a list of which the first one counts.
    """

    issuers: frozenset[str]
    audiences: frozenset[str]
    role_claim: str = "sub"
    require_https: bool = True
    clock_skew_s: float = 0.0
    key_cache_s: float = 64_800
    unknown_key_refresh_s: float = 300


class OidcProvider:
    """Checks tokens that issuers have signed.

    `now_s` is the wall clock in seconds since 1970, `monotonic_s` a monotonic one.  `tls` has the
    authorities that issuers are checked by.  Close it in the end.
    """

    name: Final = "oidc"
    method: Final = Method.TOKEN

    def __init__(
        self,
        rules: OidcRules,
        tls: ssl.SSLContext,
        *,
        now_s: Callable[[], float],
        monotonic_s: Callable[[], float],
        fetch_s: float = OIDC_FETCH_S,
    ) -> None:
        self._rules = rules
        self._fetch_s = fetch_s
        self._tls = tls
        self._now_s = now_s
        self._monotonic_s = monotonic_s
        self._issuers = {
            issuer: IssuerKeys(
                refresh_s=rules.key_cache_s, unknown_key_refresh_s=rules.unknown_key_refresh_s
            )
            for issuer in rules.issuers
        }
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks(log, failure_event="oidc_fetch_failed")

    def use(self, tls: ssl.SSLContext) -> None:
        """Check issuers by other authorities from the next fetch on."""
        self._tls = tls

    async def close(self) -> None:
        """End the fetches that run."""
        await self._tasks.stop()

    async def authenticate(self, credentials: Credentials) -> Identity:
        """Return the identity that a token proves.  Raises `CredentialsRefused`.

        It expires when the token does, later by the clock skew.
        """
        token = _parse(credentials.data)
        claims = _claims(token)
        issuer = claims.get("iss")
        if not isinstance(issuer, str) or issuer not in self._issuers:  # O1 of `oidc_keys`
            raise CredentialsRefused(
                Refusal.UNSUPPORTED_ISSUER, "The issuer of the token is not in oidc_issuers."
            )
        # Once before a fetch that may be for nothing, and once after it, as that takes time.
        self._identity(claims)
        keys = await self._keys(issuer, token.key_id)
        if not any(token.algorithm in key.algorithms for key in keys):
            raise CredentialsRefused(
                Refusal.ALGORITHM_MISMATCH,
                f"The key of the token is not for the algorithm {token.algorithm}.",
            )
        if not verifies(token, keys):
            raise CredentialsRefused(
                Refusal.ERROR_VERIFYING_JWT_SIGNATURE, "The issuer's key has not signed the token."
            )
        return self._identity(claims)

    def _identity(self, claims: Mapping[str, object]) -> Identity:
        """The identity of claims whose signature is checked elsewhere."""
        rules, now_s = self._rules, self._now_s()
        try:
            expires_at_s = require_valid_time(claims, now_s, rules.clock_skew_s)
        except CredentialsRefused as error:
            reason = Refusal.EXPIRED_JWT if error.expired else Refusal.INVALID_JWT_CLAIM
            raise CredentialsRefused(reason, str(error), expired=error.expired) from None
        issued_s, subject = claims.get("iat"), claims.get("sub")
        if expires_at_s is None or not isinstance(subject, str) or not subject:
            raise _invalid_claim("The token lacks the claim exp or sub.")
        if isinstance(issued_s, bool) or not isinstance(issued_s, int | float):
            raise _invalid_claim("The token lacks the claim iat, or it is no number.")
        if not issued_s <= now_s + rules.clock_skew_s:
            raise _invalid_claim("The token was issued in the future: compare the clocks.")
        audience = claims.get("aud")
        listed = audience if isinstance(audience, list) else [audience]
        if not any(isinstance(each, str) and each in rules.audiences for each in listed):
            raise CredentialsRefused(
                Refusal.INVALID_AUDIENCES, "The token is for none of oidc_audiences."
            )
        return Identity(role_of_claims(claims, rules.role_claim), self.method, expires_at_s)

    async def _keys(self, issuer: str, key_id: str | None) -> tuple[VerificationKey, ...]:
        lookup = self._lookup(issuer, key_id)
        if lookup.step is Step.FETCH:
            # The fetch goes on if this login is cancelled: others wait for it too.
            await asyncio.shield(self._fetch(issuer))
            lookup = self._lookup(issuer, key_id)
        if lookup.step is Step.USE_AND_REFRESH:
            self._fetch(issuer)
        if lookup.keys:
            return lookup.keys
        if lookup.step is Step.UNKNOWN_KEY:
            raise CredentialsRefused(
                Refusal.INVALID_PUBLIC_KEY, "The issuer has no key with the key id of the token."
            )
        raise CredentialsRefused(
            Refusal.ERROR_RETRIEVING_PUBLIC_KEY,
            "The keys of the issuer could not be fetched: see the log for oidc_keys_not_fetched.",
        )

    def _lookup(self, issuer: str, key_id: str | None) -> Lookup:
        return self._issuers[issuer].lookup(key_id, self._monotonic_s())

    def _fetch(self, issuer: str) -> asyncio.Task[None]:
        """The fetch of an issuer that runs, or a new one.  Its failure is noted, not raised."""
        running = self._fetches.get(issuer)
        if running is None or running.done():
            running = self._tasks.start(self._fetch_once(issuer), f"fetch of keys by {issuer}")
            self._fetches[issuer] = running
        return running

    async def _fetch_once(self, issuer: str) -> None:
        known = self._issuers[issuer]
        try:
            async with asyncio.timeout(self._fetch_s):
                keys = await fetch_keys(issuer, self._tls, require_https=self._rules.require_https)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            known.failed(self._monotonic_s())
            # An error of the library names the host, and a certificate's fault; a timeout nothing.
            reason = str(error) or f"no answer within {self._fetch_s:g} s"
            log.warning("oidc_keys_not_fetched", issuer=issuer, reason=reason)
        else:
            known.fetched(keys, self._monotonic_s())
            log.info("oidc_keys_fetched", issuer=issuer, keys=len(keys))


async def fetch_keys(
    issuer: str, tls: ssl.SSLContext, *, require_https: bool
) -> tuple[VerificationKey, ...]:
    """Fetch the discovery document and the keys of an issuer.

    The caller bounds the time.  Raises `InvalidIssuer`, and errors of aiohttp and of sockets.
    """
    # A session for each fetch: they are hours apart, and no connection waits meanwhile.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls, limit=1),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(sock_connect=OIDC_CONNECT_S),
        headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        auto_decompress=False,
    ) as session:
        document = await _get(session, discovery_url(issuer), OIDC_DISCOVERY_BYTES)
        url = keys_url(document, issuer, require_https=require_https)
        return parse_keys(await _get(session, url, OIDC_KEYS_BYTES))


async def _get(session: aiohttp.ClientSession, url: str, limit_bytes: int) -> bytes:
    async with session.get(url, allow_redirects=False) as response:
        if response.status != HTTPStatus.OK:
            # A redirect too: it could lead to a host that nobody has allowed.
            raise InvalidIssuer(f"{url} answers with the status {response.status}, not 200.")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit_bytes:
                raise InvalidIssuer(f"The answer of {url} is longer than {limit_bytes} bytes.")
        return bytes(body)


def _parse(data: bytes) -> SignedToken:
    try:
        token = parse_token(data)
    except CredentialsRefused as error:
        raise CredentialsRefused(Refusal.ERROR_DECODING_JWT, str(error)) from None
    if token.algorithm not in PAIR_ALGORITHMS:
        raise CredentialsRefused(
            Refusal.UNSUPPORTED_ALGORITHM,
            f"The algorithm {token.algorithm} is for secrets, which issuers do not share.",
        )
    return token


def _claims(token: SignedToken) -> Mapping[str, object]:
    try:
        return token.claims()
    except CredentialsRefused as error:
        raise CredentialsRefused(Refusal.ERROR_DECODING_JWT, str(error)) from None


def _invalid_claim(detail: str) -> CredentialsRefused:
    return CredentialsRefused(Refusal.INVALID_JWT_CLAIM, detail)
