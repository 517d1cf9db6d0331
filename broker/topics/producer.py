"""One producer: a connection's right to publish to a topic under a name.

Rules:

- States move only as `_MOVES` says.  Receipts go out while OPEN or CLOSING, never after.
- CLOSING is the client's CLOSE_PRODUCER: answered when every earlier SEND is durable and has its
  receipt.  A producer whose connection is lost, that is replaced or put out is CLOSED at once; it
  stays with its topic until what it had in flight is decided.
"""

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, cast

from broker.topics.client_connection import ClientConnection
from broker.topics.deduplication import (
    NO_SEQUENCE,
    Chunk,
    ProducerSequence,
    ResendGuard,
    SequenceGuard,
)
from broker.topics.held_sends import HeldSends
from broker.topics.producer_access import AccessMode
from magnetar.protocol.hot_frames import encode_send_receipt
from magnetar.protocol.ids import UNSOLICITED_REQUEST_ID
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandCloseProducer, CommandSendError
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.received import Received, Send
from magnetar.protocol.server_error import InternalError, MagnetarError, ServerError
from magnetar.protocol.state_table import StateTable


class ProducerReplaced(InternalError):
    """The producer was closed while it was being opened: open it again."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ProducerState(enum.Enum):
    """Where a producer stands in its life."""

    OPENING = "opening"
    WAITING = "waiting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_S = ProducerState
_MOVES: StateTable[ProducerState] = StateTable(
    {
        _S.OPENING: frozenset({_S.WAITING, _S.OPEN, _S.CLOSED}),
        _S.WAITING: frozenset({_S.OPENING, _S.CLOSED}),
        _S.OPEN: frozenset({_S.CLOSING, _S.CLOSED}),
        _S.CLOSING: frozenset({_S.CLOSED}),
        _S.CLOSED: frozenset(),
    },
    defect=RuntimeError,
)


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """What PRODUCER asks for.  `name` is empty when the broker is to make one."""

    connection: ClientConnection
    producer_id: int
    name: str = ""
    user_provided_name: bool = False
    epoch: int = 0
    access_mode: AccessMode = AccessMode.SHARED
    topic_epoch: int | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    schema_version: bytes = b""


class PublishedTopic(Protocol):
    """What a producer, and who serves its client, asks of its topic."""

    @property
    def name(self) -> TopicName:
        """Of the topic."""
        ...

    @property
    def sealed(self) -> bool:
        """True once the ledger is terminated: nothing will ever be appended."""
        ...

    @property
    def publish(self) -> "Callable[[Producer, Sequence[Received], int], int]":
        """Append the SEND at a place, with those behind it: see `Publishing.publish`."""
        ...

    @property
    def refuse(self) -> "Callable[[Producer, Send, MagnetarError], None]":
        """Answer a SEND with SEND_ERROR, in its turn."""
        ...

    @property
    def damaged(self) -> "Callable[[Producer, Send], None]":
        """Answer a SEND whose checksum is wrong."""
        ...

    def producer_gone(self, producer: "Producer") -> None:
        """A closed producer has nothing in flight any more."""
        ...


class Producer:
    """One attached producer: its name, its sequence ids and its counters.

    Counters are plain numbers, read at scrape time.
    """

    __slots__ = (
        "_forget_close",
        "_idle",
        "_left",
        "attached",
        "bytes_in",
        "connected_ms",
        "connection",
        "examined",
        "guard",
        "held",
        "hole",
        "messages_in",
        "name",
        "pending",
        "producer_id",
        "ready",
        "request",
        "resend",
        "sequence",
        "state",
        "topic",
        "topic_epoch",
    )

    def __init__(
        self, topic: PublishedTopic, name: str, request: ProducerRequest, now_ms: int
    ) -> None:
        self.topic = topic
        self.name = name
        self.request = request
        self.connection = request.connection
        self.producer_id = request.producer_id
        self.state = ProducerState.OPENING
        self.attached = False
        """Whether the peer counts on receipts: OPEN or CLOSING."""
        self.topic_epoch: int | None = None
        self.connected_ms = now_ms
        self.sequence = ProducerSequence()
        self.guard: SequenceGuard | None = None
        self.resend: ResendGuard | None = None
        self.hole: int | None = None
        self.held: HeldSends | None = None
        """What waits for a transaction to be joined, with all that came behind it."""
        self.examined = False
        self.pending = 0
        self.messages_in = 0
        self.bytes_in = 0
        self.ready: asyncio.Future[None] | None = None
        self._left = False
        self._idle: asyncio.Future[None] | None = None
        self._forget_close: Callable[[], None] = self.connection.on_close(self.disconnected)

    # What is asked about it

    @property
    def last_sequence_id(self) -> int:
        """What the client counts on from: known to it under deduplication only, else -1."""
        return NO_SEQUENCE if self.guard is None else self.sequence.last

    def replaces(self, holder: "Producer") -> bool:
        """Whether this is the same client producer after a reconnect, so that `holder` is stale."""
        mine, its = self.request, holder.request
        if mine.epoch <= its.epoch:
            return False
        if not mine.user_provided_name:
            return True
        return mine.producer_id == its.producer_id and _host(mine) == _host(its)

    async def idle(self) -> None:
        """Return when nothing of it is in flight."""
        while self.pending:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def now_idle(self) -> None:
        """The last append in flight was decided (called by the topic)."""
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None
        if self.state is ProducerState.CLOSED:
            self._leave()

    # What its SENDs are held against

    def track(self, sequence: ProducerSequence, *, enforce: bool, resends: bool) -> None:
        """Begin to count in `sequence`; refuse duplicates always, or only what is sent again."""
        self.sequence = sequence
        self.guard = SequenceGuard(sequence) if enforce else None
        self.resend = ResendGuard(sequence) if resends and not enforce else None
        self._set_examined()

    def is_duplicate(self, sequence: int, chunk: Chunk | None, publish_time_ms: int) -> bool:
        """Whether this message is stored, or about to be, already.  If not, it may be refused."""
        if self.guard is not None:
            return self.guard.is_duplicate(sequence, chunk)
        if self.resend is None:
            return False
        known = self.resend.is_resend(sequence, chunk, publish_time_ms)
        if self.resend.over:
            self.resend = None
            self._set_examined()
        return known

    def accepted(self, sequence: int, chunk: Chunk | None) -> None:
        """The ledger took this message: from now on it is a duplicate."""
        if self.guard is not None:
            self.guard.accept(sequence, chunk)

    def leave_hole(self, sequence_id: int) -> None:
        """The SEND arrived damaged: until it is sent again, nothing that follows it is taken."""
        self.hole = sequence_id
        self._set_examined()

    def stop_taking(self) -> None:
        """Drop every SEND from now on; what was taken before is answered."""
        self.leave_hole(-1)

    def behind_hole(self, sequence_id: int) -> bool:
        """Whether a SEND must be dropped because one before it is missing."""
        if self.hole is None:
            return False
        if sequence_id > self.hole:
            return True
        self.hole = None
        self._set_examined()
        return False

    def hold(self, held: HeldSends | None) -> None:
        """From now on SENDs wait in there; None: no longer."""
        self.held = held
        self._set_examined()

    def _set_examined(self) -> None:
        self.examined = (
            self.guard is not None
            or self.resend is not None
            or self.hole is not None
            or self.held is not None
        )

    # What moves it

    def move(self, to: ProducerState) -> None:
        """Change the state.  Raises RuntimeError for a move that is not in the table."""
        self.state = _MOVES.move(self.state, to, "Producer {!r}", self.name)
        self.attached = to in (ProducerState.OPEN, ProducerState.CLOSING)

    async def close(self) -> None:
        """The client's CLOSE_PRODUCER: return when all its SENDs are durable and receipted."""
        self.release_id()
        if self.state is ProducerState.OPEN:
            self.move(ProducerState.CLOSING)
            await self.idle()
        self.disconnected()

    def disconnect(self) -> None:
        """Put it out: the client is told to reconnect."""
        if self.state is ProducerState.OPEN:
            self.connection.send(
                BaseCommand(
                    type=BaseCommand.CLOSE_PRODUCER,
                    close_producer=CommandCloseProducer(
                        producer_id=self.producer_id, request_id=UNSOLICITED_REQUEST_ID
                    ),
                )
            )
        self.disconnected()

    def disconnected(self) -> None:
        """Nobody listens any more: no receipt leaves from now on."""
        if self.state is ProducerState.CLOSED:
            return
        self.move(ProducerState.CLOSED)
        self._forget_close()
        self.release_id()
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(
                ProducerReplaced(f"Producer {self.name!r} was closed; open it again.")
            )
            self.ready.exception()
        if not self.pending:
            self._leave()

    def _leave(self) -> None:
        """Closed, and nothing in flight: tell the topic, once."""
        if not self._left:
            self._left = True
            self.topic.producer_gone(self)

    def release_id(self) -> None:
        """Free its id on the connection; late SENDs for it are dropped quietly for a while."""
        self.connection.forget_producer(self.producer_id, self)

    # Answers

    def receipt(self, sequence_id: int, highest: int, ledger_id: int, entry_id: int) -> None:
        """SEND_RECEIPT; ids as unsigned numbers of the wire."""
        self.connection.send_encoded(
            encode_send_receipt(self.producer_id, sequence_id, highest, ledger_id, entry_id)
        )

    def send_error(self, sequence_id: int, code: ServerError, message: str) -> None:
        """SEND_ERROR."""
        self.connection.send(
            BaseCommand(
                type=BaseCommand.SEND_ERROR,
                send_error=CommandSendError(
                    producer_id=self.producer_id,
                    sequence_id=sequence_id,
                    error=cast("WireError", int(code)),
                    message=message,
                ),
            )
        )


def _host(request: ProducerRequest) -> str:
    return request.connection.remote.rpartition(":")[0]
