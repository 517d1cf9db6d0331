"""Carries out a `Recovery` with bookies and the metadata store."""

import asyncio
from collections.abc import Callable
from functools import partial

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import DigestMismatch, OpenedEntry
from storage.ledger.bookkeeper.ensemble_change import ReadRecord, WriteRecord
from storage.ledger.bookkeeper.ledger_metadata import LedgerMetadata
from storage.ledger.bookkeeper.ledger_services import EntrySeal, LedgerServices
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataConflict, VersionedMetadata
from storage.ledger.bookkeeper.recovery import (
    AskBookie,
    Recovery,
    RecoveryDone,
    RecoveryEffect,
    RecoveryFailed,
    WriteBack,
)

_AwaitedEffect = WriteRecord | ReadRecord | RecoveryDone | RecoveryFailed | Exception


class LedgerRecovery:
    """One recovery of one ledger.

    Answers of bookies go to the state machine as they come; only the record is awaited.
    """

    def __init__(
        self, services: LedgerServices, ledger_id: LedgerId, metadata: LedgerMetadata
    ) -> None:
        self._services = services
        self._ledger_id = ledger_id
        self._seal = EntrySeal(ledger_id, metadata)
        choose = partial(services.choose_replacements, metadata.write_quorum)
        self._machine = Recovery(ledger_id, self._seal.seal, choose)
        self._effects: asyncio.Queue[_AwaitedEffect] = asyncio.Queue()
        self._ended = False

    async def run(self, record: VersionedMetadata) -> VersionedMetadata:
        """Recover the ledger and return its record, which is CLOSED then.

        Raises `LedgerError`, `NoSuchLedger`; a defect is raised as it is.
        """
        counters = self._services.counters
        try:
            closed = await self._run(record)
        except Exception:
            counters.failed_recoveries += 1
            raise
        finally:
            self._ended = True
        counters.recoveries += 1
        return closed

    async def _run(self, record: VersionedMetadata) -> VersionedMetadata:
        metadata = self._services.metadata
        self._perform(self._machine.start(record))
        while True:
            effect = await self._effects.get()
            if isinstance(effect, RecoveryDone):
                return effect.record
            if isinstance(effect, Exception):
                raise effect
            if isinstance(effect, RecoveryFailed):
                # Bookies refuse a deleted ledger too: then this raises `NoSuchLedger`.
                await metadata.read(self._ledger_id)
                raise effect.error
            if isinstance(effect, ReadRecord):
                effects = self._machine.start(await metadata.read(self._ledger_id))
            else:
                effects = await self._write(effect)
            self._perform(effects)

    async def _write(self, effect: WriteRecord) -> list[RecoveryEffect]:
        try:
            written = await self._services.metadata.write(
                self._ledger_id, effect.metadata, expect=effect.expect
            )
        except LedgerMetadataConflict:
            return self._machine.conflict()
        return self._machine.written(written)

    def _perform(self, effects: list[RecoveryEffect]) -> None:
        bookies, ledger_id = self._services.bookies, self._ledger_id
        for effect in effects:
            if isinstance(effect, AskBookie):
                bookies.read(
                    effect.read.bookie,
                    ledger_id,
                    effect.read.entry_id,
                    partial(self._read_done, effect),
                    fence_with=self._seal.master_key if effect.fence else None,
                )
            elif isinstance(effect, WriteBack):
                bookies.add(
                    effect.slot.bookie,
                    ledger_id,
                    effect.add.entry_id,
                    self._seal.master_key,
                    effect.add.body,
                    partial(self._write_done, effect),
                    recovery=True,
                )
            else:
                self._effects.put_nowait(effect)

    def _read_done(self, request: AskBookie, code: ReplyCode, body: bytes) -> None:
        if not self._ended:
            self._end_on_error(partial(self._take_read, request, code, body))

    def _write_done(self, request: WriteBack, code: ReplyCode) -> None:
        if not self._ended:
            self._end_on_error(partial(self._take_write, request, code))

    def _end_on_error(self, take: Callable[[], None]) -> None:
        """Call `take`; an error in it ends the recovery, which would wait for ever otherwise."""
        try:
            take()
        except Exception as error:  # noqa: BLE001 - raised in `run`
            self._effects.put_nowait(error)

    def _take_read(self, request: AskBookie, code: ReplyCode, body: bytes) -> None:
        found: OpenedEntry | None = None
        if code is ReplyCode.OK:
            entry_id = request.read.entry_id
            asked = None if entry_id < 0 else entry_id
            try:
                found = self._seal.digest.open(body, self._ledger_id, asked)
            except DigestMismatch:
                self._services.counters.read_retries += 1
        self._perform(self._machine.replied(request, code, found))

    def _take_write(self, request: WriteBack, code: ReplyCode) -> None:
        if code is not ReplyCode.OK:
            self._services.note_failures([request.slot.bookie])
        self._perform(self._machine.write_replied(request, code))
