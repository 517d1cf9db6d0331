"""The login of a connection: the role that it acts for, and the refreshes of its credentials.

| state | CONNECT | AUTH_RESPONSE | the credentials expire |
|---|---|---|---|
| WAITING | checked: CHECKING | refused | - |
| CHECKING | refused | refused | - |
| LOGGED_IN | refused | refused | AUTH_CHALLENGE: CHALLENGED |
| CHALLENGED | refused | checked: LOGGED_IN | closed at the next look |

A refusal ends the connection.  While CHALLENGED, the client's commands are served.
"""

import asyncio
import enum
from collections.abc import Callable
from typing import ClassVar, Final, Protocol

import structlog

from broker.wire.protocol_violation import ProtocolViolation
from magnetar.protocol.pulsar_pb2 import (
    AuthData,
    AuthMethod,
    BaseCommand,
    CommandAuthChallenge,
    CommandAuthResponse,
    CommandConnect,
)
from magnetar.protocol.server_error import PeerError, ServerError
from magnetar.protocol.state_table import StateTable
from security.authenticator import Authenticator, OriginalClient
from security.errors import CredentialsRefused, Refusal
from security.identity import Identity, Principal
from security.providers import Credentials

log = structlog.get_logger(__name__)
REFRESH: Final = b"PulsarAuthRefresh"
"""The challenge by which Pulsar asks for new credentials."""


class AuthenticationFailed(PeerError):
    """The credentials prove no role: check what the client sends.  The broker's log has the reason.

    The words are Pulsar's, and the same for every reason.
    """

    code: ClassVar[ServerError] = ServerError.AUTHENTICATION_ERROR

    def __init__(self) -> None:
        super().__init__("Failed to authenticate")


class LoginState(enum.Enum):
    """The state of a login: see the module."""

    WAITING = "waiting"
    CHECKING = "checking"
    LOGGED_IN = "logged in"
    CHALLENGED = "challenged"


_MOVES: StateTable[LoginState] = StateTable(
    {
        LoginState.WAITING: frozenset({LoginState.CHECKING}),
        LoginState.CHECKING: frozenset({LoginState.LOGGED_IN}),
        LoginState.LOGGED_IN: frozenset({LoginState.CHALLENGED}),
        LoginState.CHALLENGED: frozenset({LoginState.CHECKING}),
    },
    defect=RuntimeError,
)


class LoginHost(Protocol):
    """The connection of a login."""

    principal: Principal | None

    @property
    def address(self) -> str:
        """The peer's address, without a port."""
        ...

    def peer_certificate(self) -> bytes | None:
        """The verified certificate (DER) of the peer; None without one."""
        ...

    @property
    def server_version(self) -> str:
        """The name and version of this broker."""
        ...

    def send(self, command: BaseCommand) -> None:
        """Queue a command."""
        ...

    def close(self, why: str) -> None:
        """End the connection."""
        ...


class Login:
    """The login of one connection.  `now_s` is the wall clock in seconds since 1970."""

    def __init__(
        self,
        host: LoginHost,
        authenticator: Authenticator,
        *,
        check_interval_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self.state = LoginState.WAITING
        self._host = host
        self._authenticator = authenticator
        self._check_interval_s = check_interval_s
        self._now_s = now_s
        self._own: Identity
        self._original: OriginalClient | None = None
        self._can_refresh = False
        self._timer: asyncio.TimerHandle | None = None
        self.failure_logged = False
        """Whether the log has a line about the credentials that were refused."""

    async def log_in(self, request: CommandConnect) -> None:
        """Check the credentials of CONNECT, and set the connection's principal.

        Raises `AuthenticationFailed`.
        """
        self._move(LoginState.CHECKING)
        host = self._host
        credentials = Credentials(
            request.auth_method_name or _first_method(request),
            request.auth_data,
            host.peer_certificate(),
        )
        self._original = _original_client(request)
        try:
            self._own = await self._authenticator.authenticate(credentials, address=host.address)
            host.principal = await self._principal()
        except CredentialsRefused as error:
            self.failure_logged = error.reason is not Refusal.AUTH_REQUIRED
            raise AuthenticationFailed from error
        self._can_refresh = request.feature_flags.supports_auth_refresh
        self._logged_in()

    async def refresh(self, request: CommandAuthResponse) -> None:
        """Check the credentials of AUTH_RESPONSE, and take their expiry.

        Raises `ProtocolViolation` if no challenge is out, and `AuthenticationFailed`, also for
        credentials of another role.
        """
        if self.state is not LoginState.CHALLENGED:
            raise ProtocolViolation("AUTH_RESPONSE came without a challenge: wait for one.")
        self._move(LoginState.CHECKING)
        host, before = self._host, self._host.principal
        credentials = Credentials(
            request.response.auth_method_name, request.response.auth_data, host.peer_certificate()
        )
        try:
            if self._original is not None and self._original.credentials is not None:
                self._original = OriginalClient(self._original.principal, credentials)
            else:
                self._own = await self._authenticator.authenticate(
                    credentials, address=host.address
                )
            principal = await self._principal()
        except CredentialsRefused as error:
            raise AuthenticationFailed from error
        if before is None or principal.roles != before.roles:
            log.warning("login_refreshed_as_another_role", remote=host.address)
            raise AuthenticationFailed
        host.principal = principal
        self._logged_in()

    def handed_over(self) -> None:
        """Leave refreshes to the broker that the connection is forwarded to.

        It has the client's token or password; of a certificate it does not see the expiry.
        """
        principal = self._host.principal
        if principal is not None and principal.by_certificate:
            self._can_refresh = False
        else:
            self.stop()

    def stop(self) -> None:
        """Look at the expiry no more: the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _principal(self) -> Principal:
        return await self._authenticator.principal_of(
            self._own, self._original, address=self._host.address
        )

    def _logged_in(self) -> None:
        self._move(LoginState.LOGGED_IN)
        principal = self._host.principal
        assert principal is not None, "a login has a principal"
        # Refused logins are logged by the authenticator.
        method = principal.identity.method.value
        self._authenticator.audit.permitted(
            "login", principal.roles, self._host.address, method=method
        )
        if self._expires_at_s is not None and self._timer is None:
            self._look_again()

    @property
    def _expires_at_s(self) -> float | None:
        principal = self._host.principal
        return None if principal is None else principal.expires_at_s

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._check_interval_s, self._look)

    def _look(self) -> None:
        """Once an interval: ask for new credentials; end the connection if none have come."""
        self._timer = None
        expires_at_s = self._expires_at_s
        if self.state is LoginState.CHALLENGED:
            self._host.close("the client has not answered AUTH_CHALLENGE")
            return
        if expires_at_s is not None and expires_at_s <= self._now_s():
            if not self._refreshable:
                self._host.close("the credentials have expired, and cannot be refreshed")
                return
            if self.state is LoginState.LOGGED_IN:
                self._challenge()
        self._look_again()

    @property
    def _refreshable(self) -> bool:
        """Whether the client can send new credentials in place of those that have expired.

        A proxy cannot send new ones of its own.
        """
        principal = self._host.principal
        if not self._can_refresh or principal is None:
            return False
        if principal.proxy is None:
            return True
        forwarded = self._original is not None and self._original.credentials is not None
        return forwarded and not principal.proxy.expired(self._now_s())

    def _challenge(self) -> None:
        self._move(LoginState.CHALLENGED)
        principal = self._host.principal
        assert principal is not None, "nothing expires without a principal"
        challenge = CommandAuthChallenge(
            server_version=self._host.server_version,
            challenge=AuthData(auth_method_name=principal.identity.method.value, auth_data=REFRESH),
        )
        self._host.send(BaseCommand(type=BaseCommand.AUTH_CHALLENGE, auth_challenge=challenge))

    def _move(self, to: LoginState) -> None:
        self.state = _MOVES.move(self.state, to, "A login")


def _first_method(request: CommandConnect) -> str:
    """The method that a client of the first protocol names, by a number: as Pulsar spells it."""
    return AuthMethod.Name(request.auth_method).removeprefix("AuthMethod").lower()


def _original_client(request: CommandConnect) -> OriginalClient | None:
    named = request.original_principal if request.HasField("original_principal") else None
    forwarded = None
    if request.HasField("original_auth_data"):
        forwarded = Credentials(request.original_auth_method, request.original_auth_data.encode())
    if named is None and forwarded is None:
        return None
    return OriginalClient(named, forwarded)
