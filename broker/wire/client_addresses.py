"""The connections of the binary protocol by the addresses of their clients, and their bounds.

The one place where these bounds are compared: when a socket is accepted, when a TLS handshake
begins, and when a connection does.
"""

from typing import Protocol

import structlog

from broker.wire.tls_handshakes import Handshakes
from security.addresses import address_key

log = structlog.get_logger(__name__)


class Client(Protocol):
    """A connection of a client."""

    def abort(self, why: str) -> None:
        """End the connection at once; `why` is for the log."""
        ...


class ClientAddresses:
    """Bounds the connections, in all and of one address, and knows which have not logged in.

    A connection logs in by CONNECT.  When the broker has as many connections as it may have, TLS
    handshakes included, a new one replaces a handshake that waits for its peer, or else a
    connection that has not logged in, so that silent clients do not lock out others.  An address of
    IPv6 counts as its network of 64 bits.
    """

    def __init__(self, most_of_address: int | None, most: int) -> None:
        """Bound all connections to `most`, and those of one address; None: to any number."""
        self.handshakes = Handshakes(self._admits_handshake)
        """The TLS handshakes of the port with TLS."""
        self._most_of_address = most_of_address
        self._most = most
        self._addresses: dict[Client, str] = {}
        self._counts: dict[str, int] = {}
        self._before_login: dict[str, dict[Client, None]] = {}
        """Those that have not logged in, by address, oldest first."""

    def __len__(self) -> int:
        return len(self._addresses)

    def admits_one(self) -> bool:
        """Whether there may be a connection more; it may end another one for that."""
        if self._has_room(len(self.handshakes)) or self.handshakes.make_room() or self.make_room():
            return True
        log.warning("connection_limit_reached", max_connections=self._most)
        return False

    def add(self, client: Client, address: str) -> bool:
        """Add a new connection; False if it must end, as there are too many, or of its address."""
        # The server asks before: but all that it accepts in one turn come here after that turn.
        if not self.admits_one():
            return False
        key = address_key(address)
        count = self._counts.get(key, 0)
        if self._most_of_address is not None and count >= self._most_of_address:
            log.warning(
                "connections_of_address_limit_reached",
                address=key,
                max_connections_per_address=self._most_of_address,
            )
            return False
        self._addresses[client] = key
        self._counts[key] = count + 1
        self._before_login.setdefault(key, {})[client] = None
        return True

    def logged_in(self, client: Client) -> None:
        """Note that a connection has logged in, or that the broker asks for no credentials."""
        key = self._addresses.get(client)
        if key is not None:
            self._forget_before_login(client, key)

    def discard(self, client: Client) -> None:
        """Forget a connection that has ended.  Unknown ones are ignored."""
        key = self._addresses.pop(client, None)
        if key is None:
            return
        self._forget_before_login(client, key)
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]

    def before_login(self, client: Client) -> str | None:
        """The address of a connection that has not logged in; None for any other."""
        key = self._addresses.get(client)
        return key if key is not None and client in self._before_login.get(key, ()) else None

    def make_room(self) -> bool:
        """End the oldest connection that has not logged in; False if all have."""
        # Of the address with the most, because the others may be honest.
        largest = max(self._before_login.values(), key=len, default=None)
        if largest is None:
            return False
        oldest = next(iter(largest))
        self.discard(oldest)
        oldest.abort("another connection needs its place, and it has not logged in")
        return True

    def _has_room(self, handshakes: int) -> bool:
        return len(self) + handshakes < self._most

    def _admits_handshake(self, handshakes: int) -> bool:
        """Whether there may be a TLS handshake beside so many others, which it may replace."""
        return self._has_room(handshakes) or (handshakes == 0 and self.make_room())

    def _forget_before_login(self, client: Client, key: str) -> None:
        waiting = self._before_login.get(key)
        if waiting is not None:
            waiting.pop(client, None)
            if not waiting:
                del self._before_login[key]
