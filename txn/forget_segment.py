"""The end of everything that transactions keep of a segment.

Rules:

- The segment's log is deleted first, and so fenced: no owner can append any more (W6).
- What a crash in between leaves would hold back what the next segment of that name gets.  So it
  goes when the deletion is tried again, and before a segment of that name is made; not where others
  may make it at the same time, whose claims must stay: there it goes with its transactions.
"""

from txn import records
from txn.ack_records import for_each
from txn.store import TransactionStore


async def forget_segment(store: TransactionStore, segment: str) -> None:
    """Delete every record of a segment whose log is deleted, and so fenced.

    Raises `MetadataError`, `CorruptTransactionRecord`; then call it again.
    """
    await forget_records(store, segment)
    await store.delete_owner(segment)


async def forget_records(store: TransactionStore, segment: str) -> None:
    """The same but for its epoch, which goes on: before a segment of that name is made."""
    claims, acks = await store.claims_on(segment), await store.acks_on_segment(segment)
    keys = [
        *((each.txn, records.claim_key(each.txn, segment, each.epoch)) for each in claims),
        *((each.txn, records.ack_key(each)) for each in acks),
    ]
    await for_each(keys, lambda each: store.delete_operation(*each))
    aborted = list(await store.aborted_on(segment))
    await for_each(aborted, lambda txn: store.forget_aborted(segment, txn))
