"""Offloading the ended ledgers of one managed ledger.

The order of the steps, and what a crash after each leaves, is in storage/offload/README.md: at any
point the stream reads as before.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from uuid import UUID

import structlog

from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import LATEST, LedgerId, Position
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import LedgerAssertion
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import ManagedLedgerClosed
from storage.offload.cold_ledgers import Manifest
from storage.offload.context import Location, OffloadContext

log = structlog.get_logger(__name__)


class StreamOffload:
    """Copies ended ledgers of one managed ledger to object storage, and deletes the originals.

    One ledger is copied at a time; closing the stream cancels that.  `forget` drops the handle by
    which a ledger was read.
    """

    __slots__ = ("_checks", "_core", "_fresh", "_manifests", "_stopped", "_task", "forget")

    def __init__(self, core: StreamCore, forget: Callable[[int], None]) -> None:
        self._core = core
        self.forget = forget
        self._fresh: set[UUID] = set()
        self._checks = BackgroundTasks()
        self._manifests: dict[UUID, Manifest] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    # State

    def pending(self) -> Sequence[LedgerInfo]:
        """Ledgers that are to be copied and have no whole copy yet, oldest first."""
        return [
            info
            for info in self._core.ledgers.infos
            if info.offload is not None and not info.offload.complete
        ]

    def copied(self) -> Sequence[LedgerInfo]:
        """Ledgers with a whole copy, oldest first."""
        return [
            info
            for info in self._core.ledgers.infos
            if info.offload is not None and info.offload.complete
        ]

    @property
    def running(self) -> bool:
        """Whether a ledger is being copied now."""
        return self._task is not None

    def first_hot(self) -> Position:
        """The first entry that has no whole copy, or the end of the stream."""
        ledgers = self._core.ledgers
        for info in ledgers.infos:
            if info.entries and (info.offload is None or not info.offload.complete):
                return Position(info.ledger_id, 0)
        return ledgers.end

    async def manifests(self) -> list[tuple[LedgerInfo, Manifest]]:
        """The manifest of every whole copy.  Reads each index once; raises as `read_index`."""
        cold, known = self._core.stores.cold, self._manifests
        self._manifests = {}
        found = []
        for info in self.copied():
            if info.offload is not None:
                manifest = known.get(info.offload.uid)
                if manifest is None:
                    manifest = await cold.manifest(info.ledger_id, info.offload)
                self._manifests[info.offload.uid] = manifest
                found.append((info, manifest))
        return found

    # Copying

    async def request(self, location: Location, up_to: Position = LATEST) -> int:
        """Ask for copies of the ledgers that end before `up_to`; `run` makes them.

        Returns the number of ledgers to copy.  A whole copy stays where it is.  Raises
        `MetadataError`, `ManagedLedgerFenced`.
        """
        # The record names each attempt before it begins.  So a request outlives the process, and
        # an attempt that ended half-way is known.
        core = self._core
        async with core.lock:
            core.require_running()
            marks = {
                info.ledger_id: core.stores.cold.new_context(location)
                for info in core.ledgers.infos
                if info.closed_ms
                and info.entries
                and info.last < up_to
                and _may_be_sent_to(info.offload, location)
            }
            if marks:
                await core.save(offloads=marks)
                self._fresh.update(context.uid for context in marks.values())
        return len(self.pending())

    async def run(self) -> None:
        """Copy the ledgers that are pending.

        Raises `LedgerError`, `MetadataError`, and `ManagedLedgerClosed` if the stream closes.
        """
        if self._stopped:
            raise self._closed()
        if self._task is None:
            self._task = self._core.loop.create_task(self._run())
        task = self._task
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise self._closed() from None
            raise

    def _closed(self) -> MagnetarError:
        return ManagedLedgerClosed(
            f"Managed ledger {self._core.name} was closed while it was offloaded: it goes on when "
            "it is open again."
        )

    async def _run(self) -> None:
        try:
            while pending := self.pending():
                await self._copy(pending[0].ledger_id)
        finally:
            self._task = None

    async def _copy(self, ledger_id: int) -> None:
        core, stores = self._core, self._core.stores
        context = await self._begin(ledger_id)
        await core.collect()
        if context is None:
            return
        ledger = await stores.ledgers.open(LedgerId(ledger_id))
        await stores.cold.write(ledger, context, core.name, stores.clock.now_ms())
        async with core.lock:
            info = core.ledgers.get(ledger_id)
            if info is not None and info.offload == context:
                if ledger.last_add_confirmed + 1 != info.entries:
                    raise LedgerAssertion(
                        f"Ledger {ledger_id} of {core.name} has {ledger.last_add_confirmed + 1} "
                        f"entries, but its record says {info.entries}: report this as a defect."
                    )
                now_ms = stores.clock.now_ms()
                done = replace(context, complete=True, offloaded_ms=now_ms)
                # If the outcome of this write is unknown nothing is deleted: the next opening reads
                # whether the copy counts.
                await core.save(offloads={ledger_id: done})
                log.info("ledger_offloaded", name=core.name, ledger=ledger_id)
                core.trim_soon()
                return
        # It was trimmed meanwhile: its copy was deleted before all of it was there.
        await stores.delete_copy(ledger_id, context)

    async def _begin(self, ledger_id: int) -> OffloadContext | None:
        """The attempt to make, which the record names; None if there is nothing to do."""
        core = self._core
        async with core.lock:
            info = core.ledgers.get(ledger_id)
            if info is None or info.offload is None or info.offload.complete:
                return None
            context = info.offload
            if context.uid not in self._fresh:
                # Another instance began this attempt and may still write.  The record names a new
                # one first; then the objects of the old one are deleted (`StreamCore.collect`).
                context = core.stores.cold.new_context(context.location)
                await core.save(offloads={ledger_id: context})
            self._fresh.discard(context.uid)
            return context

    async def stop(self) -> None:
        """Cancel what runs; nothing more is begun."""
        self._stopped = True
        under_way = {*self._checks.running, *([self._task] if self._task is not None else [])}
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)

    # Deleting the ledgers themselves

    async def drop_hot(self, ledger_ids: Collection[int] | None = None) -> list[int]:
        """Delete the ledgers (these, or all) that have a whole copy; returns those deleted.

        Raises `LedgerError`, `MetadataError`; ledgers that were not deleted stay.
        """
        dropped = []
        for info in self.copied():
            wanted = ledger_ids is None or info.ledger_id in ledger_ids
            if wanted and info.hot and await self._drop(info.ledger_id):
                dropped.append(info.ledger_id)
        return dropped

    async def _drop(self, ledger_id: int) -> bool:
        core, stores = self._core, self._core.stores
        info = core.ledgers.get(ledger_id)
        if info is None or info.offload is None or not info.offload.complete or not info.hot:
            return False
        context = info.offload
        await self._require_whole(info, context)
        async with core.lock:
            core.require_running()
            if core.ledgers.get(ledger_id) is not info or info.offload != context:
                return False
            # Until the record says so, and after a crash in between, readers find no ledger and
            # use the copy.
            await stores.ledgers.delete(LedgerId(ledger_id))
            self.forget(ledger_id)
            await core.save(offloads={ledger_id: replace(context, hot_deleted=True)})
        stores.cold.counters.hot_deleted += 1
        log.info("offloaded_ledger_deleted", name=core.name, ledger=ledger_id)
        return True

    async def _require_whole(self, info: LedgerInfo, context: OffloadContext) -> None:
        """Check the copy once more, without the lock, and not longer than the stream is open."""
        if self._stopped:
            raise self._closed()
        check = self._checks.start(
            self._core.stores.cold.require_whole(
                info.ledger_id, context, info.entries, info.size_bytes
            )
        )
        try:
            await asyncio.wait({check})
        finally:
            check.cancel()
        if check.cancelled():
            raise self._closed()
        check.result()


def _may_be_sent_to(offload: OffloadContext | None, location: Location) -> bool:
    """Whether there is no whole copy, and none is requested at that location already."""
    if offload is None or offload.complete:
        return offload is None
    there = (offload.driver, dict(offload.properties))
    return there != (location.driver, location.properties)
