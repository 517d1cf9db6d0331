"""Reads from bookies: the order of replicas, and the number of answers that is enough.  Pure."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from config import bounds
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import OpenedEntry
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata

NEGATIVE = frozenset({ReplyCode.NO_SUCH_LEDGER, ReplyCode.NO_SUCH_ENTRY})
"""Codes by which a bookie says that it does not hold an entry."""


def enough_answers(metadata: LedgerMetadata) -> int:
    """Number of members of a write set without which no entry can have been acknowledged."""
    return metadata.write_quorum - metadata.ack_quorum + 1


class ReadState(enum.Enum):
    """State of one read."""

    READING = "reading"
    DONE = "done"
    FAILED = "failed"


class ReadFailure(enum.Enum):
    """The reason that no replica gave an entry."""

    UNAVAILABLE = "some bookies did not answer"
    MISSING = "no bookie holds it"
    DAMAGED = "each copy that there is is damaged"


@dataclass(frozen=True, slots=True, eq=False)
class ReadOne:
    """Read an entry from a bookie; the id -1 stands for the last entry that the bookie holds."""

    bookie: BookieId
    entry_id: int


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Read entries from `first` on from a bookie."""

    bookie: BookieId
    first: int
    max_entries: int
    max_bytes: int


ReadEffect = ReadOne | ReadBatch


@dataclass(slots=True)
class _Attempt:
    """The replicas tried so far for one entry, or for the batch that begins with it."""

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
        """Count an answer without the entry."""
        self.negatives += code in NEGATIVE
        self.damaged += code is ReplyCode.OK

    @property
    def failure(self) -> ReadFailure:
        if self.negatives + self.damaged < len(self.replicas):
            # A bookie that does not answer now may have a whole copy: a later read may succeed.
            return ReadFailure.UNAVAILABLE
        return ReadFailure.DAMAGED if self.damaged else ReadFailure.MISSING


class RangeRead:
    """Reads the entries `first` to `last`, all confirmed, from their bookies.

    Replicas are tried in the order of the write set.  If every bookie of the ensemble has all
    entries they are read in batches, one at a time; else, and if no replica gives a batch, one by
    one, several at once.  Requests in flight are bounded in entries, and in bytes as far as sizes
    are known.

    The result is whole entries in order within `max_bytes`, at least one.  It may end before
    `last`: at that bound, or before an entry that no replica gives.
    """

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
        """`mean_bytes` is a first guess of an entry's size; an answer adds `overhead_bytes`."""
        self.state = ReadState.READING
        self.entries: list[bytes] = []
        self.failure: ReadFailure | None = None
        self.failed_entry_id = -1
        self.retries = 0
        """Number of answers without the entry."""
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
        """The first requests."""
        return self._more()

    def entry_replied(
        self, request: ReadOne, code: ReplyCode, found: OpenedEntry | None
    ) -> list[ReadEffect]:
        """Process the answer for one entry; OK without an entry means that the copy is damaged."""
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
        """Take the answer to a batch: its first entries that are whole; OK with none: damaged."""
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
        """Take entries in order; end at the bound, at the last entry, or at one that is lost."""
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
        """The requests that may be sent now."""
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
        expected = self._left + self._overhead * min(count, self._left // self._mean + 1)
        attempt = self._attempts[first] = _Attempt(self._replicas(first))
        bookie = attempt.next()
        if bookie is None:
            return []
        size = max(min(expected, bounds.LEDGER_BATCH_READ_BYTES), 1)
        return [ReadBatch(bookie, first, count, size)]

    def _replicas(self, entry_id: int) -> list[BookieId]:
        bookies = self._metadata.ensemble_of(entry_id).bookies
        return [bookies[place] for place in self._metadata.write_set(entry_id)]


@dataclass(slots=True)
class Coverage:
    """Whether enough bookies of the last ensemble answered."""

    metadata: LedgerMetadata
    answered: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)

    @property
    def is_enough(self) -> bool:
        """Whether enough members of each write set answered."""
        return self._each_has(self.answered)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether too many members of a write set failed to answer."""
        everyone = set(range(self.metadata.ensemble_size))
        return not self._each_has(everyone - self.silent)

    def _each_has(self, places: set[int]) -> bool:
        # Q18: in each write set so many that no entry can be acknowledged by the others alone.
        needed = enough_answers(self.metadata)
        return all(
            len(places.intersection(self.metadata.write_set(first))) >= needed
            for first in range(self.metadata.ensemble_size)
        )


class LastConfirmedRead:
    """Reads the last add confirmed from the bookies of the last ensemble.

    `last_confirmed` is the highest in the answers until it was DONE, and `newest` the entry that
    has it.
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
        """The requests, one for each bookie."""
        return list(self._requests)

    def replied(self, request: ReadOne, code: ReplyCode, found: OpenedEntry | None) -> None:
        """Take the answer of a bookie; OK without an entry: it is damaged, which is no answer."""
        place = self._requests.get(request)
        if self.state is not ReadState.READING or place is None:
            return
        # Q19: other codes leave it unknown what the bookie holds.
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
