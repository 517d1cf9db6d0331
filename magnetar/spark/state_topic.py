"""A transaction key's log in its state topic: it is written, and read up to a written message.

`key_log.py` has the rules L1 to L6.  The state topic is a scalable topic with one segment:
Apache Pulsar 5.0.0-M1 does not show what transactions of its scalable coordinators wrote to other
topics, and between several segments messages have no order.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import magnetar
from magnetar import Checkpoint, TxnId
from magnetar.errors import (
    InvalidTransactionStatus,
    MagnetarError,
    OperationTimedOut,
    TopicNotFound,
    TransactionNotFound,
)
from magnetar.message_id import EntryId
from magnetar.spark.errors import StateUnreadable
from magnetar.spark.key_log import (
    NOWHERE,
    Entry,
    EntryKind,
    KeyState,
    MessagePlace,
    MessageRef,
    digest_of,
    entry_of,
    text_of,
)
from magnetar.transactions.work import Work

__all__ = [
    "DEFAULT_STATE_TOPIC",
    "KEEPER",
    "KeyLog",
    "ReadSoFar",
    "abort_quietly",
    "keep",
]

DEFAULT_STATE_TOPIC: Final = "topic://public/default/pulsar5-spark-state"
KEEPER: Final = "pulsar5-spark-state"
"""A subscription without consumers: it keeps brokers from deleting messages of the topic."""
READ_S: Final = 180.0
"""How long a reader waits without any message.

It may wait for a transaction of another key, whose deadline is 60 s, and Apache Pulsar 5.0.0-M1
checks deadlines every 60 s.
"""
_OF_ANOTHER_ROLE: Final = "neither the owner"
"""Words of Apache Pulsar's error for a wrong role, after which the transaction may be open."""
_PERHAPS_OF_ANOTHER_ROLE: Final = "another client began it"
"""Words of Magnetar's error for a wrong role, and for a transaction that ended long ago.

Brokers do not tell roles whether others have a transaction open.
"""
_LONGEST_TIMEOUT_MS: Final = 24 * 3600 * 1000
"""The longest timeout that brokers give to a transaction."""
_AFTER_DEADLINE_MS: Final = 10 * 60 * 1000
"""A transaction has ended this long after its deadline, though clocks differ."""
_POLL_S: Final = 0.2
_BATCH: Final = 1000
APPEND_TRIES: Final = 10
"""Tries of a message whose receipt has no place: it was stored before the connection broke."""


@dataclass(slots=True)
class ReadSoFar:
    """The part of a key's log that was read; the next reader of the process continues from it."""

    begin: MessageRef | None = None
    """The message with which reading goes on; None: the first of the topic."""
    place: MessagePlace = NOWHERE
    """The place of the last message that is in `state`."""
    state: KeyState = field(default_factory=KeyState)
    settled: set[TxnId] = field(default_factory=set)
    """Transactions that are pending in `state` and have ended."""
    over_ms: dict[TxnId, int] = field(default_factory=dict)
    """When each of those pending in `state` has surely ended, in ms since 1970."""


class KeyLog:
    """The log of one key, open for one commit or one opening; made by `opened`.

    `nonce` names its writer.  Places of messages are compared, so each message is an entry.
    """

    def __init__(
        self,
        client: magnetar.Client,
        key: str,
        nonce: str,
        entitled: Callable[[KeyState], bool],
        known: ReadSoFar,
        producer: magnetar.Producer[bytes],
        reader: magnetar.CheckpointConsumer[bytes],
    ) -> None:
        self.nonce: Final = nonce
        self._client = client
        self._key = key
        self._entitled = entitled
        self._known = known
        self._producer = producer
        self._reader = reader
        self._expected = known.begin
        """The message that must be read first (L6); None: any."""
        self._recorded: TxnId | None = None
        self._may_have_committed = False
        """Whether a settled transaction may have a record after what was read."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        client: magnetar.Client,
        topic: str,
        key: str,
        nonce: str,
        *,
        entitled: Callable[[KeyState], bool],
        known: ReadSoFar,
    ) -> AsyncIterator["KeyLog"]:
        """Open the log of a key, to be read from the last known message on.

        `entitled` decides by the state whether the caller may abort the transactions of others: not
        if the key was opened since.  Raises `StateUnreadable`.
        """
        try:
            # Without batching each message is an entry, and has a place of its own.
            producer = await client.producer(topic, batching=False)
        except TopicNotFound as error:
            raise StateUnreadable(
                f"There is no state topic {topic} ({error}) Make it, with one segment, as brokers "
                "of Apache Pulsar 5.0.0-M1 do not: PUT /admin/v2/scalable/TENANT/NAMESPACE/NAME"
                "?numInitialSegments=1; or name another one to open_key: state_topic=..."
            ) from error
        async with producer:
            segments = (await client.layout(topic)).segments
            if list(segments) != [0] or segments[0].legacy:
                raise StateUnreadable(
                    f"The state topic {topic} has the segments {sorted(segments)}: it must be a "
                    "scalable topic with one segment that was never split. Make another one, "
                    "with splitting switched off, and name it to open_key: state_topic=..."
                )
            start = Checkpoint.EARLIEST
            if known.begin is not None:
                ledger, entry = known.begin.place
                # Reading begins behind a checkpoint, so with the known message (L6).
                start = Checkpoint.of({0: EntryId(ledger, entry - 1)})
            async with client.checkpoint_consumer(topic, start=start) as reader:
                yield cls(client, key, nonce, entitled, known, producer, reader)

    async def append(self, entry: Entry) -> MessageRef:
        """Write a message; its place and digest.  Raises `OperationTimedOut`."""
        value = text_of(entry).encode()
        for _ in range(APPEND_TRIES):
            sent = await self._producer.send(value, key=self._key)
            if sent.entry.key > NOWHERE:
                return MessageRef(sent.entry.key, digest_of(value))
        raise OperationTimedOut(
            f"Brokers did not say where they stored a message of key {self._key!r}, "
            f"{APPEND_TRIES} times: connections to them break. Start again."
        )

    async def record(self, entry: Entry, transaction: Work) -> None:
        """Write a message in a transaction."""
        value = text_of(entry).encode()
        await self._producer.send(value, key=self._key, transaction=transaction)

    async def mark(self) -> MessageRef:
        """Write a `mark`: a message without meaning, up to which the log can be read."""
        return await self.append(Entry(EntryKind.MARK, self.nonce))

    def has_recorded(self, own: TxnId) -> bool:
        """Whether the log has the record of that transaction, if it was named when read (L4)."""
        return self._recorded == own

    async def read_up_to(self, written: MessageRef, own: TxnId | None = None) -> KeyState:
        """The state of the key after that message, which this log has appended (L1).

        The transactions of all earlier intents, except `own`, have ended by then.
        Raises `OperationTimedOut`, `StateUnreadable`.
        """
        # L6: a message that was just written comes after all known ones.
        if self._expected is not None and written.place <= self._expected.place:
            raise _another_topic(self._key, self._expected)
        state = await self._read(written.place, own)
        await self._settle(own)
        if self._may_have_committed:
            self._may_have_committed = False
            state = await self._read((await self.mark()).place, own)
        return state

    async def _read(self, place: MessagePlace, own: TxnId | None) -> KeyState:
        known, loop = self._known, asyncio.get_running_loop()
        end = loop.time() + READ_S
        while known.place < place or self._expected is not None:
            messages = await self._reader.receive_batch(_BATCH, _POLL_S)
            for message in messages:
                self._take(message, own)
            if messages:
                end = loop.time() + READ_S
                continue
            await self._settle(own)
            if loop.time() >= end:
                raise OperationTimedOut(
                    f"A message of key {self._key!r} cannot be read for {READ_S:g} s: a "
                    "transaction is open before it in the state topic. Its deadline ends it; "
                    "start again then."
                )
        return known.state

    def _take(self, message: magnetar.Message[bytes], own: TxnId | None) -> None:
        known, found = self._known, MessageRef(message.id.entry.key, digest_of(message.value))
        if self._expected not in (None, found):
            raise _another_topic(self._key, self._expected)
        self._expected = None
        if found.place <= known.place:
            return
        if message.key == self._key:
            entry = entry_of(message.value)
            known.state = known.state.after(entry)
            if entry.kind is EntryKind.RECORD and entry.txn == own:
                self._recorded = own
            if entry.kind is EntryKind.INTENT and entry.txn is not None:
                # The transaction began before its intent was written.
                timeout_ms = entry.timeout_ms or _LONGEST_TIMEOUT_MS
                known.over_ms[entry.txn] = message.publish_time_ms + timeout_ms + _AFTER_DEADLINE_MS
        known.place, known.begin = found.place, found

    async def _settle(self, own: TxnId | None) -> None:
        """Abort the transactions that have an intent and no record, except `own` (L2)."""
        known = self._known
        if not self._entitled(known.state):
            return
        known.settled.intersection_update(known.state.pending)
        for txn in known.over_ms.keys() - set(known.state.pending):
            del known.over_ms[txn]
        for txn in known.state.pending:
            if txn == own or txn in known.settled:
                continue
            try:
                await self._client.end_transaction(txn, commit=False)
            except InvalidTransactionStatus:
                pass  # It has ended; the record shows whether it was committed.
            except TransactionNotFound as error:
                # Brokers let no other role end a transaction, so it must not count as ended.
                if _OF_ANOTHER_ROLE in str(error) or (
                    _PERHAPS_OF_ANOTHER_ROLE in str(error) and not self._is_over(txn)
                ):
                    raise _not_ours(txn, error) from error
            known.settled.add(txn)
            self._may_have_committed = True

    def _is_over(self, txn: TxnId) -> bool:
        """Whether a pending transaction has surely ended, as its deadline passed long ago."""
        over_ms = self._known.over_ms.get(txn)
        return over_ms is not None and time.time() * 1000 > over_ms


def _another_topic(key: str, expected: MessageRef | None) -> StateUnreadable:
    return StateUnreadable(
        f"The last known message of key {key!r} ({expected}) is not in its state topic any more: "
        "the topic was deleted and made anew, or its messages were. Nothing was committed. Check "
        "which batches the target has, and open the key again: the key may have forgotten the "
        "last ones."
    )


def _not_ours(txn: TxnId, error: MagnetarError) -> StateUnreadable:
    return StateUnreadable(
        f"Transaction {txn} was announced under this key, apparently by another role, so it "
        f"cannot be aborted and may be committed yet ({error}). Open the key with that role, or 10 "
        "minutes after the deadline of the transaction."
    )


async def keep(client: magnetar.Client, topic: str) -> None:
    """Create the subscription `KEEPER`, for which brokers keep the messages of the topic."""
    async with client.queue_consumer(
        topic, KEEPER, initial_position="earliest", receiver_queue_size=1
    ):
        pass


async def abort_quietly(client: magnetar.Client, txn: TxnId) -> bool:
    """Try to abort a transaction; whether it is aborted.  If not, its deadline aborts it."""
    try:
        await client.end_transaction(txn, commit=False)
    except MagnetarError:
        return False
    return True
