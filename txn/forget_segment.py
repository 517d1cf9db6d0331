"""The end of everything that transactions keep of a segment.

Rule: the segment's log is deleted first, and so fenced: no owner can append any more (W6).
"""

from config.bounds import TXN_PAGE
from txn import records
from txn.ack_records import all_of
from txn.store import TransactionStore


async def forget_segment(store: TransactionStore, segment: str) -> None:
    """Delete every record of a segment whose log is deleted, and so fenced.

    Raises `MetadataError`, `CorruptTransactionRecord`; then call it again.
    """
    claims, acks = await store.claims_on(segment), await store.acks_on_segment(segment)
    keys = [
        *((each.txn, records.claim_key(each.txn, segment, each.epoch)) for each in claims),
        *((each.txn, records.ack_key(each)) for each in acks),
    ]
    for first in range(0, len(keys), TXN_PAGE):
        page = keys[first : first + TXN_PAGE]
        await all_of(store.delete_operation(txn, key) for txn, key in page)
    aborted = list(await store.aborted_on(segment))
    for first in range(0, len(aborted), TXN_PAGE):
        page_of = aborted[first : first + TXN_PAGE]
        await all_of(store.forget_aborted(segment, txn) for txn in page_of)
    await store.delete_owner(segment)
