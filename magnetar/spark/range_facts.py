"""The facts that a scan collects of one range of a segment, for audits and offloads.

Pure.  They are by transaction and by producer, with a bounded number of places where something is
wrong, so they do not grow with the rows of the range.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from magnetar.protocol.ids import Position

__all__ = [
    "Hole",
    "SeenProducer",
    "SeenRange",
    "SeenTransaction",
    "Stamp",
    "Tally",
    "join_ranges",
]

_HASHES: Final = 1 << 64
HOLES_KEPT: Final = 100
"""The most holes of a range, and the most damaged entries, that are kept."""
PLAIN: Final = ""
"""The transaction name of rows that are in no transaction."""


class Tally(NamedTuple):
    """Rows: how many, and the sum of their hashes modulo 2^64."""

    messages: int = 0
    hash_sum: int = 0

    def plus(self, other: "Tally") -> "Tally":
        """The rows of both."""
        return Tally(self.messages + other.messages, (self.hash_sum + other.hash_sum) % _HASHES)


NO_ROWS: Final = Tally()


class Stamp(NamedTuple):
    """The publish time and the sequence id that a producer gave a message."""

    publish_time_ms: int
    sequence_id: int

    def may_follow(self, before: "Stamp") -> bool:
        """Whether a message with this stamp may come after one with `before` in a segment."""
        # Sequence ids rise, unless the producer began anew, which a later publish time shows.
        return (
            self.sequence_id > before.sequence_id or self.publish_time_ms > before.publish_time_ms
        )

    def rises_from(self, before: "Stamp") -> bool:
        """Whether this stamp may follow `before`, and its publish time is not earlier."""
        # If all stamps rise, none comes twice: a producer with a copy is always a suspect.
        return self.publish_time_ms >= before.publish_time_ms and self.may_follow(before)


class Hole(NamedTuple):
    """Entries of a ledger that should be there and are not: first and last, both included."""

    ledger_id: int
    first: int
    last: int

    def before(self, position: Position | None) -> int:
        """The number of its entries that lie before a position."""
        if position is None or self.ledger_id > position.ledger_id:
            return 0
        many = self.last - self.first + 1
        if self.ledger_id < position.ledger_id:
            return many
        return min(max(position.entry_id - self.first, 0), many)


@dataclass(frozen=True, slots=True)
class SeenTransaction:
    """Rows of one transaction (PLAIN: of none) in one segment, by the visibility of their entry.

    A message in pieces counts where its last piece lies.
    """

    segment_id: int
    txn: str
    first: Position
    last: Position
    readable: Tally = NO_ROWS
    aborted: Tally = NO_ROWS
    open: Tally = NO_ROWS
    incomplete: int = 0
    """Messages in pieces that were not counted, as their first pieces lie in another range."""
    encrypted: int = 0
    """Messages in entries that need keys to be opened; their metadata, in clear, counts them."""

    @property
    def all(self) -> Tally:
        """All rows, of any visibility."""
        return self.readable.plus(self.aborted).plus(self.open)

    @property
    def whole(self) -> int:
        """The number of rows, including incomplete and encrypted messages."""
        return self.all.messages + self.incomplete + self.encrypted

    def plus(self, later: "SeenTransaction") -> "SeenTransaction":
        """The facts of two ranges, in any order."""
        return replace(
            self,
            first=min(self.first, later.first),
            last=max(self.last, later.last),
            readable=self.readable.plus(later.readable),
            aborted=self.aborted.plus(later.aborted),
            open=self.open.plus(later.open),
            incomplete=self.incomplete + later.incomplete,
            encrypted=self.encrypted + later.encrypted,
        )


@dataclass(frozen=True, slots=True)
class SeenProducer:
    """Messages of one producer in one segment.

    `suspect`: the first place where a stamp does not rise from the one before.  That alone is no
    violation: batches that were open at once may interleave, and clocks may go back.
    """

    segment_id: int
    producer: str
    first: Stamp
    last: Stamp
    messages: int
    suspect: Position | None = None


@dataclass(frozen=True, slots=True)
class SeenRange:
    """The facts of one range, or of several adjacent ones."""

    segment_id: int
    start: Position
    end: Position
    """The end, exclusive."""
    entries: int = 0
    rows: int = 0
    bytes: int = 0
    transactions: Mapping[str, SeenTransaction] = field(default_factory=dict)
    producers: Mapping[str, SeenProducer] = field(default_factory=dict)
    last_of_ledger: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """First and last entry that was seen of each ledger."""
    holes: tuple[Hole, ...] = ()
    damaged: tuple[Position, ...] = ()
    """Entries that cannot be decoded."""
    incomplete: int = 0
    """Messages in pieces of which only the last ones lie in a range."""
    encrypted: int = 0
    """Encrypted entries, which were not opened."""
    hidden: int = 0
    """Rows that consumers do not get."""


def join_ranges(ranges: Sequence[SeenRange]) -> SeenRange:
    """The facts of adjacent ranges of one segment, given in order, as those of one range."""
    whole = ranges[0]
    for after in ranges[1:]:
        whole = _join(whole, after)
    return whole


def _join(before: SeenRange, after: SeenRange) -> SeenRange:
    assert before.segment_id == after.segment_id, "ranges of one segment only"
    assert before.end <= after.start, f"{after.start} comes before {before.end}"
    return SeenRange(
        before.segment_id,
        before.start,
        after.end,
        before.entries + after.entries,
        before.rows + after.rows,
        before.bytes + after.bytes,
        _merge_transactions(before.transactions, after.transactions),
        _merge_producers(before.producers, after.producers, after.start),
        *_merge_ledgers(before, after),
        (*before.damaged, *after.damaged)[:HOLES_KEPT],
        before.incomplete + after.incomplete,
        before.encrypted + after.encrypted,
        before.hidden + after.hidden,
    )


def _merge_transactions(
    before: Mapping[str, SeenTransaction], after: Mapping[str, SeenTransaction]
) -> dict[str, SeenTransaction]:
    found = dict(before)
    for txn, seen in after.items():
        known = found.get(txn)
        found[txn] = seen if known is None else known.plus(seen)
    return found


def _merge_producers(
    before: Mapping[str, SeenProducer], after: Mapping[str, SeenProducer], boundary: Position
) -> dict[str, SeenProducer]:
    found = dict(before)
    for name, later in after.items():
        known = found.get(name)
        if known is None:
            found[name] = later
            continue
        suspect = known.suspect or later.suspect
        if suspect is None and not later.first.rises_from(known.last):
            suspect = boundary
        found[name] = replace(
            known, last=later.last, messages=known.messages + later.messages, suspect=suspect
        )
    return found


def _merge_ledgers(
    before: SeenRange, after: SeenRange
) -> tuple[Mapping[int, tuple[int, int]], tuple[Hole, ...]]:
    holes = [*before.holes, *after.holes]
    spans = dict(before.last_of_ledger)
    for ledger_id, (first, last) in after.last_of_ledger.items():
        known = spans.get(ledger_id)
        if known is None:
            spans[ledger_id] = first, last
            continue
        if first > known[1] + 1:
            holes.append(Hole(ledger_id, known[1] + 1, first - 1))
        spans[ledger_id] = known[0], max(last, known[1])
    return spans, tuple(sorted(holes)[:HOLES_KEPT])


def missing_of(
    seen: SeenRange, entries_of: Mapping[int, int], earliest: Position
) -> Iterable[Hole]:
    """The holes of a range, with the entries that are missing at the ends of its ledgers.

    `entries_of` is the number of entries of each ended ledger.  Entries before `earliest` are not
    retained.
    """
    yield from seen.holes
    for ledger_id, entries in sorted(entries_of.items()):
        begin = max(seen.start, earliest)
        if entries == 0 or ledger_id < begin.ledger_id or ledger_id > seen.end.ledger_id:
            continue
        lowest = max(begin.entry_id, 0) if ledger_id == begin.ledger_id else 0
        beyond = min(entries, seen.end.entry_id) if ledger_id == seen.end.ledger_id else entries
        if lowest >= beyond:
            continue
        span = seen.last_of_ledger.get(ledger_id)
        if span is None:
            yield Hole(ledger_id, lowest, beyond - 1)
            continue
        if span[0] > lowest:
            yield Hole(ledger_id, lowest, span[0] - 1)
        if span[1] < beyond - 1:
            yield Hole(ledger_id, span[1] + 1, beyond - 1)
