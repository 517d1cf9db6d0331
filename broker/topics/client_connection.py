"""The interface of a client's connection that producers and consumers use."""

from collections.abc import Callable, Set
from typing import Protocol

from magnetar.protocol.pulsar_pb2 import BaseCommand, FeatureFlags


class ClientConnection(Protocol):
    """The connection of a producer's or consumer's client: output, back pressure, its end."""

    put: Callable[[bytes], None]
    """Queue one encoded frame, without asking whether the connection is still open."""
    inflight_bytes: int
    """Bytes of entries that were received here and are not durable yet."""

    @property
    def remote(self) -> str:
        """`host:port` of the client."""
        ...

    @property
    def tls(self) -> bool:
        """Whether the connection came over TLS."""
        ...

    @property
    def client_version(self) -> str:
        """Name and version of the client, as CONNECT gave them."""
        ...

    @property
    def protocol_version(self) -> int:
        """Protocol version of the handshake."""
        ...

    @property
    def features(self) -> FeatureFlags:
        """Feature flags of the client, as CONNECT gave them."""
        ...

    @property
    def connected_ms(self) -> int:
        """Time of the connection's beginning, since 1970."""
        ...

    @property
    def closing(self) -> bool:
        """True from the decision to close on."""
        ...

    @property
    def writable(self) -> bool:
        """False while more than the high water is queued towards the client."""
        ...

    @property
    def paused(self) -> Set[str]:
        """Reasons why reading is paused; empty while the connection is read."""
        ...

    def send(self, command: BaseCommand) -> None:
        """Queue a command.  Nothing happens once the connection is closing."""
        ...

    def send_encoded(self, *buffers: bytes) -> None:
        """Queue encoded frames.  Check `writable` before each batch of messages."""
        ...

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, when the connection is (again) writable; never if it closes."""
        ...

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` when the connection ends; returns a function that removes it."""
        ...

    def pause_reading(self, why: str) -> None:
        """Read nothing until every reason is withdrawn."""
        ...

    def resume_reading(self, why: str) -> None:
        """Withdraw one reason."""
        ...

    async def is_alive(self) -> bool:
        """Whether the client sends anything within LIVENESS_CHECK_S, PONG at least."""
        ...

    async def echo(self) -> None:
        """Return when the client has answered a new PING: all that it wrote before is served then.

        Returns after ECHO_WAIT_S in any case, and when the connection ends.
        """
        ...

    def close(self, why: str) -> None:
        """Flush what is queued, then end the connection."""
        ...

    def abort(self, why: str) -> None:
        """End the connection at once; what is queued is lost."""
        ...

    def forget_producer(self, producer_id: int, producer: object) -> None:
        """Free the id if it is this producer's; late SENDs for it are dropped for a while."""
        ...

    def forget_consumer(self, consumer_id: int, consumer: object) -> None:
        """Free the id if it is this consumer's."""
        ...


def address_of(remote: str) -> str:
    """The IP address in a `host:port`."""
    return remote.rpartition(":")[0] or remote
