"""The hook for authentication with bookies, and the exchange of its messages.  Pure.

The messages are the first on a connection, after TLS if there is any.  A bookie that rejects one
sends nothing more, or closes the connection; the reason is in its own log.
"""

from collections.abc import Callable
from typing import Final, Protocol

from config.bounds import BOOKIE_AUTH_ROUNDS
from storage.ledger.bookkeeper.wire import decode_auth, encode_auth
from storage.ledger.store import LedgerError

_DISABLED: Final = "AuthDisabledPlugin"


class BookieAuthenticationFailed(LedgerError):
    """Authentication between this client and a bookie failed."""


class AuthProvider(Protocol):
    """The client's side of one connection's authentication.

    Its methods are called on the event loop and must not block.
    """

    @property
    def plugin_name(self) -> str:
        """The name of the method on both sides."""

    def first(self) -> bytes:
        """The first message."""

    def answer(self, payload: bytes) -> bytes | None:
        """The answer to a message of the bookie, None at the end.

        Raises `BookieAuthenticationFailed` if the bookie is not to be trusted.
        """


NewAuthProvider = Callable[[], AuthProvider]
"""Makes the provider of a new connection.  Called in a thread, so that it may read files."""


class AuthExchange:
    """The frames of one authentication."""

    def __init__(self, provider: AuthProvider) -> None:
        self._provider = provider
        self._rounds = 0

    def first_frame(self) -> bytes:
        """The frame with the first message."""
        return encode_auth(self._provider.plugin_name, self._provider.first())

    def next_frame(self, payload: bytes) -> bytes | None:
        """The frame after an answer with this payload, None at the end.

        Raises `BookieAuthenticationFailed`, `MalformedReply`.
        """
        plugin, message = decode_auth(payload)
        name = self._provider.plugin_name
        if plugin == _DISABLED:  # the answer of a bookie without authentication
            return None
        if plugin != name:
            raise BookieAuthenticationFailed(
                f"A bookie authenticates by {plugin!r} and this client by {name!r}: configure the "
                "same plugin on both."
            )
        answer = self._provider.answer(message)
        if answer is None:
            return None
        self._rounds += 1
        if self._rounds == BOOKIE_AUTH_ROUNDS:
            raise BookieAuthenticationFailed(
                f"Authentication by {name!r} did not end after {self._rounds} messages: check the "
                "credentials on both sides."
            )
        return encode_auth(name, answer)
