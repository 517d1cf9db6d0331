"""Requests of collectors in other processes to clean up after ended transactions (W11, A6)."""

from collections.abc import Sequence

import structlog

from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import Event, Record
from storage.metadata.watch_follower import WatchFollower
from txn import records
from txn.collector import RecordsLeft
from txn.records import AckRecord, Claim, TxnState
from txn.store import TransactionStore

log = structlog.get_logger(__name__)


class CleanupRequests:
    """A watch of cleanup requests that answers those for segments owned here.

    A request is a record that names a segment.  The segment's owner cleans up and deletes the
    request; other brokers leave it.
    """

    def __init__(self, store: TransactionStore, clean_up: RecordsLeft) -> None:
        self._store = store
        self._clean_up = clean_up
        self._following = WatchFollower(
            lambda: store.metadata.watch_children(records.CLEANUP_REQUESTS),
            self._answer_all,
            self._take,
        )
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Answer requests from now on."""
        self._tasks.keep("transaction_cleanup_requests", self._following.run)

    async def stop(self) -> None:
        """Answer no more requests.  May be called again."""
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
            # W11, A6: the owner cleans up, and deletes the request on the version read, so that a
            # newer one stays.
            if await self._clean_up(segment, await self._left_by_ended(segment)):
                await self._store.delete_cleanup_request(segment, request.version)
        except MagnetarError as error:
            # The collector asks again in its next round.
            log.warning(
                "transaction_cleanup_request_not_answered", key=request.key, error=str(error)
            )

    async def _left_by_ended(self, segment: str) -> Sequence[Claim | AckRecord]:
        """The records on a segment whose transactions have ended."""
        # W11, A6: records of open transactions belong to their writers.
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
