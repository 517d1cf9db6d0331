"""One peer: frames in, replies out.

Rules:

- States move only as `_MOVES` says; READY begins with CONNECT, and nothing else is heard before.
- Whatever a peer sends wrongly ends this connection with one (rate-bounded) log line, never the
  process.
- Writes of one loop turn leave in one `writelines`.  Above CONNECTION_WRITE_HIGH_WATER `writable`
  is False and reading stops, so a peer that does not read cannot make us queue more replies.
- Reading stops for named reasons and goes on when the last one is gone; frames that were decoded
  already are held back, in order.
"""

import asyncio
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from protocol.server_error import MagnetarError

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.handlers import Handler
    from broker.producer import Producer
    from broker.service import Broker
    from protocol.pulsar_pb2 import BaseCommand, FeatureFlags


class ConnectionState(enum.Enum):
    """Where a connection stands in its life."""

    HANDSHAKE = "handshake"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"


class Connection(asyncio.Protocol):
    """See the module's rules.

    `producers` and `consumers` hold what is attached under the peer's ids; while an open is in
    progress its place is taken by a future.
    """

    broker: "Broker"
    remote: str
    client_version: str
    protocol_version: int
    features: "FeatureFlags"
    state: ConnectionState
    writable: bool
    producers: dict[int, "Producer | asyncio.Future[Producer]"]
    consumers: dict[int, "Consumer | asyncio.Future[Consumer]"]

    def __init__(self, broker: "Broker", handlers: "Mapping[int, Handler]") -> None: ...

    def send(self, command: "BaseCommand") -> None:
        """Queue a command.  Nothing happens once the connection is closing."""

    def send_encoded(self, *buffers: bytes) -> None:
        """Queue encoded frames.  Look at `writable` before each batch of messages."""

    def reply_error(self, request_id: int, error: MagnetarError) -> None:
        """Queue ERROR with the error's code and sentence."""

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, when the connection is (again) writable; never if it closes."""

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` when the connection ends; returns what takes it off the list again."""
        raise NotImplementedError

    def pause_reading(self, why: str) -> None:
        """Hear nothing until every reason is taken back."""

    def resume_reading(self, why: str) -> None:
        """Take one reason back."""

    def close(self, why: str) -> None:
        """Flush what is queued, then end the connection."""
