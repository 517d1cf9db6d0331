"""Pure: groups of attempts, and their commits.

A group is one try of one batch; an attempt is one try of one task of it.  Attempts write under ids
of their own, and the header of the group decides for all of them (G1).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from config.bounds import (
    TXN_ATTEMPT_BLOCK,
    TXN_GROUP_COUNTS,
    TXN_GROUP_NAME_BYTES,
    TXN_GROUP_POSITIONS_BYTES,
    TXN_GROUP_SEGMENTS,
    TXN_GROUP_WINNERS,
    TXN_KEY_BYTES,
)
from magnetar.protocol.txn_id import LAST_ATTEMPT, TxnId
from txn.errors import InvalidGroup

HASH_SUM_MODULUS: Final = 1 << 64


class Batch(NamedTuple):
    """One batch of one query; batches of a query are numbered upwards."""

    query: str
    number: int


class SegmentCount(NamedTuple):
    """The rows written to one segment; `hash_sum` is of their payloads, modulo 2^64.

    Counts are for audits: nothing is decided by them.
    """

    messages: int
    hash_sum: int


Counts = Mapping[str, SegmentCount]
"""Counts by the name of the segment."""


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """The winners that a group committed, and the batch that it committed them for.

    `positions`: how far its inputs had been read, as the committer wrote it.  `winners`: the
    indexes of the committed attempts, with their counts; without if there are `totals`.
    """

    batch: Batch
    positions: str | None
    winners: Mapping[int, Counts]
    totals: Counts | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The part of a group's header that a plain transaction's header lacks.

    Attempts have indexes from 1 to `reserved`; not all of these may be used (G2).
    """

    nonce: str
    reserved: int
    commit: GroupCommit | None = None

    def is_reserved(self, index: int) -> bool:
        """Whether an attempt may have this index (G1, G2)."""
        return 1 <= index <= self.reserved

    def is_winner(self, index: int) -> bool:
        """Whether the attempt with this index was committed (G1)."""
        # G1: all other attempts of a committed group have aborted.
        return self.commit is not None and index in self.commit.winners


class GroupRecord(NamedTuple):
    """The batch of the last group of a key that committed; `group` is that group."""

    batch: Batch
    positions: str | None
    group: TxnId


def new_group(nonce: str) -> Group:
    """A group with its first block of indexes (G2)."""
    return Group(nonce, TXN_ATTEMPT_BLOCK)


def with_next_block(group: Group) -> Group:
    """The group with more indexes reserved (G2).  Raises `InvalidGroup` when there are no more."""
    if group.reserved >= LAST_ATTEMPT:
        raise InvalidGroup(
            f"The group of nonce {group.nonce!r} has had {group.reserved} attempts, as many as it "
            "may have: abort it, and begin another one."
        )
    # G2: to be stored before any of these indexes is used.
    return replace(group, reserved=min(group.reserved + TXN_ATTEMPT_BLOCK, LAST_ATTEMPT))


def with_totals(commit: GroupCommit) -> GroupCommit:
    """The commit with the total of each segment instead of the counts of each winner."""
    totals: dict[str, SegmentCount] = dict(commit.totals or {})
    for counts in commit.winners.values():
        for segment, count in counts.items():
            before = totals.get(segment, SegmentCount(0, 0))
            totals[segment] = SegmentCount(
                before.messages + count.messages,
                (before.hash_sum + count.hash_sum) % HASH_SUM_MODULUS,
            )
    return replace(commit, winners={index: {} for index in commit.winners}, totals=totals)


def bounded_commit(
    batch: Batch,
    positions: str | None,
    winners: Iterable[tuple[TxnId, Counts]],
    totals: Counts | None = None,
) -> GroupCommit:
    """Return a commit with winners by index, with totals where there are too many counts.

    `require_winners` checks that the attempts are the group's.  Raises `InvalidGroup` above a
    bound, and for an attempt that is named twice.
    """
    require_name("query", batch.query)
    if batch.number < 0:
        raise InvalidGroup(f"Batch {batch.number} is negative: count from 0.")
    if positions is not None and len(positions.encode()) > TXN_GROUP_POSITIONS_BYTES:
        raise InvalidGroup(
            f"The positions are longer than {TXN_GROUP_POSITIONS_BYTES} bytes: read fewer topics "
            "with one query, or keep them elsewhere."
        )
    by_index: dict[int, Counts] = {}
    for attempt, counts in winners:
        if attempt.attempt_index in by_index:
            raise InvalidGroup(f"Attempt {attempt} is named twice among the winners: name it once.")
        by_index[attempt.attempt_index] = counts
    if len(by_index) > TXN_GROUP_WINNERS:
        raise InvalidGroup(
            f"A group has {len(by_index)} winners, and {TXN_GROUP_WINNERS} at most: write with "
            "fewer tasks."
        )
    segments = {segment for counts in by_index.values() for segment in counts} | (
        totals or {}
    ).keys()
    if len(segments) > TXN_GROUP_SEGMENTS:
        raise InvalidGroup(
            f"A group wrote to {len(segments)} segments, and tells of {TXN_GROUP_SEGMENTS} at "
            "most: write to fewer topics with one query."
        )
    commit = GroupCommit(batch, positions, by_index, totals)
    counted = sum(len(counts) for counts in by_index.values())
    return with_totals(commit) if totals or counted > TXN_GROUP_COUNTS else commit


def require_winners(txn: TxnId, group: Group, winners: Sequence[TxnId]) -> None:
    """Raise `InvalidGroup` unless all winners are attempts of the group (G4)."""
    for winner in winners:
        # G4: with a reserved index.
        if winner.group != txn or not group.is_reserved(winner.attempt_index):
            raise InvalidGroup(
                f"{winner} is no attempt of group {txn}: name those that were begun in it."
            )


def require_nonce(nonce: str) -> str:
    """Return a nonce if it can name a group, and fits into a key.  Raises `InvalidGroup`."""
    return require_name("nonce", nonce, min(TXN_GROUP_NAME_BYTES, TXN_KEY_BYTES))


def require_name(what: str, name: str, most_bytes: int = TXN_GROUP_NAME_BYTES) -> str:
    """Return a name if it is neither empty nor too long.  Raises `InvalidGroup`."""
    if not name or len(name.encode(errors="replace")) > most_bytes:
        raise InvalidGroup(f"The {what} must have 1 to {most_bytes} bytes: choose another one.")
    return name
