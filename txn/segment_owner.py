"""The epoch of one owner of one segment, and the proof that it still is the owner.

Rules (W, A: `docs/transactions.md`):

- W7: an epoch is taken by compare-and-set, so it belongs to one owner, and a lower one never
  replaces a higher.
- A1: ownership is proven by a conditional write that begins after the call.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import NoReturn

from config.bounds import RECORD_CHANGE_TRIES
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.store import ABSENT, MetadataError, Version, VersionConflict
from txn.errors import SegmentOwnershipLost, TransactionAssertion
from txn.parts import TransactionParts
from txn.records import OwnerRecord


class SegmentOwner:
    """One incarnation of a segment's owner.

    `lost` is called once, when another owner has taken the segment; that cannot be undone.
    """

    def __init__(
        self, segment: str, parts: TransactionParts, lost: Callable[[MagnetarError], None]
    ) -> None:
        self.segment = segment
        self.epoch = 0
        """0 until taken."""
        self._store = parts.store
        self._broker_id = parts.broker_id
        self._on_lost = lost
        self._version = ABSENT
        self._unsettled = False
        self._numbers = itertools.count(1)
        self._lost: SegmentOwnershipLost | None = None
        self._taking: asyncio.Task[int] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._confirming: asyncio.Task[None] | None = None

    @property
    def lost(self) -> SegmentOwnershipLost | None:
        """The error since another owner was found; None before."""
        return self._lost

    def next_number(self) -> int:
        """A number for a record of this owner; no two records have the same.

        So a late delete of one record never deletes another.
        """
        return next(self._numbers)

    async def take(self) -> int:
        """The epoch of this owner, taken now if it was not before.

        Calls at the same time share one attempt.

        Raises `SegmentOwnershipLost`, `MetadataError`, `CorruptTransactionRecord`.
        """
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if self.epoch:
            return self.epoch
        if self._taking is None:
            self._taking = asyncio.get_running_loop().create_task(self._take())
            self._taking.add_done_callback(self._taken)
        return await asyncio.shield(self._taking)

    async def _take(self) -> int:
        for _ in range(RECORD_CHANGE_TRIES):
            stored = await self._store.read_owner(self.segment)
            if stored is None:
                # A segment of that name may have been deleted: late claims of its owners must not
                # have this epoch (W3, W6).
                epoch = await self._store.read_epoch_floor() + 1
            else:
                epoch = stored.owner.epoch + 1
            try:
                # W7: on the version read.  If the outcome stays unknown, the next attempt takes a
                # higher epoch.
                version = await self._store.put_owner(
                    self.segment,
                    OwnerRecord(epoch, self._broker_id),
                    ABSENT if stored is None else stored.version,
                )
            except VersionConflict:
                continue
            self.epoch, self._version = epoch, version
            return epoch
        raise MetadataError(
            f"The epoch of {self.segment} could not be taken: other owners took it "
            f"{RECORD_CHANGE_TRIES} times in a row; check which brokers share the store."
        )

    def _taken(self, task: asyncio.Task[int]) -> None:
        self._taking = None
        if not task.cancelled():
            task.exception()  # all callers may be gone

    async def confirm(self) -> None:
        """Return when a write that began after this call proved that the segment is still owned.

        Raises `SegmentOwnershipLost`, `MetadataError`.
        """
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if not self.epoch:
            raise TransactionAssertion(
                f"{self.segment} was to be confirmed before its epoch was taken: report this as a "
                "defect."
            )
        # A1: only a write that begins after this call counts, as metadata puts are not fenced as
        # ledgers are, and a read may be of the past.  One write serves all waiters.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        if self._confirming is None:
            self._confirming = loop.create_task(self._confirm_all())
        await waiter

    async def close(self) -> None:
        """Return when no write is in progress."""
        for task in (self._taking, self._confirming):
            if task is not None:
                await asyncio.wait({task})

    async def _confirm_all(self) -> None:
        """Prove ownership, again as long as there are waiters."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                failure: BaseException | None = TransactionAssertion(
                    f"The proof of owning {self.segment} broke off: report this as a defect."
                )
                try:
                    await self._prove()
                    failure = None
                except MagnetarError as error:
                    failure = error
                finally:
                    _settle(waiting, failure)
        finally:
            self._confirming = None

    async def _prove(self) -> None:
        """Make one conditional write, after a read if an earlier write's outcome is unknown."""
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        for _ in range(RECORD_CHANGE_TRIES):
            if self._unsettled:
                await self._read_version()
            self._unsettled = True
            try:
                self._version = await self._put()
            except VersionConflict:
                if not await self._conflict_with_self():
                    self._lose()
                continue
            self._unsettled = False
            return
        raise MetadataError(
            f"Ownership of {self.segment} could not be proven: its record changed "
            f"{RECORD_CHANGE_TRIES} times in a row; check which brokers share the store."
        )

    async def _put(self) -> Version:
        record = OwnerRecord(self.epoch, self._broker_id)
        return await self._store.put_owner(self.segment, record, self._version)

    async def _conflict_with_self(self) -> bool:
        """Whether an earlier write of this owner, and not another's, changed the record.

        Raises `SegmentOwnershipLost`.
        """
        before = self._version
        await self._read_version()
        return self._version != before

    async def _read_version(self) -> None:
        """Read the version of this owner's record.  Raises `SegmentOwnershipLost`."""
        stored = await self._store.read_owner(self.segment)
        if stored is None or stored.owner.epoch != self.epoch:
            self._lose()
        self._version = stored.version

    def _lose(self) -> NoReturn:
        self._lost = SegmentOwnershipLost(
            f"Another owner took {self.segment} from epoch {self.epoch}: connect again to find it."
        )
        self._on_lost(self._lost)
        raise self._lost


def _settle(waiting: list[asyncio.Future[None]], failure: BaseException | None) -> None:
    for waiter in waiting:
        if waiter.done():
            continue
        if failure is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(failure)
