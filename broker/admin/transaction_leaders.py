"""Questions about the coordinators of all brokers, which every broker that leads one answers."""

import asyncio
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, TypeVar

from broker.admin.transaction_inspection import Json, TransactionInspection
from broker.app.service import Broker
from broker.placement.typed_request import EventSink, Request, RequestHandler, request_handlers
from config.bounds import OWNER_REQUEST_S
from magnetar.protocol.txn_id import CoordinatorId

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class ListOpenTransactions(Request[TransactionInspection, Json]):
    """See `TransactionInspection.open_transactions`."""

    KIND: ClassVar[str] = "transactions.open"
    older_than_ms: int
    limit: int
    owner: str | None = None

    async def run(self, host: TransactionInspection) -> Json:
        """Return those of the coordinators that are led here."""
        return host.open_transactions(None, self.older_than_ms, self.limit, owner=self.owner)


@dataclass(frozen=True, slots=True)
class ViewCoordinators(Request[TransactionInspection, Json]):
    """See `TransactionInspection.coordinator_stats`."""

    KIND: ClassVar[str] = "transactions.coordinators"

    async def run(self, host: TransactionInspection) -> Json:
        """Return the statistics of the coordinators that are led here."""
        return host.coordinator_stats()


LEADER_REQUESTS: Mapping[str, type[Request[TransactionInspection, Json]]] = MappingProxyType(
    {each.KIND: each for each in (ListOpenTransactions, ViewCoordinators)}
)


def leader_request_handlers(broker: Broker) -> Mapping[str, RequestHandler]:
    """Return a handler of each of LEADER_REQUESTS, for the channels of other brokers."""

    async def carry_out(_: EventSink, request: Request[TransactionInspection, Json]) -> Json:
        return await request.run(TransactionInspection(broker))

    return request_handlers(LEADER_REQUESTS, carry_out)


async def list_open_transactions(
    broker: Broker, coordinator: CoordinatorId | None, asked: ListOpenTransactions
) -> Json:
    """Return the open transactions of one coordinator that is led here, or of all coordinators.

    Raises `PeerFailed` if the leader of one does not answer.
    """
    if coordinator is not None:
        return TransactionInspection(broker).open_transactions(
            coordinator, asked.older_than_ms, asked.limit, owner=asked.owner
        )
    answers = await _ask_leaders(broker, asked)
    rows = [row for answer in answers for row in _rows(answer)]
    return {
        "open": sum(count for answer in answers if isinstance(count := answer["open"], int)),
        "transactions": heapq.nsmallest(asked.limit, rows, key=lambda row: row["createdMs"]),
    }


async def view_coordinators(broker: Broker) -> Json:
    """Return the statistics of all coordinators by number.

    One without a leader is left out.  Raises `PeerFailed` if a leader does not answer.
    """
    found: Json = {}
    for answer in await _ask_leaders(broker, ViewCoordinators()):
        found |= answer
    return dict(sorted(found.items(), key=lambda one: int(one[0])))


async def _ask_leaders(broker: Broker, request: Request[TransactionInspection, A]) -> list[A]:
    placement = broker.placement
    leaders = {each.broker_id for each in broker.transactions.coordinators.assignments().values()}
    answers = [request.run(TransactionInspection(broker))]
    for broker_id in sorted(leaders - {placement.broker_id}):
        address = placement.brokers.get(broker_id)
        if address is not None:  # else it is gone, and others are about to lead in its place
            answers.append(placement.ask(address, request, timeout_s=OWNER_REQUEST_S))
    return await asyncio.gather(*answers)


def _rows(answer: Json) -> list[dict[str, int]]:
    rows = answer["transactions"]
    return rows if isinstance(rows, list) else []
