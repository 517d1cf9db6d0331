"""What producers and consumers need of a client's connection, so that they do not depend on it."""

from collections.abc import Callable, Set
from typing import Protocol

from magnetar.protocol.pulsar_pb2 import BaseCommand, FeatureFlags


class ClientConnection(Protocol):
    """Where answers and messages go, and how one hears that the client is gone."""

    put: Callable[[bytes], None]
    """Queue one encoded frame, without asking whether the connection is still open."""
    inflight_bytes: int
    """Bytes of entries that were taken from it and are not durable yet."""

    @property
    def remote(self) -> str:
        """`host:port` of the client."""
        ...

    @property
    def client_version(self) -> str:
        """What the client says that it is."""
        ...

    @property
    def protocol_version(self) -> int:
        """What the client speaks."""
        ...

    @property
    def features(self) -> FeatureFlags:
        """What the client says that it can."""
        ...

    @property
    def connected_ms(self) -> int:
        """Since when."""
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
        """Why nothing is read."""
        ...

    def send(self, command: BaseCommand) -> None:
        """Queue a command.  Nothing happens once the connection is closing."""
        ...

    def send_encoded(self, *buffers: bytes) -> None:
        """Queue encoded frames.  Look at `writable` before each batch of messages."""
        ...

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, when the connection is (again) writable; never if it closes."""
        ...

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` when the connection ends; returns what takes it off the list again."""
        ...

    def pause_reading(self, why: str) -> None:
        """Hear nothing until every reason is taken back."""
        ...

    def resume_reading(self, why: str) -> None:
        """Take one reason back."""
        ...

    async def is_alive(self) -> bool:
        """Whether the client says anything within LIVENESS_CHECK_S, PONG at least."""
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
