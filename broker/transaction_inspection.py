"""What operators ask about transactions: which are open, what one touches, what pins a topic.

Rules:

- Answers are JSON of numbers and names; times are milliseconds, positions `ledger:entry`.
- A list names at most TXN_LISTED transactions and tells how many there are.
- No answer costs more than a scan for each segment asked about: what is open is in memory with
  the coordinator that began it, and what pins a loaded segment with its buffer.  A segment that is
  not loaded is not loaded for this: its claims are shown.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from broker.scalable.records import segment_of
from broker.topic import TopicNotFound
from config.bounds import TXN_LISTED, TXN_PINS_SHOWN
from protocol.ids import Position
from protocol.names import TopicDomain, TopicName
from txn.buffer_effects import OpenOnSegment
from txn.header import EndVerdict, refusal
from txn.records import AckRecord, Claim, Header
from txn.store import StoredHeader
from txn.txn_id import CoordinatorId, TxnId

if TYPE_CHECKING:
    from broker.service import Broker
    from broker.topic import Topic

Json = dict[str, object]


class TransactionInspection:
    """See the module's rules."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._transactions = broker.transactions

    def open_transactions(
        self, coordinator: CoordinatorId | None, older_than_ms: int, limit: int
    ) -> Json:
        """What is open for longer than that, the oldest first."""
        before_ms = self._broker.clock.now_ms() - older_than_ms
        found = [
            stored
            for stored in self._transactions.coordinators.open_transactions(coordinator)
            if stored.header.created_ms <= before_ms
        ]
        shown = found[: min(limit, TXN_LISTED)]
        return {
            "open": len(found),
            "transactions": [self._summary(each.txn, each.header) for each in shown],
        }

    async def show(self, txn: TxnId) -> Json:
        """One transaction and everything that it touches.  Raises `TransactionNotFound`."""
        store = self._transactions.store
        stored, found = await asyncio.gather(store.read_header(txn), store.operations_of(txn))
        if stored is None:
            raise refusal(txn, None, EndVerdict.NOT_FOUND)
        return {
            **self._summary(txn, stored.header),
            "writes": [_claim(each) for each in found if isinstance(each, Claim)],
            "acknowledgements": [_ack(each) for each in found if isinstance(each, AckRecord)],
        }

    async def why(self, name: TopicName) -> Json:
        """What keeps readers of a topic from its end: each segment with what pins it.

        Raises `TopicNotFound`, `ScalableTopicNotFound`.
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
        open_ones = {
            stored.txn: stored for stored in self._transactions.coordinators.open_transactions()
        }
        segments = [await self._segment(each, open_ones) for each in names]
        return {"topic": str(name), "segments": segments}

    async def _segment(self, name: str, open_ones: Mapping[TxnId, StoredHeader]) -> Json:
        topic = self._broker.topics.loaded().get(name)
        if topic is None:
            claims = await self._transactions.store.claims_on(name)
            held = {claim.txn: _place(claim.floor) for claim in claims}
            first = [{"floor": place} for place in held.values()]
            return {
                "segment": name,
                "loaded": False,
                "open": len(held),
                "transactions": await self._pins(list(held), first, open_ones),
            }
        pins = _pinning(topic)
        details: list[Json] = [
            {
                "state": pin.state.value,
                "firstPosition": None if pin.first is None else _place(pin.first),
                "readableUpTo": None if pin.pin is None else _place(pin.pin),
                "entries": pin.entries,
                "ofEarlierOwner": pin.loaded,
            }
            for pin in pins[:TXN_PINS_SHOWN]
        ]
        last, horizon = topic.ledger.last_confirmed, topic.max_read_position()
        return {
            "segment": name,
            "loaded": True,
            "state": topic.state.value,
            "lastConfirmed": _place(last),
            "horizon": _place(horizon),
            "heldBack": horizon < last,
            "open": len(pins),
            "transactions": await self._pins([pin.txn for pin in pins], details, open_ones),
        }

    async def _pins(
        self,
        txns: Sequence[TxnId],
        details: Iterable[Mapping[str, object]],
        open_ones: Mapping[TxnId, StoredHeader],
    ) -> list[Json]:
        shown = list(zip(txns[:TXN_PINS_SHOWN], details, strict=False))
        headers = await asyncio.gather(*(self._header(txn, open_ones) for txn, _ in shown))
        return [
            {**({"txnId": str(txn)} if header is None else self._summary(txn, header)), **more}
            for (txn, more), header in zip(shown, headers, strict=True)
        ]

    async def _header(self, txn: TxnId, open_ones: Mapping[TxnId, StoredHeader]) -> Header | None:
        stored = open_ones.get(txn) or await self._transactions.store.read_header(txn)
        return None if stored is None else stored.header

    def _summary(self, txn: TxnId, header: Header) -> Json:
        return {
            "txnId": str(txn),
            "status": header.state.value,
            "owner": header.owner,
            "createdMs": header.created_ms,
            "ageMs": max(0, self._broker.clock.now_ms() - header.created_ms),
            "timeoutMs": header.timeout_ms,
            "deadlineMs": header.deadline_ms,
            "finalizedMs": header.finalized_ms,
        }


def _pinning(topic: "Topic") -> Sequence[OpenOnSegment]:
    """What is not finished on a loaded segment: what holds back most comes first."""
    found = topic.buffer.open_transactions()
    return sorted(found, key=lambda each: (each.pin is None, each.pin or Position(0, 0)))


def _claim(claim: Claim) -> Json:
    return {"segment": claim.segment, "epoch": claim.epoch, "floor": _place(claim.floor)}


def _ack(record: AckRecord) -> Json:
    return {
        "segment": record.segment,
        "subscription": record.subscription,
        "epoch": record.epoch,
        "cumulative": record.cumulative,
        "positions": [_place(each.position) for each in record.acks],
    }


def _place(position: Position) -> str:
    return f"{position.ledger_id}:{position.entry_id}"
