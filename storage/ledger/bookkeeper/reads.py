"""Reading from bookies: which replica is asked for what, and when an answer is enough.  Pure.

Rules:

- An entry is asked for in the order of its write set; after an error, a missing entry or a damaged
  one the next replica is asked.
- Entries come as a batch where every bookie of the ensemble has all of them, one batch at a time;
  elsewhere, and when no replica gives a batch, one by one, several at once.  What is in flight is
  bounded in entries, and in bytes as far as sizes are known.
- A result is whole entries in order within `max_bytes`, at least one.  It may end before an entry
  that cannot be had, or that is larger than what is left if all before it were.
- The end of a ledger is known when in every write set so many have answered that no entry can have
  been acknowledged by the others alone.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from config import bounds
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import OpenedEntry
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata

NEGATIVE = frozenset({ReplyCode.NO_SUCH_LEDGER, ReplyCode.NO_SUCH_ENTRY})
"""A bookie says that it does not hold an entry.  All that is neither this nor OK says nothing."""


def enough_answers(metadata: LedgerMetadata) -> int:
    """Members of a write set without which no entry can have been acknowledged."""
    return metadata.write_quorum - metadata.ack_quorum + 1


class ReadState(enum.Enum):
    """Of one read."""

    READING = "reading"
    DONE = "done"
    FAILED = "failed"


class ReadFailure(enum.Enum):
    """Why no replica gave an entry."""

    UNAVAILABLE = "some bookies did not answer"
    MISSING = "no bookie holds it"
    DAMAGED = "each copy that there is is damaged"


@dataclass(frozen=True, slots=True, eq=False)
class ReadOne:
    """Ask a bookie for an entry; -1: the last one that it holds."""

    bookie: BookieId
    entry_id: int


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Ask a bookie for entries from `first` on."""

    bookie: BookieId
    first: int
    max_entries: int
    max_bytes: int


ReadEffect = ReadOne | ReadBatch


@dataclass(slots=True)
class _Attempt:
    """How far one entry, or the batch that begins with it, has got with its replicas."""

    replicas: Sequence[BookieId]
    asked: int = 0
    negatives: int = 0
    damaged: int = 0

    def next(self) -> BookieId | None:
        if self.asked == len(self.replicas):
            return None
        self.asked += 1
        return self.replicas[self.asked - 1]

    def note(self, code: ReplyCode) -> None:
        """An answer that is no help."""
        self.negatives += code in NEGATIVE
        self.damaged += code is ReplyCode.OK

    @property
    def failure(self) -> ReadFailure:
        if self.negatives + self.damaged < len(self.replicas):
            # A bookie that is silent now may have a whole copy: this passes.
            return ReadFailure.UNAVAILABLE
        return ReadFailure.DAMAGED if self.damaged else ReadFailure.MISSING


class RangeRead:
    """Reads the entries `first` to `last`, all confirmed, from the bookies that have them."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        first: int,
        last: int,
        max_bytes: int,
        *,
        mean_bytes: int,
        overhead_bytes: int,
        batches: bool,
    ) -> None:
        """`mean_bytes`: of an entry, to begin with; `overhead_bytes`: around one in an answer."""
        self.state = ReadState.READING
        self.entries: list[bytes] = []
        self.failure: ReadFailure | None = None
        self.failed_entry_id = -1
        self.retries = 0
        """Answers that were no help."""
        self.batches_refused = False
        self._metadata = metadata
        self._next = first
        self._last = last
        self._left = max_bytes
        self._smallest = 0
        self._mean = max(mean_bytes, 1)
        self._overhead = overhead_bytes
        self._batches = batches and metadata.ensemble_size == metadata.write_quorum
        self._ask = first
        self._attempts: dict[int, _Attempt] = {}
        self._found: dict[int, bytes] = {}
        self._lost: dict[int, ReadFailure] = {}

    def start(self) -> list[ReadEffect]:
        """What to ask first."""
        return self._more()

    def entry_replied(
        self, request: ReadOne, code: ReplyCode, found: OpenedEntry | None
    ) -> list[ReadEffect]:
        """The answer to one entry; OK without one: it was damaged."""
        entry_id = request.entry_id
        attempt = self._attempts.get(entry_id)
        if self.state is not ReadState.READING or attempt is None:
            return []
        if found is not None:
            del self._attempts[entry_id]
            self._found[entry_id] = found.data
            self._deliver()
            return self._more()
        return self._next_replica(entry_id, attempt, code)

    def batch_replied(
        self, request: ReadBatch, code: ReplyCode, found: Sequence[OpenedEntry]
    ) -> list[ReadEffect]:
        """The answer to a batch: what was whole from its first entry on; OK with none: damaged."""
        attempt = self._attempts.get(request.first)
        if self.state is not ReadState.READING or attempt is None:
            return []
        if found:
            del self._attempts[request.first]
            for place, entry in enumerate(found[: request.max_entries]):
                self._found[request.first + place] = entry.data
            self._deliver()
            return self._more()
        self.batches_refused |= code is ReplyCode.BAD_REQUEST
        attempt.note(code)
        self.retries += 1
        bookie = attempt.next()
        if bookie is not None:
            return [ReadBatch(bookie, request.first, request.max_entries, request.max_bytes)]
        del self._attempts[request.first]
        self._batches = False
        return self._more()

    def _next_replica(self, entry_id: int, attempt: _Attempt, code: ReplyCode) -> list[ReadEffect]:
        attempt.note(code)
        self.retries += 1
        bookie = attempt.next()
        if bookie is not None:
            return [ReadOne(bookie, entry_id)]
        del self._attempts[entry_id]
        self._lost[entry_id] = attempt.failure
        self._deliver()
        return self._more()

    def _deliver(self) -> None:
        """Take what is there, in order; end at the bound, at the last one, or at a lost one."""
        while self._next <= self._last:
            lost = self._lost.get(self._next)
            if lost is not None:
                self._end(lost)
                return
            data = self._found.pop(self._next, None)
            if data is None:
                return
            size = len(data)
            if self.entries and size > self._left:
                self._end(None)
                return
            self._smallest = min(self._smallest, size) if self.entries else size
            self.entries.append(data)
            self._left -= size
            self._next += 1
            self._mean = max((self._mean + size) // 2, 1)
            if self._left < self._smallest:
                break
        self._end(None)

    def _end(self, failure: ReadFailure | None) -> None:
        self._found.clear()
        self._attempts.clear()
        if failure is None or self.entries:
            self.state = ReadState.DONE
        else:
            self.state = ReadState.FAILED
            self.failure = failure
            self.failed_entry_id = self._next

    def _more(self) -> list[ReadEffect]:
        """Ask for what may be asked for now."""
        if self.state is not ReadState.READING:
            return []
        if self._batches and self._next < self._last:
            return self._next_batch()
        effects: list[ReadEffect] = []
        self._ask = max(self._ask, self._next)
        while self._ask <= self._last and self._has_room():
            attempt = self._attempts[self._ask] = _Attempt(self._replicas(self._ask))
            bookie = attempt.next()
            if bookie is not None:
                effects.append(ReadOne(bookie, self._ask))
            self._ask += 1
        return effects

    def _has_room(self) -> bool:
        ahead = self._ask - self._next
        if ahead == 0:
            return True
        return ahead < bounds.LEDGER_READS_IN_FLIGHT and (ahead + 1) * self._mean <= self._left

    def _next_batch(self) -> list[ReadEffect]:
        if self._attempts:
            return []
        first = self._next
        end = min(
            (e.first_entry_id for e in self._metadata.ensembles if e.first_entry_id > first),
            default=self._last + 1,
        )
        count = min(end - first, self._last + 1 - first, bounds.LEDGER_BATCH_READ_ENTRIES)
        room = self._left + self._overhead * min(count, self._left // self._mean + 1)
        attempt = self._attempts[first] = _Attempt(self._replicas(first))
        bookie = attempt.next()
        if bookie is None:
            return []
        size = max(min(room, bounds.LEDGER_BATCH_READ_BYTES), 1)
        return [ReadBatch(bookie, first, count, size)]

    def _replicas(self, entry_id: int) -> list[BookieId]:
        bookies = self._metadata.ensemble_of(entry_id).bookies
        return [bookies[place] for place in self._metadata.write_set(entry_id)]


@dataclass(slots=True)
class Coverage:
    """Whether those who answered say enough about every write set of the last ensemble."""

    metadata: LedgerMetadata
    answered: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)

    @property
    def is_enough(self) -> bool:
        """In each write set enough answered."""
        return self._each_has(self.answered)

    @property
    def is_out_of_reach(self) -> bool:
        """Too many will not answer."""
        everyone = set(range(self.metadata.ensemble_size))
        return not self._each_has(everyone - self.silent)

    def _each_has(self, places: set[int]) -> bool:
        needed = enough_answers(self.metadata)
        return all(
            len(places.intersection(self.metadata.write_set(first))) >= needed
            for first in range(self.metadata.ensemble_size)
        )


class LastConfirmedRead:
    """What the bookies of the last ensemble know of the last add confirmed.

    `last_confirmed` and `newest`, the entry that says so, are those of all who answered before it
    was DONE.
    """

    def __init__(self, metadata: LedgerMetadata) -> None:
        self.state = ReadState.READING
        self.last_confirmed = metadata.last_ensemble.first_entry_id - 1
        self.newest: OpenedEntry | None = None
        self._coverage = Coverage(metadata)
        self._requests = {
            ReadOne(bookie, -1): place
            for place, bookie in enumerate(metadata.last_ensemble.bookies)
        }

    def start(self) -> list[ReadOne]:
        """Ask all of them."""
        return list(self._requests)

    def replied(self, request: ReadOne, code: ReplyCode, found: OpenedEntry | None) -> None:
        """The answer of one; OK without an entry: it was damaged, which says nothing."""
        place = self._requests.get(request)
        if self.state is not ReadState.READING or place is None:
            return
        if found is not None or code in NEGATIVE:
            self._coverage.answered.add(place)
        else:
            self._coverage.silent.add(place)
        if found is not None and found.last_add_confirmed >= self.last_confirmed:
            self.last_confirmed = found.last_add_confirmed
            self.newest = found
        if self._coverage.is_enough:
            self.state = ReadState.DONE
        elif self._coverage.is_out_of_reach:
            self.state = ReadState.FAILED
