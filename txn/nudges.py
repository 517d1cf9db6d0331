"""Requests of collectors in other processes: look again for what ended transactions left (W11, A6).

Rules:

- A request is a record that names a segment.  Who owns it looks, and deletes the request on the
  version that it saw, so that a newer one stays; others leave it.
- The watch is taken before what is there is read; after a resync, and when a watch broke, that is
  read again.
- What fails is logged and not tried again: the collector asks anew in its next round.
"""

from collections.abc import Sequence

import structlog

from protocol.server_error import MagnetarError
from storage.metadata.following import Following
from storage.metadata.store import Event, Record
from storage.supervised import Supervised
from txn import records
from txn.collector import RecordsLeft
from txn.records import AckRecord, Claim, TxnState
from txn.store import TransactionStore
from txn.txn_id import TxnId

log = structlog.get_logger(__name__)


class Nudges:
    """See the module's rules."""

    def __init__(self, store: TransactionStore, look_again: RecordsLeft) -> None:
        self._store = store
        self._look_again = look_again
        self._following = Following(
            lambda: store.metadata.watch_children(records.NUDGES), self._answer_all, self._take
        )
        self._tasks = Supervised()

    def start(self) -> None:
        """Begin to answer."""
        self._tasks.keep("transaction_nudges", self._following.run)

    async def stop(self) -> None:
        """Answer nothing more.  May be called again."""
        await self._tasks.stop()
        self._following.close()

    async def _take(self, event: Event) -> None:
        if event.record is not None:
            await self._answer(event.record)

    async def _answer_all(self) -> None:
        metadata = self._store.metadata
        try:
            for name in await metadata.children(records.NUDGES):
                found = await metadata.get(f"{records.NUDGES}/{name}")
                if found is not None:
                    await self._answer(found)
        except MagnetarError as error:
            log.warning("transaction_nudges_not_read", error=str(error))

    async def _answer(self, nudge: Record) -> None:
        try:
            segment = records.segment_of_nudge(nudge.key)
            if await self._look_again(segment, await self._left_by_ended(segment)):
                await self._store.answer_nudge(segment, nudge.version)
        except MagnetarError as error:
            log.warning("transaction_nudge_not_answered", key=nudge.key, error=str(error))

    async def _left_by_ended(self, segment: str) -> Sequence[Claim | AckRecord]:
        """Records of transactions that have ended; those of open ones are their writers'."""
        store = self._store
        found: list[Claim | AckRecord] = [
            *await store.claims_on(segment),
            *await store.acks_on_segment(segment),
        ]
        ended = set[TxnId]()
        for txn in {record.txn for record in found}:
            stored = await store.read_header(txn)
            if stored is None or stored.header.state is not TxnState.OPEN:
                ended.add(txn)
        return [record for record in found if record.txn in ended]
