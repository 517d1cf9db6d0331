"""Listing of all stored records of transactions, for audits."""

from collections.abc import AsyncIterator, Mapping

from broker.app.service import Broker
from broker.scalable.records import segment_of
from broker.topics.topic import TopicNotFound
from magnetar.protocol.names import TopicDomain, TopicName
from txn.group import Counts, Group, GroupCommit
from txn.records import Header, TxnState
from txn.store import StoredHeader

Json = dict[str, object]
_FOR_EVER_MS = 10**15


class TransactionRecords:
    """Streams every stored record of transactions, for audits.

    Records come from the store, not from memory, so any broker can stream all of them; no topic is
    loaded.  They are read in pages; changes meanwhile may or may not be seen.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._store = broker.transactions.store
        self._retention_ms = int(broker.settings.transaction_gc_retention_s * 1000)

    async def headers(self, state: TxnState) -> AsyncIterator[Json]:
        """All headers in a state: open ones by their deadline, others by their end."""
        if state is TxnState.OPEN:
            pages = self._store.open_headers()
        else:
            pages = self._store.ended_headers(state, _FOR_EVER_MS)
        async for page in pages:
            for stored in page:
                yield header_json(stored, self._retention_ms)

    async def segments(self, name: TopicName) -> AsyncIterator[Json]:
        """Each segment of a topic, with its claims, its aborted set and its owner's epoch.

        Raises `TopicNotFound`, `ScalableTopicNotFound`.
        """
        for each in await self._names(name):
            yield await self._segment(each)

    async def _names(self, name: TopicName) -> list[str]:
        broker = self._broker
        if name.domain is TopicDomain.TOPIC:
            layout = (await broker.scalable.get(name)).layout
            return [str(segment_of(name, each)) for _, each in sorted(layout.segments.items())]
        if not await broker.topics.exists(name):
            raise TopicNotFound(f"Topic {name} does not exist: check its name.")
        return [str(name)]

    async def _segment(self, segment: str) -> Json:
        claims = await self._store.claims_on(segment)
        aborted = await self._store.aborted_on(segment)
        owner = await self._store.read_owner(segment)
        return {
            "segment": segment,
            "ownerEpoch": None if owner is None else owner.owner.epoch,
            "claims": [
                {"txnId": str(each.txn), "epoch": each.epoch, "floor": each.floor.text}
                for each in claims
            ],
            "aborted": {str(txn): up_to.text for txn, up_to in aborted.items()},
        }


def header_json(stored: StoredHeader, retention_ms: int) -> Json:
    """One header, with the commit of its group and the end of its retention."""
    header = stored.header
    ended_ms = header.finalized_ms
    shown: Json = {
        "txnId": str(stored.txn),
        "status": header.state.value,
        "owner": header.owner,
        "createdMs": header.created_ms,
        "deadlineMs": header.deadline_ms,
        "finalizedMs": ended_ms,
        "keptUntilMs": None if ended_ms is None else ended_ms + retention_ms,
        **_key(header),
    }
    if header.group is not None:
        shown["group"] = group_json(header.group)
    return shown


def _key(header: Header) -> Json:
    if header.key_epoch is None:
        return {}
    return {"transactionKey": header.key_epoch.key, "transactionKeyEpoch": header.key_epoch.epoch}


def group_json(group: Group) -> Json:
    """The number of reserved attempts of a group, and its commit."""
    shown: Json = {"nonce": group.nonce, "reserved": group.reserved}
    if group.commit is not None:
        shown["commit"] = _commit(group.commit)
    return shown


def _commit(commit: GroupCommit) -> Json:
    shown: Json = {
        "query": commit.batch.query,
        "batch": commit.batch.number,
        "positions": commit.positions,
        "winners": {str(i): _counts(counts) for i, counts in sorted(commit.winners.items())},
    }
    if commit.totals is not None:
        shown["totals"] = _counts(commit.totals)
    return shown


def _counts(counts: Counts) -> Mapping[str, object]:
    # Hash sums are text, because not every reader of JSON has integers of 64 bits.
    return {name: [each.messages, str(each.hash_sum)] for name, each in sorted(counts.items())}
