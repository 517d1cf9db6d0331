"""Requests of collectors in other processes to clean up after ended transactions (W11, A6).

Rules:

- A request is a record that names a segment.  The segment's owner cleans up, and deletes the
  request on the version that it read, so that a newer one stays; other brokers leave it.
- The watch is taken before what is there is read; after a resync, and when a watch broke, that is
  read again.
- What fails is logged and not tried again: the collector asks anew in its next round.
"""

from collections.abc import Sequence

import structlog

from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import Event, Record
from storage.metadata.watch_follower import WatchFollower
from storage.supervised import Supervised
from txn import records
from txn.collector import RecordsLeft
from txn.records import AckRecord, Claim, TxnState
from txn.store import TransactionStore

log = structlog.get_logger(__name__)


class CleanupRequests:
    """A watch of cleanup requests that answers those for segments owned here."""

    def __init__(self, store: TransactionStore, look_again: RecordsLeft) -> None:
        self._store = store
        self._look_again = look_again
        self._following = WatchFollower(
            lambda: store.metadata.watch_children(records.CLEANUP_REQUESTS),
            self._answer_all,
            self._take,
        )
        self._tasks = Supervised()

    def start(self) -> None:
        """Begin to answer."""
        self._tasks.keep("transaction_cleanup_requests", self._following.run)

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
            for name in await metadata.children(records.CLEANUP_REQUESTS):
                found = await metadata.get(f"{records.CLEANUP_REQUESTS}/{name}")
                if found is not None:
                    await self._answer(found)
        except MagnetarError as error:
            log.warning("transaction_cleanup_requests_not_read", error=str(error))

    async def _answer(self, request: Record) -> None:
        try:
            segment = records.segment_of_cleanup_request(request.key)
            if await self._look_again(segment, await self._left_by_ended(segment)):
                await self._store.delete_cleanup_request(segment, request.version)
        except MagnetarError as error:
            log.warning(
                "transaction_cleanup_request_not_answered", key=request.key, error=str(error)
            )

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
