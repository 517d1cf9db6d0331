"""Brokers that break one rule of carried sequence ids (C) each.

The rules are in `docs/decisions/carried-sequence-ids.md`.
"""

from broker.topics.carried_ids import CarriedId, FinalIds, FinalSequences
from broker.topics.deduplication import Deduplication, ProducerSequence
from broker.topics.sequence_store import AWAITED_PROPERTY, SequenceStore
from magnetar.protocol.names import SegmentName


async def waits_for_nothing(self: SequenceStore) -> None:
    """C1 broken: a producer attaches before the parents' ids are final."""


async def inherits_in_memory(
    self: SequenceStore, segment: SegmentName, finals: FinalSequences
) -> None:
    """C2 broken: nothing is awaited any more, and the ids are in no snapshot yet."""
    if self._ledger is None or not self._awaited:
        return
    await self._ledger.set_properties({AWAITED_PROPERTY: "[]"})
    self.sequences.inherit(segment, finals.producers, self._clock.now_ms())
    self._awaited = []
    self._inherited.set()


def passes_nothing_on(
    self: Deduplication, segment: SegmentName, *, changed_ms: int, now_ms: int
) -> list[FinalIds]:
    """C4 broken: a segment forgets at its end what it has stored."""
    return []


def compares_with_its_own(
    self: ProducerSequence, first: int | None, last: int, request_id: int | None
) -> None:
    """C5 broken: a client that counts from the start again is compared with its own ids."""


def covers_every_key(self: CarriedId, key: bytes | None) -> bool:
    """C4 broken: the id of one parent stands for the keys of the others."""
    return True
