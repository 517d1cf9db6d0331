"""The hook for authentication with bookies, and the exchange around it.  Pure.

Rules:

- Messages of authentication go before anything else on a connection, after TLS if there is any.
- A bookie without authentication says so with the plugin `AuthDisabledPlugin`: that ends it well.
- A bookie that does not accept what it gets says nothing any more, or closes the connection: the
  reason is in its own log.
"""

from collections.abc import Callable
from typing import Final, Protocol

from config.bounds import BOOKIE_AUTH_ROUNDS
from storage.ledger.bookkeeper.wire import decode_auth, encode_auth
from storage.ledger.store import LedgerError

_DISABLED: Final = "AuthDisabledPlugin"


class BookieAuthenticationFailed(LedgerError):
    """This client and a bookie could not agree on who they are."""


class AuthProvider(Protocol):
    """One side of one connection's authentication.

    It is asked on the event loop and must not block.
    """

    @property
    def plugin_name(self) -> str:
        """The name that both sides know the method by."""

    def first(self) -> bytes:
        """What to begin with."""

    def answer(self, payload: bytes) -> bytes | None:
        """What to say to what the bookie said, None when all is said.

        Raises `BookieAuthenticationFailed` if the bookie is not to be trusted.
        """


NewAuthProvider = Callable[[], AuthProvider]
"""Makes the provider of a new connection.  Called on a thread, so that it may read files."""


class AuthExchange:
    """The frames of one authentication."""

    def __init__(self, provider: AuthProvider) -> None:
        self._provider = provider
        self._rounds = 0

    def first_frame(self) -> bytes:
        """The frame that begins it."""
        return encode_auth(self._provider.plugin_name, self._provider.first())

    def next_frame(self, payload: bytes) -> bytes | None:
        """The frame after an answer with this payload, None when it is done.

        Raises `BookieAuthenticationFailed`, `MalformedReply`.
        """
        plugin, said = decode_auth(payload)
        name = self._provider.plugin_name
        if plugin == _DISABLED:
            return None
        if plugin != name:
            raise BookieAuthenticationFailed(
                f"A bookie authenticates by {plugin!r} and this client by {name!r}: configure the "
                "same plugin on both."
            )
        answer = self._provider.answer(said)
        if answer is None:
            return None
        self._rounds += 1
        if self._rounds == BOOKIE_AUTH_ROUNDS:
            raise BookieAuthenticationFailed(
                f"Authentication by {name!r} did not end after {self._rounds} messages: check the "
                "credentials on both sides."
            )
        return encode_auth(name, answer)
