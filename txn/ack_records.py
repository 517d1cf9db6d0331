"""Deletion of acknowledgement records that no loaded subscription holds."""

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
    """Delete the given records whose transactions have ended (A6); the others stay."""
    by_transaction = _by_transaction(strays)
    # A6: a record of an open transaction may be one that its writer is just putting.
    async for txn, header in store.read_headers(by_transaction):
        if header is None or header.state is not TxnState.OPEN:
            await delete_records(store, by_transaction[txn])


async def forget_subscription(store: TransactionStore, segment: str, subscription: str) -> None:
    """Delete all records of a subscription, open transactions or not.

    Called after its cursor was deleted; and before a subscription of that name is created, in case
    an earlier deletion was interrupted.
    """
    await delete_records(store, await store.acks_on(segment, subscription))


async def delete_records(store: TransactionStore, found: Sequence[AckRecord]) -> None:
    """Delete records of a subscription that is gone, whether their transactions have ended or not.

    Each is deleted by its exact key (W6).
    """
    # W6: so a record of a later owner stays.
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
    """Do `work` for every item, `at_once` at a time; after an error no more is begun."""
    for start in range(0, len(items), at_once):
        await run_all(work(item) for item in items[start : start + at_once])


async def run_all(work: Iterable[Coroutine[object, object, None]]) -> None:
    """Run all to their end, even if some fail; then raise the first error."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
