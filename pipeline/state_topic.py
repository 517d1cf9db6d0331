"""A transaction key's log in its state topic: written to, and read up to what was written.

Rules: as of `key_log.py`, and

- The topic has one segment and always had: of several nothing could be said about what came first.
- It is scalable (`topic://`): Apache Pulsar 5.0.0-M1 shows nothing in others of what the
  transactions of its scalable coordinators wrote.  There brokers do not make such topics.
- Each message is an entry of its own, so places of messages compare.
- Whoever reads waits: for transactions of this key only until they are aborted (L2), for those of
  other keys until these have ended them, or the coordinator at their deadline (Apache Pulsar
  5.0.0-M1 looks every 60 s); `READ_S` at most since something came.
- All who use a key have one role: brokers let nobody else end a transaction, so an opener of
  another one does not take it for ended.
- The subscription `KEEPER` is never read from: it keeps brokers from deleting what no other
  subscription waits for.
"""

import asyncio
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
from magnetar.transactions.work import Work
from pipeline.errors import StateUnreadable
from pipeline.key_log import (
    NOWHERE,
    Entry,
    EntryKind,
    KeyState,
    Place,
    Written,
    digest_of,
    entry_of,
    text_of,
)

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
READ_S: Final = 180.0
"""For how long nothing may come of what was written: a deadline of 60 s, a look every 60 s."""
_OF_ANOTHER_ROLE: Final = "neither the owner"
"""By these words brokers say so of a transaction that may be open; else it has ended."""
_POLL_S: Final = 0.2
_BATCH: Final = 1000
APPEND_TRIES: Final = 10
"""Of a message whose place brokers do not tell, as they had it before its connection broke."""


@dataclass(slots=True)
class ReadSoFar:
    """What a reader of a key's log knows; goes on with the next reader of the same process."""

    begin: Written | None = None
    """With which reading goes on; None: with the first of the topic."""
    place: Place = NOWHERE
    """Of the last message that is in `state`."""
    state: KeyState = field(default_factory=KeyState)
    settled: set[TxnId] = field(default_factory=set)
    """Of what is pending in `state`, what has ended."""


class KeyLog:
    """See the module's rules.  Made by `opened`."""

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
        """What is to be read first (L6)."""
        self._recorded: TxnId | None = None
        self._may_have_committed = False
        """Of what was settled some record may stand behind what was read."""

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
        """Of that key, read from the last message that is known on.

        `entitled`: whether intents of others are this one's to end, as nobody has opened the key
        since.  Raises `StateUnreadable`.
        """
        try:
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
                start = Checkpoint.of({0: EntryId(ledger, entry - 1)})  # it is read from behind it
            async with client.checkpoint_consumer(topic, start=start) as reader:
                yield cls(client, key, nonce, entitled, known, producer, reader)

    async def append(self, entry: Entry) -> Written:
        """Write a message; where it is.  Raises `OperationTimedOut`."""
        value = text_of(entry).encode()
        for _ in range(APPEND_TRIES):
            sent = await self._producer.send(value, key=self._key)
            if sent.entry.key > NOWHERE:
                return Written(sent.entry.key, digest_of(value))
        raise OperationTimedOut(
            f"Brokers did not tell where they have what was written of key {self._key!r}, "
            f"{APPEND_TRIES} times: connections to them break. Start again."
        )

    async def record(self, entry: Entry, transaction: Work) -> None:
        """Write a message in a transaction."""
        value = text_of(entry).encode()
        await self._producer.send(value, key=self._key, transaction=transaction)

    async def mark(self) -> Written:
        """Write one that says nothing."""
        return await self.append(Entry(EntryKind.MARK, self.nonce))

    def has_recorded(self, own: TxnId) -> bool:
        """Whether the record of that transaction, named when it was read, was there (L4)."""
        return self._recorded == own

    async def read_up_to(self, written: Written, own: TxnId | None = None) -> KeyState:
        """The key after that message, written since this was opened.

        Intents before it, save `own`, have come to their end.
        Raises `OperationTimedOut`, `StateUnreadable`.
        """
        if self._expected is not None and written.place <= self._expected.place:
            raise _another_topic(self._key, self._expected)
        state = await self._read(written.place, own)
        await self._settle(own)
        if self._may_have_committed:
            self._may_have_committed = False
            state = await self._read((await self.mark()).place, own)
        return state

    async def _read(self, place: Place, own: TxnId | None) -> KeyState:
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
                    f"What was written of key {self._key!r} cannot be read for {READ_S:g} s: a "
                    "transaction is open before it in the state topic. Its deadline ends it; "
                    "start again then."
                )
        return known.state

    def _take(self, message: magnetar.Message[bytes], own: TxnId | None) -> None:
        known, found = self._known, Written(message.id.entry.key, digest_of(message.value))
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
        known.place, known.begin = found.place, found

    async def _settle(self, own: TxnId | None) -> None:
        """Abort what has an intent and no record, save `own` (L2)."""
        known = self._known
        if not self._entitled(known.state):
            return
        known.settled.intersection_update(known.state.pending)
        for txn in known.state.pending:
            if txn == own or txn in known.settled:
                continue
            try:
                await self._client.end_transaction(txn, commit=False)
            except InvalidTransactionStatus:
                pass  # it has ended; the record shows whether it was committed
            except TransactionNotFound as error:
                if _OF_ANOTHER_ROLE in str(error):
                    raise _not_ours(txn, error) from error
            known.settled.add(txn)
            self._may_have_committed = True


def _another_topic(key: str, expected: Written | None) -> StateUnreadable:
    return StateUnreadable(
        f"What was known of key {key!r} is not in its state topic any more (message {expected}): "
        "the topic was deleted and made anew, or its messages were. Nothing was committed. Open "
        "the key again, after a look at which batches the target has: the key may have "
        "forgotten the last ones."
    )


def _not_ours(txn: TxnId, error: MagnetarError) -> StateUnreadable:
    return StateUnreadable(
        f"Transaction {txn} was announced under this key by another role, so it cannot be aborted "
        f"and may be committed yet ({error}). Open the key with that role, or when the deadline "
        "of the transaction is over and brokers have forgotten it."
    )


async def keep(client: magnetar.Client, topic: str) -> None:
    """Have the subscription that keeps what is written there."""
    async with client.queue_consumer(
        topic, KEEPER, initial_position="earliest", receiver_queue_size=1
    ):
        pass


async def abort_quietly(client: magnetar.Client, txn: TxnId) -> bool:
    """Abort a transaction, if it can be; else its deadline does.  Whether it is aborted."""
    try:
        await client.end_transaction(txn, commit=False)
    except MagnetarError:
        return False
    return True
