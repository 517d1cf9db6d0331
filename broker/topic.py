"""One topic: producers and subscriptions over one managed ledger.

Rules:

- States move only as `_MOVES` says.  SEALING takes no new producers and lets attached ones
  finish; SEALED is a terminated ledger, for ever; CLOSING answers nothing new.
- Receipts leave in SEND order of a producer, one each, and never for a producer that is closed.
- Publishing makes no task and no future: appends complete in order, so a queue of what is in
  flight is all that is kept.
"""

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from protocol.ids import Position
from protocol.server_error import PeerError, ServerError

if TYPE_CHECKING:
    from broker.consumer import Consumer, SubscribeRequest
    from broker.producer import Producer, ProducerRequest
    from broker.service import Broker
    from broker.subscription import Subscription
    from protocol.names import TopicName
    from protocol.pulsar_pb2 import CommandSend
    from storage.managed_ledger import ManagedLedger


class TopicNotFound(PeerError):
    """There is no such topic and it may not be created."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


class TopicTerminated(PeerError):
    """The topic is sealed: look the layout up again and write to its successors."""

    code: ClassVar[ServerError] = ServerError.TOPIC_TERMINATED_ERROR


class TopicUnavailable(PeerError):
    """The topic is being closed or loaded: try again at once."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class TopicState(enum.Enum):
    """Where a topic stands in its life."""

    LOADING = "loading"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    CLOSING = "closing"
    CLOSED = "closed"


class Topic:
    """See the module's rules.  Made by `TopicRegistry`, used by handlers and scalable topics."""

    name: "TopicName"
    broker: "Broker"
    ledger: "ManagedLedger"
    state: TopicState
    subscriptions: Mapping[str, "Subscription"]
    producers: Mapping[str, "Producer"]

    @property
    def sealed(self) -> bool:
        """True once the ledger is terminated: nothing will ever be appended."""
        return self.state is TopicState.SEALED

    def publish(self, producer: "Producer", send: "CommandSend", entry: bytes) -> None:
        """Append one SEND; the receipt (or SEND_ERROR) follows by itself, in order."""
        raise NotImplementedError

    async def add_producer(self, request: "ProducerRequest") -> "Producer":
        """Attach a producer by its access mode.  Raises ProducerBusy, ProducerFenced, ..."""
        raise NotImplementedError

    async def subscribe(self, request: "SubscribeRequest") -> "Consumer":
        """Attach a consumer, making the subscription if need be."""
        raise NotImplementedError

    async def create_subscription(self, name: str, start: Position) -> "Subscription":
        """The durable subscription `name`, made at `start` unless it exists (then untouched)."""
        raise NotImplementedError

    async def unsubscribe(self, name: str, *, force: bool) -> None:
        """Delete a subscription and its cursor.  ConsumerBusy unless `force` or unused."""
        raise NotImplementedError

    def begin_seal(self) -> None:
        """OPEN -> SEALING: new producers get TopicTerminated, attached ones finish."""
        raise NotImplementedError

    async def seal(self) -> Position:
        """Wait (bounded) for attached producers, terminate, tell everybody.  The last position."""
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect everybody, make cursors durable, release the ledger."""
        raise NotImplementedError
