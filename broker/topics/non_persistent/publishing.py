"""The publish path of a non-persistent topic: the SENDs of one turn of the loop, and receipts."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from broker.topics.client_connection import ClientConnection
from broker.topics.dispatch.entry_facts import facts_of
from broker.topics.producer import Producer
from broker.topics.publish_errors import (
    KEEPS_PRODUCER,
    EncryptionRequired,
    MessageRefused,
    require_encrypted,
)
from broker.topics.publishing import refuse_damaged
from config.bounds import ENTRY_HEADROOM
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.frames import FrameError
from magnetar.protocol.hot_frames import encode_send_receipts
from magnetar.protocol.message import parse_metadata, transaction_named_by
from magnetar.protocol.received import Received, Send
from magnetar.protocol.server_error import MagnetarError

_DROPPED_ID: Final = 2**64 - 1
"""-1 in an unsigned field: the message id in the receipt of a dropped message."""
_Waiting = tuple[Producer, Send, bytes | None, MagnetarError | None]
"""A SEND that waits for its turn: its entry, or None if it is dropped, and its refusal if any."""


class MessagesInFlight:
    """Counts the messages that each connection has published and that are not delivered yet."""

    def __init__(self, most: int) -> None:
        """`most` are taken of one connection."""
        self._most = most
        self._counts: dict[ClientConnection, int] = {}

    def take(self, connection: ClientConnection) -> bool:
        """Count one more message; False, and nothing is counted, at the bound."""
        count = self._counts.get(connection, 0)
        if count >= self._most:
            return False
        self._counts[connection] = count + 1
        return True

    def done(self, connection: ClientConnection) -> None:
        """Count one message less."""
        count = self._counts[connection] - 1
        if count:
            self._counts[connection] = count
        else:
            del self._counts[connection]


class NonPersistentPublishing:
    """Delivers the SENDs of one topic, and answers them in the order in which they came.

    SENDs of one turn of the loop are delivered together at its end.  A message that its connection
    has too many in flight for is dropped, and counted at its producer.
    """

    def __init__(
        self,
        in_flight: MessagesInFlight,
        deliver: Callable[[bytes, int], None],
        flush: Callable[[], None],
    ) -> None:
        """`deliver` gets each entry and its number of messages; `flush` ends each run."""
        self._in_flight = in_flight
        self._deliver = deliver
        self._flush = flush
        self._largest = 0
        self._requires_encryption = False
        self._waiting: deque[_Waiting] = deque()
        self._scheduled = False

    def limit_messages(self, payload_bytes: int) -> None:
        """Refuse messages with larger payloads."""
        self._largest = payload_bytes + ENTRY_HEADROOM

    def require_encryption(self, required: bool) -> None:
        """Refuse messages that are not encrypted; the metadata of every SEND is parsed then."""
        self._requires_encryption = required

    @property
    def busy(self) -> bool:
        """Whether SENDs wait to be delivered."""
        return bool(self._waiting)

    def publish(self, producer: Producer, sends: Sequence[Received], at: int) -> int:
        """Take the SEND at sends[at], with plain ones of the same producer behind it.

        Returns the index behind the last one.
        """
        paused = producer.connection.paused
        index = at
        while index < len(sends):
            send = sends[index]
            if (
                not isinstance(send, Send)
                or send.producer_id != producer.producer_id
                or send.entry is None
                or not (send.plain or index == at)
            ):
                break
            self._take(producer, send, send.entry)
            index += 1
            if paused:
                break
        return max(index, at + 1)

    def refuse(self, producer: Producer, send: Send, error: MagnetarError) -> None:
        """Answer a SEND with SEND_ERROR, in its turn."""
        if not producer.is_behind_gap(send.sequence_id):
            self._enqueue(producer, send, None, error)

    def damaged(self, producer: Producer, send: Send) -> None:
        """Answer a SEND whose checksum is wrong; the client sends it and what followed it again."""
        error = refuse_damaged(producer, send)
        if error is not None:
            self._enqueue(producer, send, None, error)

    def _take(self, producer: Producer, send: Send, entry: bytes) -> None:
        if producer.is_behind_gap(send.sequence_id):
            return
        refusal = self._refusal_of(send, entry)
        if refusal is not None:
            self._enqueue(producer, send, None, refusal)
        elif self._in_flight.take(producer.connection):
            self._enqueue(producer, send, entry, None)
        else:
            self._enqueue(producer, send, None, None)

    def _refusal_of(self, send: Send, entry: bytes) -> MagnetarError | None:
        if len(entry) > self._largest:
            return MessageRefused(
                f"The message has {len(entry)} bytes, and {self._largest} are the most: send it "
                "in chunks, or compressed."
            )
        if send.plain and not self._requires_encryption:
            return None
        try:
            metadata = parse_metadata(entry)
            if self._requires_encryption:
                require_encrypted(metadata)
        except FrameError as error:
            return MessageRefused(str(error))
        except EncryptionRequired as error:
            return error
        in_transaction = send.txnid is not None or transaction_named_by(metadata) is not None
        if in_transaction:
            return MessageRefused(
                "A non-persistent topic takes part in no transaction: send without one."
            )
        return None

    def _enqueue(
        self, producer: Producer, send: Send, entry: bytes | None, refusal: MagnetarError | None
    ) -> None:
        producer.pending += 1
        self._waiting.append((producer, send, entry, refusal))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Deliver and answer everything that waits."""
        self._scheduled = False
        receipts = _Receipts()
        while self._waiting:
            producer, send, entry, refusal = self._waiting.popleft()
            if entry is not None:
                self._in_flight.done(producer.connection)
                count, _ = facts_of(entry)
                producer.messages_in += count
                producer.bytes_in += len(entry)
                self._deliver(entry, count)
                receipts.add(producer, send, 0)
            elif refusal is None:
                count = send.num_messages
                producer.messages_dropped += count if 0 < count <= MAX_BATCH_SIZE else 1
                receipts.add(producer, send, _DROPPED_ID)
            else:
                receipts.flush()
                self._answer_refused(producer, send, refusal)
            producer.pending -= 1
            if not producer.pending:
                receipts.flush()
                producer.now_idle()
        receipts.flush()
        self._flush()

    def _answer_refused(self, producer: Producer, send: Send, error: MagnetarError) -> None:
        if producer.attached:
            producer.send_error(send.sequence_id, error.code, str(error))
            if error.code not in KEEPS_PRODUCER:
                producer.close_at_once()


class _Receipts:
    """Receipts of one producer that leave together."""

    def __init__(self) -> None:
        self._producer: Producer | None = None
        self._id = 0
        self._receipts: list[tuple[int, int, int]] = []

    def add(self, producer: Producer, send: Send, message_id: int) -> None:
        """Add the receipt of a SEND; ledger and entry id are the same number."""
        if producer is not self._producer or message_id != self._id:
            self.flush()
            self._producer, self._id = producer, message_id
        self._receipts.append((send.sequence_id, send.highest_sequence_id, message_id))

    def flush(self) -> None:
        """Send what was added."""
        producer = self._producer
        if self._receipts and producer is not None and producer.attached:
            producer.put(encode_send_receipts(producer.producer_id, self._id, self._receipts))
        self._receipts = []
