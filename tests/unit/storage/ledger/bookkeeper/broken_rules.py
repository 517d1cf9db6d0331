"""Quorum rules switched off one at a time: what the simulation is worth is that it finds each.

Each mutant replaces the one method that keeps its rule.  `seed` is of a run that finds it, and that
is clean when nothing is broken.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage.ledger.bookkeeper import ensemble_change, recovery
from storage.ledger.bookkeeper.adds import Adds, PendingAdd, Slot, Todo
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import Digest, OpenedEntry
from storage.ledger.bookkeeper.ensemble_change import WriteRecord
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata, LedgerState
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataConflict, VersionedMetadata
from storage.ledger.bookkeeper.reads import NEGATIVE, Coverage, LastConfirmedRead, ReadOne
from storage.ledger.bookkeeper.recovery import AskBookie, Recovery, RecoveryDone, RecoveryEffect
from storage.ledger.bookkeeper.writable_ledger import BookKeeperWritableLedger

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class BrokenRule:
    name: str
    patches: Callable[[], Sequence[Patch]]
    seed: int

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        saved = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.patches()]
        for owner, name, value in self.patches():
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in saved:
                setattr(owner, name, value)


_replied = Adds.replied
_replace = Adds.replace


def _any_ack_counts() -> Sequence[Patch]:
    def replied(self: Adds, add: PendingAdd, slot: Slot, code: ReplyCode) -> Todo:
        if code is ReplyCode.OK:
            slot = self._slots[slot.place]
        return _replied(self, add, slot, code)

    return [(Adds, "replied", replied)]


def _acks_are_kept() -> Sequence[Patch]:
    def replace_(self: Adds, new: Mapping[int, BookieId]) -> list[tuple[PendingAdd, Slot]]:
        acks = {add.entry_id: add.acks for add in self._queue}
        resent = _replace(self, new)
        for add in self._queue:
            add.acks = acks[add.entry_id]
            add.complete = add.acks.bit_count() >= self._ack_quorum
        return resent

    return [(Adds, "replace", replace_)]


def _confirmed_out_of_order() -> Sequence[Patch]:
    def next_confirmed(self: Adds) -> PendingAdd | None:
        for add in self._queue:
            if add.complete:
                self._queue.remove(add)
                self.last_confirmed = max(self.last_confirmed, add.entry_id)
                self.confirmed_length += add.size
                add.confirmed = True
                return add
        return None

    def replied(self: Adds, add: PendingAdd, slot: Slot, code: ReplyCode) -> Todo:
        was = add.complete
        todo = _replied(self, add, slot, code)
        return Todo.CONFIRM if add.complete and not was else todo

    return [(Adds, "next_confirmed", next_confirmed), (Adds, "replied", replied)]


def _confirmed_during_a_change() -> Sequence[Patch]:
    def next_confirmed(self: Adds) -> PendingAdd | None:
        queue: deque[PendingAdd] = self._queue
        if not queue or not queue[0].complete:
            return None
        add = queue.popleft()
        self.last_confirmed = add.entry_id
        self.confirmed_length += add.size
        add.confirmed = True
        return add

    def replied(self: Adds, add: PendingAdd, slot: Slot, code: ReplyCode) -> Todo:
        todo = _replied(self, add, slot, code)
        if todo is Todo.NOTHING and code is ReplyCode.OK and self._queue and self._queue[0] is add:
            return Todo.CONFIRM
        return todo

    return [(Adds, "next_confirmed", next_confirmed), (Adds, "replied", replied)]


def _pending_is_not_resent() -> Sequence[Patch]:
    def replace_(self: Adds, new: Mapping[int, BookieId]) -> list[tuple[PendingAdd, Slot]]:
        _replace(self, new)
        return []

    return [(Adds, "replace", replace_)]


def _failures_meanwhile_are_dropped() -> Sequence[Patch]:
    end_change = Adds.end_change

    def end(self: Adds) -> Todo:
        self._failed = {}
        for add in self._queue:
            add.failures = 0
        return end_change(self)

    return [(Adds, "end_change", end)]


def _new_ensemble_from(first: Callable[[int], int]) -> Callable[[], Sequence[Patch]]:
    with_replacements = ensemble_change.with_replacements

    def changed(
        metadata: LedgerMetadata, first_entry_id: int, new: Mapping[int, BookieId]
    ) -> LedgerMetadata:
        return with_replacements(metadata, first(first_entry_id), new)

    return lambda: [(ensemble_change, "with_replacements", changed)]


def _takeover_is_not_noticed() -> Sequence[Patch]:
    def read(
        self: ensemble_change.EnsembleChange, record: VersionedMetadata
    ) -> ensemble_change.ChangeEffect:
        self._held = record
        return self.start()

    return [(ensemble_change.EnsembleChange, "read", read)]


def _confirmed_is_promised_early() -> Sequence[Patch]:
    seal = Digest.seal

    def early(
        self: Digest,
        ledger_id: int,
        entry_id: int,
        last_add_confirmed: int,
        length: int,
        data: bytes,
    ) -> Sequence[bytes]:
        return seal(self, ledger_id, entry_id, entry_id - 1, length, data)

    return [(Digest, "seal", early)]


def _close_without_looking() -> Sequence[Patch]:
    async def write_end(self: BookKeeperWritableLedger) -> VersionedMetadata:
        metadata = self._services.metadata
        while True:
            held = await metadata.read(self.ledger_id)
            closed = replace(
                held.metadata,
                state=LedgerState.CLOSED,
                last_entry_id=self.last_add_confirmed,
                length=self.length,
            )
            with contextlib.suppress(LedgerMetadataConflict):
                return await metadata.write(self.ledger_id, closed, expect=held.version)

    return [(BookKeeperWritableLedger, "_write_end", write_end)]


def _no_fence() -> Sequence[Patch]:
    init = AskBookie.__init__

    def unfenced(self: AskBookie, read: ReadOne, fence: bool) -> None:
        init(self, read, False)

    return [(AskBookie, "__init__", unfenced)]


def _reads_do_not_fence() -> Sequence[Patch]:
    init = AskBookie.__init__

    def unfenced(self: AskBookie, read: ReadOne, fence: bool) -> None:
        init(self, read, fence and read.entry_id < 0)

    return [(AskBookie, "__init__", unfenced)]


def _one_bookie_is_fenced() -> Sequence[Patch]:
    one = property(lambda self: bool(self.answered))
    return [(Coverage, "is_enough", one), *_reads_do_not_fence()]


def _one_missing_is_absent() -> Sequence[Patch]:
    return [(recovery, "enough_answers", lambda metadata: 1)]


def _silence_is_an_answer() -> Sequence[Patch]:
    said = frozenset(ReplyCode) - {ReplyCode.OK}
    return [(recovery, "NEGATIVE", said)]


def _limbo_is_an_answer() -> Sequence[Patch]:
    said = NEGATIVE | {ReplyCode.STATE_UNKNOWN}
    return [(recovery, "NEGATIVE", said)]


def _nothing_written_back() -> Sequence[Patch]:
    def skip(self: Recovery, found: list[OpenedEntry], at_end: bool) -> list[RecoveryEffect]:
        self._move(recovery.RecoveryState.WRITING_BACK)
        self._end, self._length = found[-1].entry_id, found[-1].length
        return self._close() if at_end else self._read_window()

    return [(Recovery, "_write_back", skip)]


def _written_back_as_confirmed() -> Sequence[Patch]:
    write_back = Recovery._write_back

    def advanced(self: Recovery, found: list[OpenedEntry], at_end: bool) -> list[RecoveryEffect]:
        seal = self._seal
        self._seal = lambda entry_id, last, length, data: seal(entry_id, entry_id - 1, length, data)
        try:
            return write_back(self, found, at_end)
        finally:
            self._seal = seal

    return [(Recovery, "_write_back", advanced)]


def _changes_are_not_recorded() -> Sequence[Patch]:
    close = Recovery._close

    def forget(self: Recovery) -> list[RecoveryEffect]:
        self._changed = self._metadata
        return close(self)

    return [(Recovery, "_close", forget)]


def _own_end_after_a_conflict() -> Sequence[Patch]:
    close, conflict = Recovery._close, Recovery.conflict

    def remember(self: Recovery) -> list[RecoveryEffect]:
        effects = close(self)
        self._mine = effects[0]  # type: ignore[attr-defined]
        return effects

    def mine(self: Recovery) -> list[RecoveryEffect]:
        wanted = getattr(self, "_mine", None)
        if isinstance(wanted, WriteRecord):
            return [RecoveryDone(VersionedMetadata(wanted.metadata, wanted.expect))]
        return conflict(self)

    return [(Recovery, "_close", remember), (Recovery, "conflict", mine)]


def _length_of_nothing() -> Sequence[Patch]:
    def measure(self: Recovery) -> list[RecoveryEffect]:
        if self._end == self._start:
            newest = self._ends.newest
            self._length = 0 if newest is None else newest.length
        return self._close()

    return [(Recovery, "_measure", measure)]


def _ensemble_start_is_ignored() -> Sequence[Patch]:
    init = LastConfirmedRead.__init__

    def from_the_start(self: LastConfirmedRead, metadata: LedgerMetadata) -> None:
        init(self, metadata)
        self.last_confirmed = -1

    return [(LastConfirmedRead, "__init__", from_the_start)]


def _digests_are_not_looked_at() -> Sequence[Patch]:
    def trusting(self: Digest, body: bytes, ledger_id: int, entry_id: int | None) -> OpenedEntry:
        at = [int.from_bytes(body[n : n + 8], "big", signed=True) for n in (8, 16, 24)]
        return OpenedEntry(at[0], at[1], at[2], body[32 + self.digest_bytes :])

    return [(Digest, "open", trusting)]


BROKEN_RULES = (
    BrokenRule("an acknowledgement of a replaced bookie counts", _any_ack_counts, 253),
    BrokenRule("a replaced bookie's acknowledgements are kept", _acks_are_kept, 68),
    BrokenRule("adds are confirmed out of order", _confirmed_out_of_order, 0),
    BrokenRule("adds are confirmed during a change", _confirmed_during_a_change, 2),
    BrokenRule("pending entries are not sent to the new bookie", _pending_is_not_resent, 55),
    BrokenRule("failures during a change are dropped", _failures_meanwhile_are_dropped, 548),
    BrokenRule("a new ensemble starts too late", _new_ensemble_from(lambda first: first + 1), 30),
    BrokenRule("a new ensemble starts too early", _new_ensemble_from(lambda first: 0), 5),
    BrokenRule("a takeover is not noticed by a change", _takeover_is_not_noticed, 32),
    BrokenRule("a header promises more than is confirmed", _confirmed_is_promised_early, 2),
    BrokenRule("a close does not look at the record", _close_without_looking, 623),
    BrokenRule("recovery does not fence", _no_fence, 17),
    BrokenRule("one bookie is fenced", _one_bookie_is_fenced, 1975),
    BrokenRule("one missing copy makes an entry absent", _one_missing_is_absent, 32),
    BrokenRule("an error counts as an answer", _silence_is_an_answer, 77),
    BrokenRule("an unknown state counts as an answer", _limbo_is_an_answer, 828),
    BrokenRule("nothing is written back", _nothing_written_back, 2),
    BrokenRule("what is written back counts as confirmed", _written_back_as_confirmed, 555),
    BrokenRule("ensembles of a recovery are not recorded", _changes_are_not_recorded, 23),
    BrokenRule("a recovery that lost goes by its own end", _own_end_after_a_conflict, 6),
    BrokenRule("the length is taken from any header", _length_of_nothing, 36),
    BrokenRule("the start of the last ensemble is ignored", _ensemble_start_is_ignored, 122),
    BrokenRule("digests are not looked at", _digests_are_not_looked_at, 10),
)
