"""The publish path of one topic: SENDs to appends, completed appends to receipts.

Rules:

- Appends complete in order, so one queue of what is in flight is all that is kept; there is no
  task, future or callback object for a message.
- What is refused (a duplicate, too large, a sealed topic) takes its place in that queue: answers
  leave in SEND order, whatever they say.
- A producer one of whose messages was not stored is put out at once: nothing of it may be stored
  behind the gap.  Its client comes back and sends again what has no receipt.
- Metadata is parsed for chunks, for deduplication and while a reconnected producer resends.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

from broker.deduplication import Chunk, chunk_of, last_sequence
from config.bounds import MAX_MESSAGE_SIZE
from protocol.frames import FrameError
from protocol.hot_frames import encode_send_receipt
from protocol.ids import LONG_MAX, Position
from protocol.message import parse_metadata, payload_of
from protocol.server_error import InternalError, MagnetarError, PeerError, ServerError
from storage.ledger.store import LedgerAssertion
from storage.managed_ledger_types import (
    AppendOutcomeUnknown,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
)

if TYPE_CHECKING:
    from broker.producer import Producer
    from broker.publish_limits import PublishLimits
    from broker.sequence_store import SequenceStore
    from protocol.pulsar_pb2 import CommandSend
    from storage.managed_ledger import ManagedLedger

_NO_ID: Final = 2**64 - 1
"""-1 in an unsigned field: the message id of a receipt for what was stored before."""
LEDGER_LOST: Final = (
    AppendOutcomeUnknown,
    LedgerAssertion,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
)
"""After these the instance is useless, or does not know its own end: it must be opened anew."""
_KEEPS_PRODUCER: Final = frozenset({ServerError.NOT_ALLOWED_ERROR, ServerError.CHECKSUM_ERROR})
"""Refusals that concern one message: the client goes on with the next."""


class DuplicateMessage(PeerError):
    """Stored before: answered with a receipt, never with this error."""


class MessageRefused(PeerError):
    """This one message cannot be taken: do not send it again as it is."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class DamagedMessage(PeerError):
    """The checksum is wrong: check the copy that was kept, and send it again."""

    code: ClassVar[ServerError] = ServerError.CHECKSUM_ERROR


_Sent = tuple["Producer", int, int, int, int, Chunk | None, MagnetarError | None]
"""Producer, sequence id, highest id, size, messages, chunk, and why it was not appended."""


class Publishing:
    """See the module's rules.  `failed` is told of errors after which the ledger is useless."""

    def __init__(
        self,
        ledger: "ManagedLedger",
        limits: "PublishLimits",
        store: "SequenceStore",
        failed: Callable[[MagnetarError], None],
    ) -> None:
        self._append = ledger.append
        self._limits = limits
        self._failed = failed
        self._in_flight: deque[_Sent] = deque()
        self._done = self._appended
        self._store = store

    @property
    def in_flight(self) -> int:
        """SENDs that are not answered yet."""
        return len(self._in_flight)

    def publish(self, producer: "Producer", send: "CommandSend", entry: bytes) -> None:
        """Append one SEND; the receipt (or SEND_ERROR) follows by itself, in order."""
        size = len(entry)
        if producer.examined or size > MAX_MESSAGE_SIZE or send.is_chunk:
            self._examine(producer, send, entry)
            return
        self._limits.started(producer.connection, size)
        producer.pending += 1
        self._in_flight.append(
            (
                producer,
                send.sequence_id,
                send.highest_sequence_id,
                size,
                send.num_messages,
                None,
                None,
            )
        )
        try:
            self._append(entry, self._done)
        except MagnetarError as error:
            self._not_taken(error)

    def refuse(self, producer: "Producer", send: "CommandSend", error: MagnetarError) -> None:
        """Answer a SEND with SEND_ERROR, in its turn."""
        if not producer.behind_hole(send.sequence_id):
            self._enqueue(producer, send, 0, None, error)

    def damaged(self, producer: "Producer", send: "CommandSend") -> None:
        """Answer a SEND whose checksum is wrong; the client sends it again, and what followed it.

        Chunks have one sequence id, so nobody could tell which is missing: they start anew.
        """
        if producer.behind_hole(send.sequence_id):
            return
        error: MagnetarError = DamagedMessage(
            f"The message with sequence id {send.sequence_id} was damaged: send it again."
        )
        if send.is_chunk:
            producer.stop_taking()
            error = InternalError("A chunk was damaged on its way: open the producer again.")
        else:
            producer.leave_hole(send.sequence_id)
        self._enqueue(producer, send, 0, None, error)

    def _examine(self, producer: "Producer", send: "CommandSend", entry: bytes) -> None:
        """`publish` for what needs a closer look."""
        if producer.behind_hole(send.sequence_id):
            return
        try:
            chunk, refusal = self._verdict(producer, send, entry)
        except FrameError as error:
            chunk, refusal = None, MessageRefused(str(error))
        self._enqueue(producer, send, len(entry), chunk, refusal)
        if refusal is None:
            try:
                self._append(entry, self._done)
            except MagnetarError as error:
                self._not_taken(error)

    def _verdict(
        self, producer: "Producer", send: "CommandSend", entry: bytes
    ) -> tuple[Chunk | None, MagnetarError | None]:
        if len(entry) > MAX_MESSAGE_SIZE:
            payload = len(payload_of(entry))
            if payload > MAX_MESSAGE_SIZE:
                return None, MessageRefused(
                    f"The message has {payload} bytes and {MAX_MESSAGE_SIZE} are the most: send "
                    "it in chunks, or compressed."
                )
        if not producer.examined and not send.is_chunk:
            return None, None
        metadata = parse_metadata(entry)
        chunk = chunk_of(metadata) if send.is_chunk else None
        sequence = last_sequence(send.sequence_id, send.highest_sequence_id)
        if producer.is_duplicate(sequence, chunk, metadata.publish_time):
            return chunk, DuplicateMessage("Stored before.")
        return chunk, None

    def _enqueue(
        self,
        producer: "Producer",
        send: "CommandSend",
        size: int,
        chunk: Chunk | None,
        refusal: MagnetarError | None,
    ) -> None:
        self._limits.started(producer.connection, size)
        producer.pending += 1
        self._in_flight.append(
            (
                producer,
                send.sequence_id,
                send.highest_sequence_id,
                size,
                send.num_messages,
                chunk,
                refusal,
            )
        )
        if refusal is not None and len(self._in_flight) == 1:
            self._settle()

    def _not_taken(self, error: MagnetarError) -> None:
        """The ledger did not take the newest one."""
        sent = self._in_flight.pop()
        self._in_flight.append((*sent[:6], error))
        producer = sent[0]
        producer.stop_taking()
        if len(self._in_flight) == 1:
            self._settle()

    def _appended(self, position: Position | None, error: MagnetarError | None) -> None:
        """The oldest append in flight is durable, or failed."""
        in_flight = self._in_flight
        producer, sequence_id, highest, size, messages, chunk, _ = in_flight.popleft()
        self._limits.finished(producer.connection, size)
        producer.pending -= 1
        if position is None:
            self._refused(producer, sequence_id, error)
        else:
            last = highest if highest > sequence_id else sequence_id
            if last > LONG_MAX:
                last = last_sequence(sequence_id, highest)
            producer.sequence.stored(last, position, chunk)
            store = self._store
            store.durable = position
            store.unsaved_entries += 1
            store.unsaved_bytes += size
            producer.messages_in += messages if messages > 0 else 1
            producer.bytes_in += size
            if producer.attached:
                producer.connection.put(
                    encode_send_receipt(producer.producer_id, sequence_id, highest, *position)
                )
        if not producer.pending:
            producer.now_idle()
        if in_flight and in_flight[0][6] is not None:
            self._settle()

    def _settle(self) -> None:
        """Answer what was refused, as far as nothing older is in flight."""
        in_flight = self._in_flight
        while in_flight and in_flight[0][6] is not None:
            producer, sequence_id, highest, size, _, _, refusal = in_flight.popleft()
            self._limits.finished(producer.connection, size)
            producer.pending -= 1
            if isinstance(refusal, DuplicateMessage):
                if producer.attached:
                    producer.receipt(sequence_id, highest, _NO_ID, _NO_ID)
            else:
                self._refused(producer, sequence_id, refusal)
            if not producer.pending:
                producer.now_idle()

    def _refused(self, producer: "Producer", sequence_id: int, error: MagnetarError | None) -> None:
        error = error or InternalError("An append failed without a reason.")
        if producer.attached:
            producer.send_error(sequence_id, error.code, str(error))
            if error.code not in _KEEPS_PRODUCER:
                producer.disconnected()
        if isinstance(error, LEDGER_LOST):
            self._failed(error)
