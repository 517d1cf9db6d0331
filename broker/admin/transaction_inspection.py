"""Inspection of transactions by operators: open ones, one of them, and those that pin a topic."""

import asyncio
from collections.abc import Sequence

from broker.app.service import Broker
from broker.scalable.records import segment_of
from broker.topics.topic import Topic, TopicNotFound
from config.bounds import TXN_CLAIMS_READ, TXN_LISTED, TXN_PINS_SHOWN
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from txn.group import GroupCommit, with_totals
from txn.header import EndVerdict, refusal_error
from txn.records import AckRecord, Claim, Header

Json = dict[str, object]


class TransactionInspection:
    """Lists open transactions, shows one, and finds those that keep readers from a topic's end.

    With an `owner` only transactions that this role began are shown.  Answers are JSON; times are
    milliseconds, positions `ledger:entry`.  A list has at most TXN_LISTED transactions and their
    total number; of a segment at most TXN_PINS_SHOWN are shown.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._transactions = broker.transactions

    def open_transactions(
        self,
        coordinator: CoordinatorId | None,
        older_than_ms: int,
        limit: int,
        *,
        owner: str | None = None,
    ) -> Json:
        """Transactions that are open for longer than `older_than_ms`, the oldest first.

        They are those of one coordinator, or of all that are led here.
        """
        before_ms = self._broker.clock.now_ms() - older_than_ms
        count, shown = self._transactions.coordinators.oldest_open(
            coordinator, before_ms, min(limit, TXN_LISTED), owner=owner
        )
        return {
            "open": count,
            "transactions": [self._summary(each.txn, each.header) for each in shown],
        }

    def coordinator_stats(self) -> Json:
        """Statistics of each coordinator that is led here, by its number, in Pulsar's form."""
        return {
            str(one.coordinator_id): {
                "state": "Ready",
                "leastSigBits": one.last_number,
                "lowWaterMark": -1,
                "ongoingTxnSize": one.open_count,
            }
            for one in self._transactions.coordinators.led()
        }

    async def require_own(self, txn: TxnId, owner: str) -> None:
        """Raise `TransactionNotFound` unless that role began the transaction."""
        found = self._transactions.coordinators.find_open(txn)
        if found is None or found.header.owner != owner:
            found = await self._transactions.store.read_header(txn, fresh=True)
        if found is None or found.header.owner != owner:
            raise refusal_error(txn, None, EndVerdict.NOT_FOUND)

    async def show(self, txn: TxnId, *, owner: str | None = None) -> Json:
        """One transaction with its writes and acknowledgements.  Raises `TransactionNotFound`."""
        store = self._transactions.store
        stored, found = await asyncio.gather(store.read_header(txn), store.operations_of(txn))
        if stored is None or owner not in (None, stored.header.owner):
            raise refusal_error(txn, None, EndVerdict.NOT_FOUND)
        return {
            **self._summary(txn, stored.header),
            "writes": [_claim(each) for each in found if isinstance(each, Claim)],
            "acknowledgements": [_ack(each) for each in found if isinstance(each, AckRecord)],
        }

    async def why(self, name: TopicName, *, owner: str | None = None) -> Json:
        """Each segment of a topic, with the open transactions that keep readers from its end.

        `open` counts those of all roles.  Raises `TopicNotFound`, `ScalableTopicNotFound`.
        """
        broker = self._broker
        if name.domain is TopicDomain.TOPIC:
            layout = (await broker.scalable.get(name)).layout
            names = [
                str(segment_of(name, segment)) for _, segment in sorted(layout.segments.items())
            ]
        elif await broker.topics.exists(name):
            names = [str(name)]
        else:
            raise TopicNotFound(f"Topic {name} does not exist: check its name.")
        missing = len(names) - sum(each in broker.topics.loaded() for each in names)
        limit = max(TXN_PINS_SHOWN, TXN_CLAIMS_READ // max(1, missing))
        segments = []
        for each in names:
            topic = broker.topics.loaded().get(each)
            if topic is None:
                # Not loaded for this: then it has no readers.
                segments.append(await self._unloaded_segment(each, limit, owner))
            else:
                segments.append(await self._loaded_segment(topic, owner))
                await asyncio.sleep(0)  # others go on between segments with many transactions
        return {"topic": str(name), "segments": segments}

    async def _unloaded_segment(self, name: str, limit: int, owner: str | None) -> Json:
        """A segment that is not loaded, by at most `limit` of its claims, the lowest floor first.

        A transaction's first write is after its floor.
        """
        claims = await self._transactions.store.some_claims_on(name, limit)
        floors: dict[TxnId, Position] = {}
        for claim in claims:
            floors[claim.txn] = min(claim.floor, floors.get(claim.txn, claim.floor))
        held = sorted(floors, key=lambda txn: floors[txn])[:TXN_PINS_SHOWN]
        return {
            "segment": name,
            "loaded": False,
            "open": len(floors),
            "more": len(claims) >= limit,
            "transactions": await self._pins(
                held, [{"floor": floors[t].text} for t in held], owner
            ),
        }

    async def _loaded_segment(self, topic: Topic, owner: str | None) -> Json:
        pins = topic.buffer.open_transactions(TXN_PINS_SHOWN)
        details: list[Json] = [
            {
                "state": pin.state.value,
                "firstPosition": None if pin.first is None else pin.first.text,
                "readableUpTo": None if pin.pin is None else pin.pin.text,
                "entries": pin.entries,
                "ofEarlierOwner": pin.loaded,
            }
            for pin in pins
        ]
        last, horizon = topic.ledger.last_confirmed, topic.max_read_position()
        return {
            "segment": str(topic.name),
            "loaded": True,
            "state": topic.state.value,
            "lastConfirmed": last.text,
            "horizon": horizon.text,
            "heldBack": horizon < last,
            "open": topic.buffer.unfinished,
            "more": False,
            "transactions": await self._pins([pin.txn for pin in pins], details, owner),
        }

    async def _pins(
        self, txns: Sequence[TxnId], details: Sequence[Json], owner: str | None
    ) -> list[Json]:
        headers = await asyncio.gather(*(self._header(txn) for txn in txns))
        return [
            {**({"txnId": str(txn)} if header is None else self._summary(txn, header)), **more}
            for txn, more, header in zip(txns, details, headers, strict=True)
            if owner is None or (header is not None and header.owner == owner)
        ]

    async def _header(self, txn: TxnId) -> Header | None:
        found = self._transactions.coordinators.find_open(txn)
        stored = found or await self._transactions.store.read_header(txn)
        return None if stored is None else stored.header

    def _summary(self, txn: TxnId, header: Header) -> Json:
        return {
            **_group(txn, header),
            "txnId": str(txn),
            "status": header.state.value,
            "owner": header.owner,
            "createdMs": header.created_ms,
            "ageMs": max(0, self._broker.clock.now_ms() - header.created_ms),
            "timeoutMs": header.timeout_ms,
            "deadlineMs": header.deadline_ms,
            "finalizedMs": header.finalized_ms,
        }


def _group(txn: TxnId, header: Header) -> Json:
    """Members of a group, with its reservation and commit, or of an attempt, with its group."""
    group = header.group
    if group is None:
        return {}
    if txn.attempt_index:
        return {"groupId": str(txn.group), "attempt": txn.attempt_index}
    commit = group.commit
    shown: Json = {"nonce": group.nonce, "attemptsReserved": group.reserved}
    if commit is not None:
        shown |= {
            "query": commit.batch.query,
            "batch": commit.batch.number,
            "positions": commit.positions,
            "winners": len(commit.winners),
            "messages": _messages(commit),
        }
    return {"group": shown}


def _messages(commit: GroupCommit) -> dict[str, int]:
    """Messages of a commit by segment, as its winners counted them."""
    totals = with_totals(commit).totals or {}
    return {segment: count.messages for segment, count in totals.items()}


def _attempt(txn: TxnId) -> Json:
    return {"attempt": txn.attempt_index} if txn.attempt_index else {}


def _claim(claim: Claim) -> Json:
    return {
        **_attempt(claim.txn),
        "segment": claim.segment,
        "epoch": claim.epoch,
        "floor": claim.floor.text,
    }


def _ack(record: AckRecord) -> Json:
    return {
        **_attempt(record.txn),
        "segment": record.segment,
        "subscription": record.subscription,
        "epoch": record.epoch,
        "cumulative": record.cumulative,
        "positions": [each.position.text for each in record.acks],
    }
