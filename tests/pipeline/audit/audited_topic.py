"""A topic with everything in it that an audit looks at, and a broker whose records can be edited.

Rules: records are edited while the broker is down, by the project's own store; what is edited is
what a lost write, a stale owner or a defect would leave.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import magnetar
import magnetar.sync
from magnetar import SegmentCount, Winner
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.row_hash import hash_sum, row_hash
from storage.clock import SystemClock
from storage.data_directory import metadata_path
from storage.metadata.sqlite import SqliteMetadataStore
from tests.support.broker_process import BrokerProcess
from txn import records
from txn.counters import TransactionCounters
from txn.records import Header, TxnState
from txn.store import StoredHeader, TransactionStore

ROWS = [(f"k{number % 7}", b"%d" % number) for number in range(60)]


class AuditedTopic:
    """A topic of one segment that was split, on a broker of its own."""

    def __init__(self, broker: BrokerProcess, name: str) -> None:
        self.broker = broker
        self.topic = f"topic://public/default/audited-{name}"
        self.key = f"query-{name}"
        self.committed = self.aborted = self.left_open = TxnId(0, 0)
        """The last transaction that ended so, or did not."""
        self.groups: list[TxnId] = []
        self.segments: list[str] = []
        """Their topics."""

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.broker.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.broker.http_port}"

    async def fill(self) -> None:
        """Rows of producers, of transactions, of attempts; before and after a split."""
        path = self.topic.replace("topic://", "/scalable/")
        await self._done("PUT", path, numInitialSegments=1)
        async with magnetar.connect(self.url) as client:
            await self._some(client)
            await self._done("POST", f"{path}/split/0")
            await self._some(client)
            self.segments = [
                each.topic for each in (await client.layout(self.topic)).segments.values()
            ]

    async def _done(self, method: str, path: str, **query: int) -> None:
        status, answer = await self.broker.rest(method, path, **query)
        assert status in (200, 204), answer

    async def _some(self, client: magnetar.Client) -> None:
        async with client.producer(self.topic) as producer:
            await self._send(client, producer)
            async with client.transaction() as committed:
                await self._send(client, producer, committed)
                self.committed = _id(committed)
            aborted = await client.transaction()
            await self._send(client, producer, aborted)
            await aborted.abort()
            self.aborted = _id(aborted)
            await self._batch(client, producer)
            await self._send(client, producer)

    async def _batch(self, client: magnetar.Client, producer: magnetar.Producer[bytes]) -> None:
        """One batch of a query: an attempt that wins and one that loses."""
        async with client.transaction_key(self.key) as key:
            number, nonce = len(self.groups), f"nonce-{len(self.groups)}"
            loser = await key.begin_attempt(nonce, query="q", batch=number)
            winner = await key.begin_attempt(nonce, query="q", batch=number)
            assert loser is not None
            assert winner is not None
            await self._send(client, producer, loser)
            counts = await self._send(client, producer, winner)
            await winner.settled()
            await loser.settled()
            told = Winner(winner.id, counts)
            await key.commit_group(
                nonce,
                winner.group,
                [told],
                query="q",
                batch=number,
                positions=positions(number + 1),
            )
            self.groups.append(TxnId(*winner.group))

    async def _send(
        self,
        client: magnetar.Client,
        producer: magnetar.Producer[bytes],
        transaction: "magnetar.Transaction | magnetar.Attempt | None" = None,
    ) -> Mapping[str, SegmentCount]:
        """All rows; how many came to lie where, by segment topic."""
        sent = [
            (key, value, producer.send_nowait(value, key=key, transaction=transaction))
            for key, value in ROWS
        ]
        await producer.flush()
        hashes: dict[int, list[int]] = {}
        for key, value, receipt in sent:
            where = (await receipt).segment_id
            hashes.setdefault(where, []).append(row_hash(key.encode(), value))
        segments = (await client.layout(self.topic)).segments
        return {
            segments[where].topic: SegmentCount(len(found), hash_sum(found))
            for where, found in hashes.items()
        }

    def leave_open(self, client: magnetar.sync.Client) -> None:
        """A transaction with rows in it, open for as long as that client is."""
        transaction = client.transaction(timeout_s=600)
        with client.producer(self.topic) as producer:
            for key, value in ROWS:
                producer.send_nowait(value, key=key, transaction=transaction)
            producer.flush()
        self.left_open = TxnId(*transaction.id)

    async def send_as_stored(self, numbers: Sequence[int], *, key: str | None = "k") -> None:
        """Messages of one producer and key whose numbers come to lie in this order."""
        raw = await self.broker.connect()
        try:
            producer = await raw.create_producer(self.segments[-1])
            for number in numbers:
                about = pb.MessageMetadata(
                    partition_key=key, sequence_id=number, publish_time=1_000 + number
                )
                await producer.send(b"%d" % number, metadata=about, sequence_id=number)
        finally:
            await raw.close()


@asynccontextmanager
async def edited(broker: BrokerProcess) -> AsyncIterator["Records"]:
    """The records, while the broker is down; it is up again afterwards."""
    await broker.terminate()
    metadata = await SqliteMetadataStore.open(metadata_path(broker.data_dir), SystemClock())
    try:
        yield Records(TransactionStore(metadata, TransactionCounters()))
    finally:
        await metadata.close()
    await broker.start()


class Records:
    """Records of transactions, changed behind the broker's back."""

    def __init__(self, store: TransactionStore) -> None:
        self.store = store

    async def flip(self, txn: TxnId, state: TxnState) -> None:
        """The header says otherwise."""
        stored = await self._header(txn)
        await self.store.end_header(txn, replace(stored.header, state=state), stored.version)

    async def copy(self, txn: TxnId, least: int) -> None:
        """A second group that committed the same batch."""
        stored = await self._header(txn)
        await self.store.create_header(TxnId(txn.most, least), stored.header)

    async def change(self, txn: TxnId, header: Header) -> None:
        """The header says something else."""
        stored = await self._header(txn)
        await self.store.end_header(txn, header, stored.version)

    async def header(self, txn: TxnId) -> Header:
        """What it says."""
        return (await self._header(txn)).header

    async def unmark(self, segments: list[str], txn: TxnId) -> None:
        """Nothing is left of an abort but its header."""
        for segment in segments:
            await self.store.forget_aborted(segment, txn)
            for claim in await self.store.claims_on(segment):
                if claim.txn == txn:
                    key = records.claim_key(txn, segment, claim.epoch)
                    await self.store.delete_operation(txn, key)

    async def _header(self, txn: TxnId) -> StoredHeader:
        stored = await self.store.read_header(txn)
        assert stored is not None
        return stored


def positions(entry_id: int) -> str:
    """Of a query that has read one segment of another topic so far."""
    cut = {
        "v": 1,
        "topic": "topic://public/default/input",
        "name": "",
        "pos": {"0": [1, entry_id, 0]},
    }
    return json.dumps([cut])


def _id(named: "magnetar.Transaction") -> TxnId:
    return TxnId(*named.id)
