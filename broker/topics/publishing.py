"""The publish path of one topic: from SENDs to appends, from completed appends to receipts."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

from broker.topics.carried_ids import first_sequence, last_carried, routing_key
from broker.topics.deduplication import Chunk, chunk_of, last_sequence
from broker.topics.held_sends import HeldSend, HeldSends
from broker.topics.producer import Producer
from broker.topics.publish_errors import (
    KEEPS_PRODUCER,
    LEDGER_LOST,
    DamagedMessage,
    DuplicateMessage,
    EncryptionRequired,
    MessageRefused,
    closes_producer,
    refusal_of_replica,
    require_encrypted,
)
from broker.topics.publish_limits import PublishLimits, largest_message
from broker.topics.replicated_messages import ReplicatedMessage, SourcePositionMissing
from broker.topics.segment_sources import PartRefused
from broker.topics.sequence_store import SequenceStore
from broker.topics.unstamped_batches import is_stamped
from config.bounds import ENTRY_HEADROOM
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.frames import FrameError
from magnetar.protocol.hot_frames import encode_send_receipts
from magnetar.protocol.ids import Position
from magnetar.protocol.message import (
    naming_transaction,
    parse_metadata,
    payload_of,
    transaction_named_by,
)
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.received import Received, Send
from magnetar.protocol.server_error import InternalError, MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.callbacks import ignore
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.writer import GroupCallback
from txn.buffer import SegmentBuffer

_NO_ID: Final = 2**64 - 1
"""-1 in an unsigned field: the message id of a duplicate's receipt."""
# A plain tuple: making a NamedTuple or a slots class costs 0.4 us more, for each message.
_Part = Chunk | ReplicatedMessage | None
"""Of a SEND that is counted and answered by itself: its chunk, or what a replicator sent."""
_SendInFlight = tuple[Producer, int, int, int, int, _Part, MagnetarError | None]
"""Producer, sequence id, highest sequence id, bytes, messages, part, and the refusal if any.

It is always unpacked, never indexed.
"""


class PublishPipeline:
    """Appends the SENDs of one topic and answers each with a receipt or an error, in order.

    SENDs of one producer that arrive together are appended together; those that become durable
    together get their receipts in one buffer.  A producer whose message the ledger does not store
    is closed, because nothing may be stored behind the gap: its client comes back and sends again
    what has no receipt.  `failed` is called with errors after which the ledger is useless.
    """

    def __init__(
        self,
        ledger: ManagedLedger,
        limits: PublishLimits,
        store: SequenceStore,
        buffer: SegmentBuffer,
        failed: Callable[[MagnetarError], None],
    ) -> None:
        self._append_all = ledger.append_all
        self._largest_stored = self._largest = largest_message(ledger.max_entry_bytes)
        self._limits = limits
        self._failed = failed
        # Appends complete in order, so one queue is enough: a message needs no task, no future and
        # no callback object of its own.
        self._in_flight: deque[_SendInFlight] = deque()
        self._done: GroupCallback = self._appended
        self._done_in_transaction: GroupCallback = self._appended_in_transaction
        self._store = store
        self._buffer = buffer
        self.on_unstamped_batch: Callable[[], None] | None = None
        """Called once, when a batch without entry hashes comes; None: nobody needs to know."""
        self._max_delay_ms = 0
        self._requires_encryption = False
        self._examines_all = False
        """Whether policies depend on the metadata of each message."""
        self._txns: deque[TxnId] = deque()
        """Transactions of the appends in flight that have one, in order."""

    def limit_messages(self, payload_bytes: int) -> None:
        """Refuse messages with larger payloads, unless they come in chunks.

        With 0 only the limit of the store counts.
        """
        most = self._largest_stored
        self._largest = min(payload_bytes, most) if payload_bytes else most

    def limit_delays(self, max_delay_ms: int) -> None:
        """Refuse messages that are to be delivered later than so long after they were published.

        With 0 none are.  Otherwise the metadata of every SEND is parsed.
        """
        self._max_delay_ms = max_delay_ms
        self._examines_all = self._requires_encryption or max_delay_ms > 0

    def require_encryption(self, required: bool) -> None:
        """Refuse messages that are not encrypted; the metadata of every SEND is parsed then."""
        self._requires_encryption = required
        self._examines_all = required or self._max_delay_ms > 0

    def release(self) -> None:
        """Drop the callbacks, when the ledger is closed, so that the memory is freed at once."""
        self._failed = self._done = self._done_in_transaction = ignore
        self.on_unstamped_batch = None

    @property
    def in_flight(self) -> int:
        """Number of SENDs that are not answered yet."""
        return len(self._in_flight)

    def publish(self, producer: Producer, sends: Sequence[Received], at: int) -> int:
        """Append the SEND at sends[at], with those behind it that need no examination.

        Returns the index behind the last one: that of anything but a plain SEND of the same
        producer, or where the connection is to be read no further.  Receipts (or SEND_ERRORs)
        follow by themselves.
        """
        if not producer.examined and not self._examines_all:
            entries = self._enqueue_plain(producer, sends, at)
            if entries:
                self._append(entries, self._done)
                return at + len(entries)
            joined = self._publish_joined(producer, sends, at)
            if joined:
                return at + joined
        self._examine(producer, cast("Send", sends[at]))
        return at + 1

    def _enqueue_plain(self, producer: Producer, sends: Sequence[Received], at: int) -> list[bytes]:
        """Take the plain SENDs of `producer` from sends[at] on; returns their entries."""
        producer_id, connection = producer.producer_id, producer.connection
        paused, started, largest = connection.paused, self._limits.started, self._largest
        enqueue = self._in_flight.append
        unknown = self.on_unstamped_batch is not None and not producer.stamps
        entries: list[bytes] = []
        for index in range(at, len(sends)):
            send = sends[index]
            if type(send) is not Send or not send.plain or send.producer_id != producer_id:
                break
            entry = send.entry
            if entry is None or (size := len(entry)) > largest:
                break
            if unknown and send.num_messages > 1:
                unknown = self._is_stamp_unknown(producer, entry)
            started(connection, size)
            enqueue(
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
            entries.append(entry)
            if paused:
                break
        producer.pending += len(entries)
        return entries

    def _is_stamp_unknown(self, producer: Producer, entry: bytes) -> bool:
        """Examine a batch; returns whether it is still unknown if its producer stamps batches.

        A client stamps all of its batches or none, so the first one is enough.
        """
        stamped, report = is_stamped(entry), self.on_unstamped_batch
        if stamped:
            producer.stamps = True
        elif stamped is False and report is not None:
            self.on_unstamped_batch = None
            report()
        return stamped is None

    def _append(self, entries: Sequence[bytes], done: GroupCallback) -> int:
        """Append the entries that were enqueued last; returns how many the ledger took."""
        taken = 0
        try:
            while taken < len(entries):
                taken += self._append_all(entries[taken:] if taken else entries, done)
        except MagnetarError as error:
            self._answer_not_taken(len(entries) - taken, error)
        return taken

    def _append_one(self, producer: Producer, send: Send, part: _Part, done: GroupCallback) -> bool:
        """Append the entry that was enqueued last; returns whether the ledger took it."""
        taken = bool(self._append((send.entry or b"",), done))
        if taken:
            # From here on the sequence id is used.  If the ledger loses the entry, the producer is
            # closed, and its count with it.
            if isinstance(part, ReplicatedMessage):
                if producer.replicated is not None:
                    producer.replicated.accept(part)
            else:
                producer.accepted(last_sequence(send.sequence_id, send.highest_sequence_id), part)
        else:
            if producer.replicated is not None:
                producer.replicated.lost()
            self._drop_held_behind(producer)
        return taken

    def refuse(self, producer: Producer, send: Send, error: MagnetarError) -> None:
        """Answer a SEND with SEND_ERROR, in its turn."""
        if not producer.is_behind_gap(send.sequence_id):
            self._take(producer, HeldSend(send, 0, error))

    def damaged(self, producer: Producer, send: Send) -> None:
        """Answer a SEND whose checksum is wrong; the client sends it and what followed it again."""
        error = refuse_damaged(producer, send)
        if error is not None:
            self._take(producer, HeldSend(send, 0, error))

    def _examine(self, producer: Producer, send: Send) -> None:
        """Publish one SEND that cannot be appended unseen."""
        producer.arrived()
        entry = send.entry
        if entry is not None and not producer.is_behind_gap(send.sequence_id):
            self._take(producer, HeldSend(send, len(entry), None))

    def _take(self, producer: Producer, taken: HeldSend) -> None:
        """Count a SEND as in flight, and decide on it when nothing of its producer waits before."""
        self._limits.started(producer.connection, taken.size)
        producer.pending += 1
        if producer.held is None:
            self._decide(producer, taken)
        else:
            producer.held.add(taken)

    def _decide(self, producer: Producer, taken: HeldSend) -> bool:
        """Append or refuse a SEND.  Returns False if it waits for its transaction."""
        send, size, refusal = taken
        part: _Part = None
        if producer.guard is not None:
            writer = producer.sequence.writer
            if writer is not None and not writer.sent:
                writer.note_sent(_first_of(send))
        if refusal is None:
            part, refusal = self._check(producer, send)
        if refusal is not None and producer.replicated is not None:
            refusal = refusal_of_replica(refusal)
            if closes_producer(refusal):
                # Its answer comes in its turn, and nothing behind it may be stored meanwhile.
                producer.stop_taking()
        watched = self.on_unstamped_batch is not None and not producer.stamps
        if watched and refusal is None and send.num_messages > 1:
            self._is_stamp_unknown(producer, send.entry or b"")
        # A duplicate is answered without its transaction.
        if refusal is None and send.txnid is not None:
            return self._admit(producer, _naming_transaction(send), size, part)
        self._enqueue(producer, send, size, part, refusal)
        if refusal is None and send.entry is not None:
            self._append_one(producer, send, part, self._done)
        elif refusal is not None and closes_producer(refusal):
            self._drop_held_behind(producer)
        return True

    # In transactions

    def _publish_joined(self, producer: Producer, sends: Sequence[Received], at: int) -> int:
        """Append the SENDs of `producer` in joined transactions from sends[at] on.

        Returns how many they are.
        """
        connection, buffer, txns = producer.connection, self._buffer, self._txns
        paused, own = connection.paused, producer.request.own_transactions
        known = None if own is None else own.known
        unknown = self.on_unstamped_batch is not None and not producer.stamps
        entries: list[bytes] = []
        for index in range(at, len(sends)):
            send = sends[index]
            if type(send) is not Send or send.producer_id != producer.producer_id:
                break
            txn = self._joined_transaction(send)
            if txn is None or send.entry is None:
                break
            # That it is joined does not mean that this client may send in it: others joined it.
            if known is not None and txn not in known:
                break
            size = len(send.entry)
            if unknown and send.num_messages > 1:
                unknown = self._is_stamp_unknown(producer, send.entry)
            self._limits.started(connection, size)
            producer.pending += 1
            self._enqueue(producer, send, size, None, None)
            buffer.issued(txn)
            txns.append(txn)
            entries.append(send.entry)
            if paused:
                break
        for _ in range(len(entries) - self._append(entries, self._done_in_transaction)):
            buffer.not_taken(txns.pop())
        return len(entries)

    def _joined_transaction(self, send: Send) -> TxnId | None:
        """The transaction of a SEND, if it is joined and the SEND needs no further examination."""
        entry = send.entry
        if send.txnid is None or send.is_chunk or entry is None or len(entry) > self._largest:
            return None
        txn = TxnId(*send.txnid)
        try:
            named = self._buffer.is_joined(txn) and transaction_named_by(parse_metadata(entry))
        except FrameError:
            return None
        return txn if named == send.txnid else None

    def _admit(self, producer: Producer, send: Send, size: int, part: _Part) -> bool:
        """Append a SEND in a joined transaction of its client's; False: `_joining_ended` follows.

        The SENDs of its producer wait in `producer.held` until then.
        """
        txn = TxnId(*(send.txnid or (0, 0)))
        own = producer.request.own_transactions
        then = partial(self._joining_ended, producer, send, size, part)
        if own is not None and not own.is_own(txn):
            # Before the segment is asked: nobody puts claims in transactions of another role, and
            # the answer says nothing about them.
            own.check_send(txn, then)
            admitted = False
        else:
            admitted = self._buffer.admit(txn, then)
        if not admitted:
            if producer.held is None:
                producer.hold(HeldSends(producer.connection, producer.producer_id))
            return False
        self._enqueue(producer, send, size, part, None)
        self._buffer.issued(txn)
        self._txns.append(txn)
        if not self._append_one(producer, send, part, self._done_in_transaction):
            self._txns.pop()
            self._buffer.not_taken(txn)
        return True

    def _joining_ended(
        self,
        producer: Producer,
        send: Send,
        size: int,
        part: _Part,
        error: MagnetarError | None,
    ) -> None:
        """Append or refuse the SEND that waited for its transaction, then those queued after it."""
        held = producer.held
        if held is None:
            return
        if not producer.attached:
            self._drop(producer, size)
        elif error is not None:
            self._enqueue(producer, send, size, part, error)
            if closes_producer(error):
                self._drop_held_behind(producer)
        elif not self._admit(producer, send, size, part):
            return
        while held:
            taken = held.pop()
            if held.broken or not producer.attached:
                self._drop(producer, taken.size)
            elif not self._decide(producer, taken):
                return
        producer.hold(None)
        if not producer.pending:
            producer.now_idle()

    def _drop_held_behind(self, producer: Producer) -> None:
        """Have the held SENDs of a producer dropped: they may not be stored behind a gap."""
        if producer.held is not None:
            producer.held.broken = True
            producer.stop_taking()

    def _drop(self, producer: Producer, size: int) -> None:
        self._limits.finished(producer.connection, size)
        producer.pending -= 1

    def _appended_in_transaction(
        self, positions: Sequence[Position], error: MagnetarError | None
    ) -> None:
        """Do as `_appended` for appends in transactions."""
        # The buffer is called first, so that a receipt never precedes its pin.
        try:
            if error is not None:
                self._buffer.appended(self._txns.popleft(), None, error)
            for position in positions:
                self._buffer.appended(self._txns.popleft(), position, None)
        finally:
            self._appended(positions, error)

    def _check(self, producer: Producer, send: Send) -> tuple[_Part, MagnetarError | None]:
        """The part of a SEND, if it has one, and why it is refused, if it is."""
        try:
            return self._check_entry(producer, send, send.entry or b"")
        except FrameError as error:
            return None, MessageRefused(str(error))
        except (
            EncryptionRequired,
            MessageRefused,
            PartRefused,
            SourcePositionMissing,
        ) as error:
            return None, error

    def _check_entry(
        self, producer: Producer, send: Send, entry: bytes
    ) -> tuple[_Part, MagnetarError | None]:
        # Checked before anything is appended, so that a message that is too large fails alone.
        self._require_storable(send, entry)
        # Metadata is parsed only for chunks and transactions (neither is plain), deduplication,
        # a maximum of delays, required encryption, replicators, and while a reconnected producer
        # resends.
        replicated = producer.replicated
        guarded = (
            producer.guard is not None or producer.resend is not None or replicated is not None
        )
        if send.plain and not guarded and not self._examines_all:
            return None, None
        metadata = parse_metadata(entry)
        if self._requires_encryption and (replicated is None or not metadata.marker_type):
            require_encrypted(metadata)
        refusal = self._refusal_of(send, metadata)
        if refusal is not None:
            return None, refusal
        if replicated is not None:
            if send.txnid is not None:
                raise MessageRefused("Replicated messages are in no transaction: send without one.")
            message = replicated.read(send, metadata)
            known = replicated.is_duplicate(message)
            return message, DuplicateMessage("Stored before.") if known else None
        chunk = chunk_of(metadata) if send.is_chunk else None
        sequence = last_sequence(send.sequence_id, send.highest_sequence_id)
        if producer.is_duplicate(sequence, chunk, metadata.publish_time):
            return chunk, DuplicateMessage("Stored before.")
        carried = producer.sequence.carried
        # Of ids above all carried ones nothing is known from the parents.
        if (
            producer.guard is not None
            and carried
            and sequence <= last_carried(carried)
            and producer.is_stored_on_parents(_first_of(send), sequence, routing_key(metadata))
        ):
            return chunk, DuplicateMessage("Stored before, on a parent of the segment.")
        return chunk, None

    def _require_storable(self, send: Send, entry: bytes) -> None:
        """Raise `MessageRefused` for an entry that is too large."""
        largest = self._largest_stored if send.is_chunk else self._largest
        if len(entry) <= largest:
            return
        payload = len(payload_of(entry))
        around = len(entry) - payload
        if payload > largest or len(entry) > largest + ENTRY_HEADROOM:
            raise MessageRefused(
                f"The message has {payload} bytes and {around} of metadata, and "
                f"{largest} with {ENTRY_HEADROOM} are the most: send it in chunks, or "
                "compressed, or with less metadata."
            )

    def _refusal_of(self, send: Send, metadata: MessageMetadata) -> MessageRefused | None:
        # The write path goes by the SEND's transaction, readers by the message's.  One that names
        # none gets the SEND's: Pulsar's Go client leaves that to the broker.
        named = transaction_named_by(metadata)
        if named is not None and send.txnid != named:
            return MessageRefused(
                f"The SEND is in {_transaction(send.txnid)} and its message names "
                f"{_transaction(named)}: readers go by the message, so both must say the same."
            )
        delay_ms, most_ms = metadata.deliver_at_time - metadata.publish_time, self._max_delay_ms
        if most_ms and delay_ms > most_ms:
            return MessageRefused(
                f"The message is to be delayed by {delay_ms} ms, and {most_ms} are the most "
                "here: send it later, or raise the policy delayedDelivery."
            )
        return None

    def _enqueue(
        self,
        producer: Producer,
        send: Send,
        size: int,
        part: _Part,
        refusal: MagnetarError | None,
    ) -> None:
        # A refused SEND takes its place too: answers leave in SEND order.
        self._in_flight.append(
            (
                producer,
                send.sequence_id,
                send.highest_sequence_id,
                size,
                send.num_messages,
                part,
                refusal,
            )
        )
        if refusal is not None and len(self._in_flight) == 1:
            self._answer_refusals()

    def _answer_not_taken(self, count: int, error: MagnetarError) -> None:
        """Answer the first of the newest `count`, which the ledger did not take; drop the rest."""
        in_flight = self._in_flight
        for _ in range(count - 1):
            producer, _, _, size, _, _, _ = in_flight.pop()
            self._limits.finished(producer.connection, size)
            producer.pending -= 1
        producer, sequence_id, highest, size, messages, part, _ = in_flight.pop()
        in_flight.append((producer, sequence_id, highest, size, messages, part, error))
        producer.stop_taking()
        if len(in_flight) == 1:
            self._answer_refusals()

    def _appended(self, positions: Sequence[Position], error: MagnetarError | None) -> None:
        """Answer the oldest appends in flight: stored at `positions` in a ledger, or one failed."""
        if error is not None:
            self._answer_lost(error)
            return
        rest = deque(positions)
        while rest:
            try:
                self._answer_stored(rest)
                self._answer_refusals()
            except Exception as failure:  # noqa: BLE001 - reported to the loop; the others go on
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a receipt failed", "exception": failure}
                )

    def _answer_stored(self, rest: deque[Position]) -> None:
        """Count and answer durable appends: as many as one producer has in a row."""
        in_flight = self._in_flight
        position = rest.popleft()
        producer, _, _, _, _, part, _ = in_flight[0]
        receipts: list[tuple[int, int, int]] = []
        messages = size_bytes = 0
        while True:
            _, sequence_id, highest, size, count, _, _ = in_flight.popleft()
            size_bytes += size
            messages += count if 0 < count <= MAX_BATCH_SIZE else 1
            receipts.append((sequence_id, highest, position.entry_id))
            if not rest or part is not None:
                break
            next_producer, _, _, _, _, next_part, next_refusal = in_flight[0]
            if next_producer is not producer or next_part is not None or next_refusal is not None:
                break
            position = rest.popleft()
        self._limits.finished(producer.connection, size_bytes)
        producer.pending -= len(receipts)
        if isinstance(part, ReplicatedMessage):
            if producer.replicated is not None:
                producer.replicated.stored(part, position)
            receipts = [(part.sequence_id, part.highest_sequence_id, position.entry_id)]
        else:
            producer.sequence.stored(last_sequence(sequence_id, highest), position, part)
        store = self._store
        store.durable = position
        store.unsaved_entries += len(receipts)
        store.unsaved_bytes += size_bytes
        producer.messages_in += messages
        producer.bytes_in += size_bytes
        if producer.attached:
            producer.put(encode_send_receipts(producer.producer_id, position.ledger_id, receipts))
        if not producer.pending:
            producer.now_idle()

    def _answer_lost(self, error: MagnetarError) -> None:
        """Answer the oldest append in flight, which failed, and close its producer."""
        producer, sequence_id, _, size, _, _, _ = self._in_flight.popleft()
        self._limits.finished(producer.connection, size)
        producer.pending -= 1
        if producer.replicated is not None:
            producer.replicated.lost()
        self._answer_refused(producer, sequence_id, error)
        # Whatever its code: what comes behind is lost too, or would be stored behind the gap.
        producer.disconnect()
        if not producer.pending:
            producer.now_idle()
        self._answer_refusals()

    def _answer_refusals(self) -> None:
        """Answer refused SENDs, as far as nothing older is in flight."""
        in_flight = self._in_flight
        while in_flight:
            producer, sequence_id, highest, size, _, part, refusal = in_flight[0]
            if refusal is None:
                return
            in_flight.popleft()
            self._limits.finished(producer.connection, size)
            producer.pending -= 1
            if isinstance(refusal, DuplicateMessage):
                if isinstance(part, ReplicatedMessage):
                    sequence_id, highest = part.sequence_id, part.highest_sequence_id
                if producer.attached:
                    producer.receipt(sequence_id, highest, _NO_ID, _NO_ID)
            else:
                self._answer_refused(producer, sequence_id, refusal)
            if not producer.pending:
                producer.now_idle()

    def _answer_refused(self, producer: Producer, sequence_id: int, error: MagnetarError) -> None:
        if producer.attached:
            producer.send_error(sequence_id, error.code, str(error))
            if error.code not in KEEPS_PRODUCER:
                producer.close_at_once()
        if isinstance(error, LEDGER_LOST):
            self._failed(error)


def refuse_damaged(producer: Producer, send: Send) -> MagnetarError | None:
    """Take nothing behind a damaged SEND until it comes again; returns its refusal.

    None: it is not answered, because one before it is missing.
    """
    if producer.is_behind_gap(send.sequence_id):
        return None
    if send.is_chunk:
        # All chunks have one sequence id, so the missing one cannot be named: all start anew.
        producer.stop_taking()
        return InternalError("A chunk was damaged on its way: open the producer again.")
    producer.await_resend(send.sequence_id)
    return DamagedMessage(
        f"The message with sequence id {send.sequence_id} was damaged: send it again."
    )


def _naming_transaction(send: Send) -> Send:
    """The SEND of a transaction, with a message that names the transaction too (L2)."""
    if send.entry is None or send.txnid is None:
        return send
    if transaction_named_by(parse_metadata(send.entry)) is not None:
        return send
    return send._replace(entry=naming_transaction(send.entry, send.txnid))


def _first_of(send: Send) -> int | None:
    return first_sequence(send.sequence_id, send.highest_sequence_id, send.num_messages)


def _transaction(txn: tuple[int, int] | None) -> str:
    return "no transaction" if txn is None else f"transaction {TxnId(*txn)}"
