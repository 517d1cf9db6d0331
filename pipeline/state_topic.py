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
  another one does not take it for ended (Magnetar's do not say which it is).
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
from pipeline.key_log import Entry, EntryKind, KeyState, entry_of, text_of

__all__ = [
    "DEFAULT_STATE_TOPIC",
    "KEEPER",
    "KeyLog",
    "Place",
    "ReadSoFar",
    "abort_quietly",
    "keep",
]

DEFAULT_STATE_TOPIC: Final = "topic://public/default/pulsar5-spark-state"
KEEPER: Final = "pulsar5-spark-state"
READ_S: Final = 180.0
"""For how long nothing may come of what was written: a deadline of 60 s, a look every 60 s."""
_OF_ANOTHER_ROLE: Final = "neither the owner"
"""By these words Apache Pulsar says so of a transaction that may be open; else it has ended."""
_POLL_S: Final = 0.2
_BATCH: Final = 1000
Place = tuple[int, int]
"""Ledger and entry of a message."""
NOWHERE: Final[Place] = (-1, -1)


@dataclass(slots=True)
class ReadSoFar:
    """What a reader of a key's log knows; goes on with the next reader of the same process."""

    place: Place = NOWHERE
    """Of the last message that is in `state`."""
    state: KeyState = field(default_factory=KeyState)


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
        self._settled: set[TxnId] = set()
        self._may_have_committed = False
        """Of those some record may stand behind what was read."""

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
        """Of that key, read from behind what is known on.

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
            if known.place != NOWHERE:
                start = Checkpoint.of({0: EntryId(*known.place)})
            async with client.checkpoint_consumer(topic, start=start) as reader:
                yield cls(client, key, nonce, entitled, known, producer, reader)

    async def append(self, entry: Entry, transaction: Work | None = None) -> Place:
        """Write a message; where it is."""
        sent = await self._producer.send(
            text_of(entry).encode(), key=self._key, transaction=transaction
        )
        return sent.entry.key

    async def mark(self) -> Place:
        """Write one that says nothing."""
        return await self.append(Entry(EntryKind.MARK, self.nonce))

    async def read_up_to(self, place: Place, own: TxnId | None = None) -> KeyState:
        """The key after the message there; intents before it, save `own`, have come to their end.

        Raises `OperationTimedOut`, `StateUnreadable`.
        """
        state = await self._read(place, own)
        await self._settle(own)
        if self._may_have_committed:
            self._may_have_committed = False
            state = await self._read(await self.mark(), own)
        return state

    async def _read(self, place: Place, own: TxnId | None) -> KeyState:
        known, loop = self._known, asyncio.get_running_loop()
        end = loop.time() + READ_S
        while known.place < place:
            messages = await self._reader.receive_batch(_BATCH, _POLL_S)
            for message in messages:
                if message.key == self._key:
                    known.state = known.state.after(entry_of(message.value))
                known.place = message.id.entry.key
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

    async def _settle(self, own: TxnId | None) -> None:
        """Abort what has an intent and no record, save `own` (L2)."""
        if not self._entitled(self._known.state):
            return
        for txn in self._known.state.pending:
            if txn == own or txn in self._settled:
                continue
            try:
                await self._client.end_transaction(txn, commit=False)
            except InvalidTransactionStatus:
                pass  # it has ended; the record shows whether it was committed
            except TransactionNotFound as error:
                if _OF_ANOTHER_ROLE in str(error):
                    raise _not_ours(txn, error) from error
            self._settled.add(txn)
            self._may_have_committed = True


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
