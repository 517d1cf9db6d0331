"""Acknowledgement records that no subscription here holds: deleted, when that may be done.

Rules:

- A6: a record that the owner does not know was never answered, or belongs to a subscription that
  is gone.  It goes when its transaction has ended, and stays before: its writer may be at work.
- Records of a deleted subscription go whatever became of their transactions, once its cursor is
  gone; and before a subscription of that name is made, in case that was cut short.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

from config.bounds import TXN_PAGE
from magnetar.protocol.txn_id import TxnId
from txn import records
from txn.records import AckRecord, TxnState
from txn.store import TransactionStore

_T = TypeVar("_T")


async def delete_ended(store: TransactionStore, strays: Sequence[AckRecord]) -> None:
    """Delete those of these records whose transactions have ended (A6); the others stay."""
    by_transaction = _by_transaction(strays)
    async for txn, header in store.read_headers(by_transaction):
        if header is None or header.state is not TxnState.OPEN:
            await delete_records(store, by_transaction[txn])


async def forget_subscription(store: TransactionStore, segment: str, subscription: str) -> None:
    """Delete every record of a subscription that is gone, or not there yet."""
    await delete_records(store, await store.acks_on(segment, subscription))


async def delete_records(store: TransactionStore, found: Sequence[AckRecord]) -> None:
    """Delete these records, whatever became of their transactions: the subscription is gone."""
    await for_each(found, lambda each: store.delete_operation(each.txn, records.ack_key(each)))


def _by_transaction(found: Iterable[AckRecord]) -> Mapping[TxnId, list[AckRecord]]:
    grouped: dict[TxnId, list[AckRecord]] = {}
    for record in found:
        grouped.setdefault(record.txn, []).append(record)
    return grouped


async def for_each(
    items: Sequence[_T],
    work: Callable[[_T], Coroutine[object, object, None]],
    *,
    at_once: int = TXN_PAGE,
) -> None:
    """The work for every item, so many at once; after a failure no more is begun."""
    for start in range(0, len(items), at_once):
        await run_all(work(item) for item in items[start : start + at_once])


async def run_all(work: Iterable[Coroutine[object, object, None]]) -> None:
    """Everything, to its end, also when some of it fails; then the first failure."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
