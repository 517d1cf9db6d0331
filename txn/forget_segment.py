"""Deletion of all records that transactions have of a segment."""

from txn import records
from txn.ack_records import for_each
from txn.store import TransactionStore


async def forget_segment(store: TransactionStore, segment: str) -> None:
    """Delete every record of a segment whose log was deleted before, and so fenced (W6).

    Raises `MetadataError`, `CorruptTransactionRecord`; then call it again.
    """
    # W6: no owner can append under these claims any more.
    await forget_records(store, segment)
    await store.delete_owner(segment)


async def forget_records(store: TransactionStore, segment: str) -> None:
    """Delete the same but for the epoch, before a segment of that name is created.

    Records that a crash left would hold back readers of the new segment.  Where other processes may
    create it at the same time this must not be called, as their claims must stay; there the records
    go with their transactions.
    """
    claims, acks = await store.claims_on(segment), await store.acks_on_segment(segment)
    keys = [
        *((each.txn, records.claim_key(each.txn, segment, each.epoch)) for each in claims),
        *((each.txn, records.ack_key(each)) for each in acks),
    ]
    await for_each(keys, lambda each: store.delete_operation(*each))
    aborted = list(await store.aborted_on(segment))
    await for_each(aborted, lambda txn: store.forget_aborted(segment, txn))
