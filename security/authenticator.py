"""Authentication: the identity of a peer, and the principal that its connection or request is for.

The `Authenticator` asks the providers of the method that the peer names, in the order of the
settings.  Credentials that are refused by all are refused: the anonymous role is for peers that
send none at all.  The answer to a failed login is held back (`failed_logins`).

A proxy connects with credentials of its own and names the role of its client, the original
principal; it may forward the client's credentials too.  Rules, kept for binary connections and for
REST alike, whether authorisation is on or not:

P1. A role in `proxy_roles` must name an original principal, which is no role of a proxy.
P2. Another role may name none, and forward no credentials.  Its own role is as good as none.
P3. With `authenticate_original_client` the proxy must forward the client's credentials, the
    original principal is the role that they prove, and one that was named must be the same.
P4. No original principal means anything special.  (Pulsar takes one from every role, for its
    WebSocket proxy.)
P5. What is done behind a proxy must be allowed to both roles.
P6. Brokers of this cluster may name a client, or none: one that shows a certificate to the broker
    that forwards it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from config.bounds import EXPIRING_TOKEN_MINUTES
from security.audit import AuditLog
from security.errors import CredentialsRefused, Refusal
from security.failed_logins import FailedLogins
from security.identity import (
    ANONYMOUS_METHODS,
    Identity,
    InvalidRole,
    Method,
    Principal,
    Role,
    role_of,
)
from security.loaded_files import LoadedFiles
from security.providers import Credentials, Provider

log = structlog.get_logger(__name__)

ANONYMOUS: Final = "anonymous"
"""The name that counters have for logins without credentials, which no provider checks."""
PROXY: Final = "proxy"
"""The name that counters have for proxies, and others, that name a client they may not name."""
_CHALLENGES: Final = {
    Method.TOKEN: 'Bearer realm="magnetar"',
    Method.BASIC: 'Basic realm="magnetar", charset="UTF-8"',
}


@dataclass(frozen=True, slots=True)
class OriginalClient:
    """A proxy's word about its client.

    `principal` is the role that it names, None or empty without one; `credentials` are those that
    the client sent to the proxy, None unless they are forwarded.
    """

    principal: str | None = None
    credentials: Credentials | None = None


class AuthenticationCounters:
    """Counts of logins since the start.  Keys are names from the program; none is from a peer."""

    def __init__(self) -> None:
        self.successes: dict[tuple[str, Method], int] = {}
        """By provider and method."""
        self.failures: dict[tuple[str, Method, Refusal], int] = {}
        """By provider, method and reason."""
        self.expired = 0
        """Failures because the credentials had expired."""
        self.minutes_left = [0] * (len(EXPIRING_TOKEN_MINUTES) + 1)
        """Successes by the time for which the credentials are valid: up to each bound of
        EXPIRING_TOKEN_MINUTES, and longer.  Credentials that never expire are left out."""
        self.minutes_left_sum = 0.0

    def succeeded(self, provider: str, identity: Identity, now_s: float) -> None:
        """Count a login."""
        key = provider, identity.method
        self.successes[key] = self.successes.get(key, 0) + 1
        if identity.expires_at_s is None:
            return
        minutes = max(0.0, identity.expires_at_s - now_s) / 60
        place = sum(minutes > bound for bound in EXPIRING_TOKEN_MINUTES)
        self.minutes_left[place] += 1
        self.minutes_left_sum += minutes

    def failed(self, provider: str, method: Method, error: CredentialsRefused) -> None:
        """Count a login that a provider has refused."""
        key = provider, method, error.reason
        self.failures[key] = self.failures.get(key, 0) + 1
        self.expired += error.expired


class Authenticator:
    """Finds out who a peer is.

    `now_s` is the wall clock in seconds since 1970.  `files` are those of the providers; `closers`
    are called by `close`; `sleep` holds answers back.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        *,
        failed_logins: FailedLogins,
        now_s: Callable[[], float],
        audit: AuditLog | None = None,
        anonymous_role: Role | None = None,
        proxy_roles: frozenset[Role] = frozenset(),
        authenticate_original_client: bool = False,
        files: Sequence[LoadedFiles] = (),
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._providers = tuple(providers)
        self._anonymous_role = anonymous_role
        self._proxy_roles = proxy_roles
        self._authenticates_original = authenticate_original_client
        self._broker_roles: set[Role] = set()
        self._now_s = now_s
        self._closers = closers
        self._sleep = sleep
        self.counters = AuthenticationCounters()
        self.failed_logins = failed_logins
        self.audit = AuditLog(time.monotonic) if audit is None else audit
        """The audit log of the broker."""
        self.files = tuple(files)
        """Files to be loaded again when they have changed."""

    @property
    def enabled(self) -> bool:
        """Whether authentication is on; if not, no login succeeds, so none is to be asked for."""
        return bool(self._providers)

    @property
    def challenges(self) -> tuple[str, ...]:
        """The values of the header WWW-Authenticate of an answer 401."""
        methods = dict.fromkeys(provider.method for provider in self._providers)
        return tuple(_CHALLENGES[method] for method in methods if method in _CHALLENGES)

    @property
    def anonymous(self) -> Identity | None:
        """The identity of peers that send no credentials; None if they are refused."""
        if self._anonymous_role is None or not self.enabled:
            return None
        return Identity(self._anonymous_role, Method.NONE)

    async def close(self) -> None:
        """Close the providers."""
        for close in self._closers:
            await close()

    def trust_broker(self, role: Role) -> None:
        """Let a role, that of the brokers of this cluster, name the clients that it acts for."""
        self._broker_roles.add(role)

    async def authenticate(self, credentials: Credentials, *, address: str) -> Identity:
        """Return the identity that credentials prove; `address` is the peer's, without a port.

        A refusal is counted, logged within bounds and held back, except that of a peer without
        credentials, which guesses nothing: probes and scrapes are such.  Raises
        `CredentialsRefused`.
        """
        try:
            return await self._prove(replace(credentials, address=address))
        except CredentialsRefused as error:
            if error.reason is not Refusal.AUTH_REQUIRED:
                await self._hold_back(credentials.method, address, error)
            raise

    async def principal_of(
        self, own: Identity, original: OriginalClient | None, *, address: str
    ) -> Principal:
        """Return the principal of a connection or request.

        `own` is the identity that its own credentials have proved, `original` the proxy's word if
        it is from one, `address` that of the connection.  Raises `CredentialsRefused`.
        """
        named = (original and original.principal) or None
        forwarded = None if original is None else original.credentials
        if own.role in self._proxy_roles:
            identity = await self._original(own, named, forwarded, address)
            return Principal(identity, proxy=own)  # P5
        if own.role in self._broker_roles and named not in (None, own.role):
            # P6: the other broker has checked the client's certificate itself.
            return Principal(self._named_by_broker(own, named, address), proxy=own)
        if named not in (None, own.role) or forwarded is not None:  # P2, P4
            raise self._invalid_roles(
                own, address, "A role that is not in proxy_roles names a client behind it."
            )
        return Principal(own)

    def _named_by_broker(self, own: Identity, named: str, address: str) -> Identity:
        try:
            role = role_of(named)
        except InvalidRole as error:
            detail = f"A broker names a client whose role is none. {error}"
            raise self._invalid_roles(own, address, detail) from error
        if role in self._proxy_roles or role in self._broker_roles:
            raise self._invalid_roles(own, address, "A broker names a proxy or broker as a client.")
        return Identity(role, own.method, own.expires_at_s)

    async def _original(
        self, own: Identity, named: str | None, forwarded: Credentials | None, address: str
    ) -> Identity:
        """The identity of the client of a proxy."""
        role = None
        if named is not None:
            try:
                role = role_of(named)
            except InvalidRole as error:
                detail = f"The original principal is no role. {error}"
                raise self._invalid_roles(own, address, detail) from error
        if self._authenticates_original:  # P3
            if forwarded is None:
                raise self._invalid_roles(
                    own, address, "The proxy forwards no credentials of its client."
                )
            # Failures count for the client that is named: those of one must not stop all clients
            # of the proxy.  The certificate of the connection is the proxy's own.
            client_address = f"{address} {named or ''}"
            identity = await self.authenticate(
                replace(forwarded, certificate=None), address=client_address
            )
            if role not in (None, identity.role):
                raise self._invalid_roles(
                    own, address, "The proxy names another client than its credentials prove."
                )
        elif role is None:  # P1
            raise self._invalid_roles(own, address, "The proxy names no original principal.")
        else:
            identity = Identity(role, own.method, own.expires_at_s)
        if identity.role in self._proxy_roles:  # P1
            raise self._invalid_roles(
                own, address, "The proxy names the role of a proxy as that of its client."
            )
        return identity

    def _invalid_roles(self, own: Identity, address: str, detail: str) -> CredentialsRefused:
        """The error for a pair of roles that is refused, counted and logged."""
        error = CredentialsRefused(Refusal.INVALID_ROLES, detail)
        self.counters.failed(PROXY, own.method, error)
        log.warning("original_client_refused", role=own.role, address=address, detail=detail)
        return error

    async def _prove(self, credentials: Credentials) -> Identity:
        providers = [each for each in self._providers if each.method == credentials.method]
        if not providers:
            return self._anonymous(credentials)
        refusals: list[tuple[Provider, CredentialsRefused]] = []
        for provider in providers:
            try:
                identity = await provider.authenticate(credentials)
            except CredentialsRefused as error:
                # With its traceback it would refer to this frame, and stay until a garbage
                # collection, together with the connection and what that has sent.
                refusals.append((provider, error.with_traceback(None)))
            else:
                self.counters.succeeded(provider.name, identity, self._now_s())
                return identity
        for provider, refusal in refusals:
            self.counters.failed(provider.name, provider.method, refusal)
        raise _joined(refusals)

    def _anonymous(self, credentials: Credentials) -> Identity:
        without = credentials.method in ANONYMOUS_METHODS and not credentials.data
        if without and (identity := self.anonymous) is not None:
            self.counters.succeeded(ANONYMOUS, identity, self._now_s())
            return identity
        refused = (
            CredentialsRefused(
                Refusal.AUTH_REQUIRED, "There are no credentials, and no anonymous_role is set."
            )
            if without
            else CredentialsRefused(
                Refusal.UNSUPPORTED_METHOD,
                "No provider of authentication_providers serves the method.",
            )
        )
        self.counters.failed(ANONYMOUS, Method.NONE, refused)
        try:
            raise refused
        finally:
            # The error refers to this frame: with the name both would stay until a collection.
            del refused

    async def _hold_back(self, method: str, address: str, error: CredentialsRefused) -> None:
        answer = self.failed_logins.failed(address, password=method == Method.BASIC)
        if answer.not_logged_before is not None:
            self.audit.failed_login(
                address,
                # Any other name is a text of the peer.
                method=method if method in set(Method) else "other",
                reason=error.reason,
                detail=str(error),
                failures_not_logged_before=answer.not_logged_before,
            )
        await self._sleep(answer.delay_s)


def _joined(refusals: Sequence[tuple[Provider, CredentialsRefused]]) -> CredentialsRefused:
    """The error of the refusals of all providers of a method."""
    # An expired token is for one of the providers; the other one just does not know its key.
    _, shown = next((each for each in refusals if each[1].expired), refusals[-1])
    details = str(shown)
    if len(refusals) > 1:
        details = "; ".join(f"{provider.name}: {refusal}" for provider, refusal in refusals)
    return CredentialsRefused(shown.reason, details, expired=shown.expired)
