"""Brokers that break one rule of acknowledgements (A) each."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from broker.topics.consumer import Consumer
from broker.topics.dispatch.holds import Holds
from broker.topics.transactional_acks import TransactionalAcks
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.cursor_store import CursorStore
from storage.metadata.store import Record
from tests.simulation.injection import Parts
from txn.pending_ack import PendingAck, WantedAck
from txn.pending_acks import PendingAcks
from txn.pending_acks_core import Effect, PendingAcksCore
from txn.records import TxnState
from txn.segment_owner import SegmentOwner


def with_acks(acks: type[PendingAcks]) -> Parts:
    """Subscriptions have these."""
    return {(TransactionalAcks, "pending_acks_class"): acks}


class AnswersUnproven(PendingAcks):
    """A1 broken: the answer does not wait for the proof of ownership."""

    async def _make_durable(self, txn: TxnId, taken: Sequence[PendingAck]) -> None:
        owner, self._owner = self._owner, _Unproven(self._owner)  # type: ignore[assignment]
        try:
            await super()._make_durable(txn, taken)
        finally:
            self._owner = owner


class _Unproven:
    def __init__(self, owner: SegmentOwner) -> None:
        self.take = owner.take
        self.next_number = owner.next_number

    async def confirm(self) -> None:
        """Proves nothing."""


class AnswersEarly(PendingAcks):
    """A1 broken: the answer does not wait for the record."""

    async def _make_durable(self, txn: TxnId, taken: Sequence[PendingAck]) -> None:
        self._background.start(super()._make_durable(txn, taken))


class DeletesBeforeDurable(PendingAcks):
    """A2 broken: records of a commit go before the cursor is durable."""

    async def _finish_applying(self) -> None:
        self.core.durable(self.core.applying)


class Unfenced(CursorStore):
    """A3 broken: the cursor is only read, and an owner before this one may go on writing it."""

    async def _claim(self, record: Record) -> None:
        return


class LoadsNothing(PendingAcks):
    """A4 broken: what earlier owners left is not held again."""

    async def _rebuild(self) -> None:
        return


class _VoidCommits(PendingAcksCore):
    def decided(self, txn: TxnId, outcome: TxnState | None) -> list[Effect]:
        return super().decided(txn, outcome or TxnState.COMMITTED)


class AppliesVoid(PendingAcks):
    """A5 broken: a record without header is applied."""

    core_class: ClassVar[type[PendingAcksCore]] = _VoidCommits


class LooksOnce(PendingAcks):
    """A6 broken: an owner that is asked to look for records does not."""

    async def rescan(self) -> None:
        return


class SeeksAtOnce(PendingAcks):
    """A7 broken: a seek does not wait until what has ended is finished."""

    async def finish_ended(self) -> None:
        await self._learn_all_ends()


def passes_unread(self: Holds, txns: Collection[TxnId], consumer: Consumer) -> bool:
    """A8 broken: what a transaction holds is passed over, and its header is not read before."""
    return not self._transactional.must_wait_for(consumer, txns)


class RefusesUnread(PendingAcks):
    """A8 broken: a hold refuses others, and the header of its transaction is not read before."""

    async def _hold_after_reading_headers(
        self,
        wanted: WantedAck,
        before: asyncio.Task[None] | None,
        all_held: asyncio.Future[None] | None = None,
    ) -> None:
        taken, written = await self._reserve_in_slices(wanted)
        if all_held is not None:
            all_held.set_result(None)
        await self._hold(wanted.txn, taken, written)


class SeeksUnread(PendingAcks):
    """A8 broken: a seek finishes only those transactions of whose end this broker has heard."""

    _seeks = False

    async def finish_ended(self) -> None:
        self._seeks = True
        await super().finish_ended()

    async def learn_ends(self, txns: Collection[TxnId]) -> set[TxnId]:
        if self._seeks:
            self._seeks = False
            return set(txns)
        return await super().learn_ends(txns)


def keeps_nothing(self: TransactionalAcks, consumer: Consumer, txns: Iterable[TxnId]) -> bool:
    """A9 broken: what follows messages that another one's transaction holds is delivered."""
    return False
