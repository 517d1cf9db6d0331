"""The end of everything that transactions keep of a segment.

Rule: the segment's log is deleted first, and so fenced: no owner can append any more (W6).
"""

from txn import records
from txn.store import TransactionStore


async def forget_segment(store: TransactionStore, segment: str) -> None:
    """Delete every record of a segment whose log is deleted, and so fenced.

    Raises `MetadataError`, `CorruptTransactionRecord`; then call it again.
    """
    for claim in await store.claims_on(segment):
        key = records.claim_key(claim.txn, segment, claim.epoch)
        await store.delete_operation(claim.txn, key)
    for ack in await store.acks_on_segment(segment):
        await store.delete_operation(ack.txn, records.ack_key(ack))
    for txn in await store.aborted_on(segment):
        await store.forget_aborted(segment, txn)
    await store.delete_owner(segment)
