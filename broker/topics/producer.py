"""One producer: a connection's right to publish to a topic under a name."""

import asyncio
import enum
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol, cast

from broker.topics.carried_ids import are_stored, last_carried
from broker.topics.client_connection import ClientConnection, address_of
from broker.topics.deduplication import (
    NO_SEQUENCE,
    Chunk,
    ProducerSequence,
    ResendGuard,
    SequenceGuard,
)
from broker.topics.held_sends import HeldSends
from broker.topics.producer_access import AccessMode
from broker.topics.rates import RateSampler
from broker.topics.replicated_messages import ReplicatedIds
from broker.topics.segment_sources import SourceState
from broker.topics.source_positions import source_cluster_of
from magnetar.protocol.hot_frames import encode_send_receipt
from magnetar.protocol.ids import UNSOLICITED_REQUEST_ID
from magnetar.protocol.names import TopicName, segment_name
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandCloseProducer, CommandSendError
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.received import Received, Send
from magnetar.protocol.server_error import InternalError, MagnetarError, ServerError
from magnetar.protocol.state_table import StateTable
from magnetar.protocol.txn_id import TxnId
from storage.callbacks import ignore


class ProducerReplaced(InternalError):
    """The producer was closed while it was being opened: open it again."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ProducerState(enum.Enum):
    """State of a producer; `_MOVES` has the moves between them."""

    OPENING = "opening"
    WAITING = "waiting"
    """The producer waits to be exclusive."""
    OPEN = "open"
    CLOSING = "closing"
    """The client sent CLOSE_PRODUCER, and earlier SENDs have no receipt yet."""
    CLOSED = "closed"
    """No receipt is sent any more.  The topic has it until nothing of it is in flight."""


_S = ProducerState
_NOTHING: Final = -1
"""A gap in front of every sequence id: no SEND is taken."""
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


class OwnTransactions(Protocol):
    """The transactions in which a client may send: those that its role began."""

    @property
    def known(self) -> Container[TxnId]:
        """The newest transactions known to be the role's own; others may be its own too."""
        ...

    def is_own(self, txn: TxnId) -> bool:
        """Whether a transaction is known, without a read, to be the role's own."""
        ...

    def check_send(self, txn: TxnId, then: Callable[[MagnetarError | None], None]) -> None:
        """Read who began a transaction; the loop then calls `then` with the refusal, or None."""
        ...


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """A decoded PRODUCER.  `name` is empty when the broker is to make one.

    `own_transactions` None: its client may send in the transactions of every role.  `request_id`
    None: it is not known.
    """

    connection: ClientConnection
    producer_id: int
    name: str = ""
    user_provided_name: bool = False
    epoch: int = 0
    access_mode: AccessMode = AccessMode.SHARED
    topic_epoch: int | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    schema_version: bytes = b""
    own_transactions: OwnTransactions | None = None
    request_id: int | None = None
    encrypted: bool = False
    """Whether the client says that it encrypts the messages."""
    source: SourceState | None = None
    """What the sender of another cluster's segment says of its side; None for any other."""

    @property
    def source_cluster(self) -> str | None:
        """The cluster whose replicator it is; None for a producer of this cluster."""
        if self.source is not None:
            return self.source.source.cluster
        return source_cluster_of(self.name)


class PublishedTopic(Protocol):
    """The topic of a producer, as the producer and the handlers of its client use it."""

    @property
    def name(self) -> TopicName:
        """Name of the topic."""
        ...

    @property
    def sealed(self) -> bool:
        """True once the ledger is terminated: nothing will ever be appended."""
        ...

    @property
    def publish(self) -> "Callable[[Producer, Sequence[Received], int], int]":
        """Append the SEND at an index, with those behind it: see `PublishPipeline.publish`."""
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
        """Remove a closed producer that has nothing in flight any more."""
        ...


class Producer:
    """One attached producer: its name, its sequence ids and its counters.

    Counters are plain numbers, read at scrape time.
    """

    __slots__ = (
        "_forget_close",
        "_held_receipts",
        "_holders",
        "_idle",
        "_left",
        "attached",
        "bytes_in",
        "closed_by_client",
        "connected_ms",
        "connection",
        "examined",
        "forget_waiting",
        "gap",
        "guard",
        "held",
        "messages_dropped",
        "messages_in",
        "name",
        "pending",
        "producer_id",
        "put",
        "rate_sampler",
        "ready",
        "replicated",
        "request",
        "resend",
        "sequence",
        "source_cluster",
        "stamps",
        "state",
        "topic",
        "topic_epoch",
    )

    def __init__(
        self, topic: PublishedTopic, name: str, request: ProducerRequest, now_ms: int, now_s: float
    ) -> None:
        """Take the time by the broker's clock, in ms, and by the event loop's, in s."""
        self.topic = topic
        self.name = name
        self.source_cluster = request.source_cluster
        """The cluster whose replicator it is; None for a producer of this cluster."""
        self.request = request
        self.connection = request.connection
        self.put: Callable[[bytes], None] = request.connection.put
        """Sends encoded receipts, or holds them back."""
        self._held_receipts: list[bytes] = []
        self._holders: dict[object, Callable[[], None]] = {}
        """Who holds receipts back, each with what it has called for a SEND."""
        self.producer_id = request.producer_id
        self.state = ProducerState.OPENING
        self.attached = False
        """Whether receipts are sent: OPEN or CLOSING."""
        self.closed_by_client = False
        self.topic_epoch: int | None = None
        self.connected_ms = now_ms
        self.sequence = ProducerSequence()
        self.guard: SequenceGuard | None = None
        self.resend: ResendGuard | None = None
        self.replicated: ReplicatedIds | None = None
        """Recognises the messages of a replicator, on a topic that stores them."""
        self.gap: int | None = None
        self.held: HeldSends | None = None
        """SENDs that wait because a transaction is being joined."""
        self.forget_waiting: Callable[[Producer], None] = ignore
        """Called to drop its SENDs that wait for a publish rate; set while there are any."""
        self.examined = False
        self.stamps = False
        """Whether it is known to give its batches entry hashes (PIP-486)."""
        self.pending = 0
        self.messages_dropped = 0
        """Messages that were answered, and neither stored nor delivered to anybody."""
        self.messages_in = 0
        self.bytes_in = 0
        self.rate_sampler = RateSampler(now_s, len(self.traffic))
        """Samples `traffic`: see `broker.topics.rate_timer`."""
        self.ready: asyncio.Future[None] | None = None
        self._left = False
        self._idle: asyncio.Future[None] | None = None
        self._forget_close: Callable[[], None] = self.connection.on_close(self.close_at_once)

    # Queries

    @property
    def traffic(self) -> tuple[int, int, int]:
        """The counters of which rates are taken, in the order of `Published`."""
        return self.messages_in, self.bytes_in, self.messages_dropped

    @property
    def last_sequence_id(self) -> int:
        """The sequence id from which the client counts on: -1 without deduplication."""
        if self.guard is None:
            return NO_SEQUENCE
        return max(self.sequence.last, last_carried(self.sequence.carried))

    def replaces(self, holder: "Producer") -> bool:
        """Whether this is the same client producer after a reconnect, so that `holder` is stale."""
        mine, its = self.request, holder.request
        if mine.epoch <= its.epoch:
            return False
        if not mine.user_provided_name:
            return True
        return mine.producer_id == its.producer_id and address_of(
            mine.connection.remote
        ) == address_of(its.connection.remote)

    def succeeds(self, holder: "Producer") -> bool:
        """Whether it is the newer session of a segment's sender, which ends the one before it."""
        return self.request.source is not None and holder.request.source is not None

    async def idle(self) -> None:
        """Return when nothing of this producer is in flight."""
        while self.pending:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def now_idle(self) -> None:
        """Note that nothing is in flight any more (called by the publish pipeline)."""
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None
        if self.state is ProducerState.CLOSED:
            self._leave()

    # Checks of its SENDs

    def track(self, sequence: ProducerSequence, *, enforce: bool, resends: bool) -> None:
        """Count in `sequence` from now on.

        `enforce` refuses all duplicates; `resends` alone only those of a reconnect's first SENDs.
        """
        self.sequence = sequence
        self.guard = SequenceGuard(sequence) if enforce else None
        self.resend = ResendGuard(sequence) if resends and not enforce else None
        self._set_examined()

    def track_replicated(self, replicated: ReplicatedIds) -> None:
        """Count the messages of a replicator in `replicated` from now on."""
        self.replicated = replicated
        self._set_examined()

    def is_duplicate(self, sequence: int, chunk: Chunk | None, publish_time_ms: int) -> bool:
        """Whether this message is stored, or about to be, already.

        Counts nothing: the message may still be refused.
        """
        if self.guard is not None:
            return self.guard.is_duplicate(sequence, chunk)
        if self.resend is None:
            return False
        known = self.resend.is_resend(sequence, chunk, publish_time_ms)
        if self.resend.over:
            self.resend = None
            self._set_examined()
        return known

    def is_stored_on_parents(self, first: int | None, last: int, key: bytes | None) -> bool:
        """Whether the segment's parents have this message, which is stored nowhere here.

        `first` and `last` are its sequence ids.  A client that counts from the start again ends the
        parents' ids for its name: all that it sends is new.
        """
        sequence = self.sequence
        sequence.end_repeated(first, last, self.request.request_id)
        return are_stored(sequence.carried, last, key, segment_name(self.topic.name))

    def accepted(self, sequence: int, chunk: Chunk | None) -> None:
        """Note that the ledger took this message: from now on it is a duplicate."""
        if self.guard is not None:
            self.guard.accept(sequence, chunk)

    def await_resend(self, sequence_id: int) -> None:
        """Take no SEND after this damaged one until it is sent again."""
        self.gap = sequence_id
        self._set_examined()

    def stop_taking(self) -> None:
        """Drop every SEND from now on; earlier ones are answered."""
        self.await_resend(_NOTHING)

    @property
    def stopped(self) -> bool:
        """Whether every SEND is dropped: see `stop_taking`."""
        return self.gap == _NOTHING

    def drop_waiting(self) -> None:
        """Drop every SEND from now on, and those that wait for a publish rate.

        They have no receipt, so that its client sends them again.
        """
        self.stop_taking()
        self.forget_waiting(self)
        if not self.pending:
            self.now_idle()

    def is_behind_gap(self, sequence_id: int) -> bool:
        """Whether a SEND must be dropped because one before it is missing."""
        if self.gap is None:
            return False
        if sequence_id > self.gap:
            return True
        self.gap = None
        self._set_examined()
        return False

    def hold(self, held: HeldSends | None) -> None:
        """Let SENDs wait in `held` from now on; None: they wait no longer."""
        self.held = held
        self._set_examined()

    def _set_examined(self) -> None:
        self.examined = (
            bool(self._holders)
            or self.guard is not None
            or self.resend is not None
            or self.replicated is not None
            or self.gap is not None
            or self.held is not None
        )

    # State

    def move(self, to: ProducerState) -> None:
        """Change the state.  Raises RuntimeError for a move that is not in the table."""
        self.state = _MOVES.move(self.state, to, "Producer {!r}", self.name)
        self.attached = to in (ProducerState.OPEN, ProducerState.CLOSING)

    async def close(self) -> None:
        """Serve CLOSE_PRODUCER: return when all earlier SENDs are durable and have a receipt."""
        self.closed_by_client = True
        self.release_id()
        self.release_receipts()
        if self.state is ProducerState.OPEN:
            self.move(ProducerState.CLOSING)
            await self.idle()
        self.close_at_once()

    def disconnect(self) -> None:
        """Close it with CLOSE_PRODUCER: the client reconnects by itself."""
        self.release_receipts()
        if self.state is ProducerState.OPEN:
            self.connection.send(
                BaseCommand(
                    type=BaseCommand.CLOSE_PRODUCER,
                    close_producer=CommandCloseProducer(
                        producer_id=self.producer_id, request_id=UNSOLICITED_REQUEST_ID
                    ),
                )
            )
        self.close_at_once()

    def close_at_once(self) -> None:
        """Close it at once: no receipt is sent from now on."""
        if self.state is ProducerState.CLOSED:
            return
        self.move(ProducerState.CLOSED)
        self._forget_close()
        self.release_id()
        self.forget_waiting(self)
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(
                ProducerReplaced(f"Producer {self.name!r} was closed; open it again.")
            )
            self.ready.exception()
        if not self.pending:
            self.now_idle()

    def _leave(self) -> None:
        """Leave the topic, once: it is closed and nothing of it is in flight."""
        if not self._left:
            self._left = True
            self.topic.producer_gone(self)

    def release_id(self) -> None:
        """Free its id on the connection; late SENDs for it are dropped for a while."""
        self.connection.forget_producer(self.producer_id, self)

    # Answers

    def hold_receipts(self, holder: object, on_send: Callable[[], None]) -> None:
        """Hold receipts back until all holders let go; call `on_send` for each SEND meanwhile.

        Does nothing if it is not open.
        """
        if self.state is ProducerState.OPEN:
            self._holders[holder] = on_send
            self.put = self._held_receipts.append
            self._set_examined()

    def let_go_of_receipts(self, holder: object) -> None:
        """Hold receipts back for this holder no longer."""
        if self._holders.pop(holder, None) is not None and not self._holders:
            self._send_held_receipts()

    def release_receipts(self) -> None:
        """Send the receipts that were held back, if any were, whoever holds them."""
        if self._holders:
            self._holders.clear()
            self._send_held_receipts()

    def _send_held_receipts(self) -> None:
        held, self._held_receipts = self._held_receipts, []
        self.put = self.connection.put
        self._set_examined()
        if held and self.attached:
            self.put(b"".join(held))

    def arrived(self) -> None:
        """Note that a SEND came in, of those that are examined."""
        for on_send in tuple(self._holders.values()):
            on_send()

    def receipt(self, sequence_id: int, highest: int, ledger_id: int, entry_id: int) -> None:
        """Send SEND_RECEIPT; ids are unsigned numbers, as on the wire."""
        self.put(encode_send_receipt(self.producer_id, sequence_id, highest, ledger_id, entry_id))

    def send_error(self, sequence_id: int, code: ServerError, message: str) -> None:
        """Send SEND_ERROR, behind all receipts."""
        self.release_receipts()
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
