"""Groups: what of their attempts counts is decided at once, and once for each batch of a query.
Pure.

Pure: what callers give and are given, to and from the wire.

    attempt = await key.begin_attempt(nonce)         # one for each try of each part of a batch
    ... send, acknowledge in it; await attempt.settled() ...
    await key.commit_group(nonce, attempt.group, [Winner(attempt.id, counts)], query=..., batch=...)

Rules:

- A nonce names the group of one try of one batch; whoever draws it draws another for every try.
- Of a group that commits, the winners are committed, and every other attempt is aborted.
- Counts are of each winner and segment, or where that makes too large a command, of each segment.
- The last batch of each query that a group has committed is kept with the key: what was done before
  is not done again, and is told (`done`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from magnetar.bounds import MAX_COMMIT_BYTES
from magnetar.errors import InvalidArgument
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import LONG_MAX
from magnetar.protocol.txn_id import TxnId

__all__ = ["CommittedGroup", "GroupRecord", "SegmentCount", "Winner"]

_HASH_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What the last group of a key committed for."""

    query: str
    batch: int
    positions: str | None
    """As it was given to the commit."""
    group: TxnId | None


@dataclass(frozen=True, slots=True)
class SegmentCount:
    """What an attempt wrote to a segment."""

    messages: int
    hash_sum: int
    """Of the payloads' hashes, modulo 2^64."""


@dataclass(frozen=True, slots=True)
class Winner:
    """An attempt that counts, and what it wrote, by the topic names of segments."""

    attempt: TxnId
    counts: Mapping[str, SegmentCount]


@dataclass(frozen=True, slots=True)
class CommittedGroup:
    """How the commit of a group ended."""

    done: bool
    """The batch had been committed before, by another group: this one is aborted."""
    group: TxnId | None
    """The group that has the batch, if that is known."""


def record_of(told: pb.GroupRecord) -> GroupRecord:
    """What a broker told of a key."""
    named = told.HasField("txnid_least_bits")
    return GroupRecord(
        told.query,
        told.batch,
        told.positions if told.HasField("positions") else None,
        TxnId(told.txnid_most_bits, told.txnid_least_bits) if named else None,
    )


def attempt_request(
    nonce: str, timeout_ms: int, query: str | None, batch: int | None
) -> pb.BaseCommand:
    """BEGIN_ATTEMPT.  Raises `InvalidArgument`."""
    if (query is None) != (batch is None):
        raise InvalidArgument("A batch is of a query: give both query and batch, or none of them.")
    request = pb.CommandBeginAttempt(
        request_id=0, key="", epoch=0, nonce=_name("nonce", nonce), timeout_ms=timeout_ms
    )
    if query is not None and batch is not None:
        request.query, request.batch = _name("query", query), _batch(batch)
    return pb.BaseCommand(type=pb.BaseCommand.BEGIN_ATTEMPT, begin_attempt=request)


def commit_request(
    nonce: str,
    group: TxnId | None,
    winners: Sequence[Winner],
    query: str,
    batch: int,
    positions: str | None,
) -> pb.BaseCommand:
    """COMMIT_GROUP.  Raises `InvalidArgument`, also for what fits into no command."""
    request = pb.CommandCommitGroup(
        request_id=0,
        key="",
        epoch=0,
        nonce=_name("nonce", nonce),
        query=_name("query", query),
        batch=_batch(batch),
    )
    if group is not None:
        request.group_least_bits = group.least
    if positions is not None:
        request.positions = positions
    for winner in winners:
        if winner.attempt.group != group or not winner.attempt.attempt_index:
            raise InvalidArgument(
                f"{winner.attempt} is no attempt of the group {group}; give the id of an attempt "
                "that was begun under this nonce, and its group."
            )
        told = request.winners.add(attempt_least_bits=winner.attempt.least)
        for segment, count in winner.counts.items():
            told.counts.add(
                segment=segment, messages=count.messages, hash_sum=count.hash_sum & _HASH_MASK
            )
    if request.ByteSize() > MAX_COMMIT_BYTES:
        _tell_totals(request)
    if (size := request.ByteSize()) > MAX_COMMIT_BYTES:
        raise InvalidArgument(
            f"The commit of batch {batch} has {size} bytes, and {MAX_COMMIT_BYTES} are the most: "
            "write with fewer tasks, to fewer segments, or read fewer topics with one query."
        )
    return pb.BaseCommand(type=pb.BaseCommand.COMMIT_GROUP, commit_group=request)


def _tell_totals(request: pb.CommandCommitGroup) -> None:
    """Instead of what each winner wrote."""
    messages, hashes = Counter[str](), Counter[str]()
    for winner in request.winners:
        for count in winner.counts:
            messages[count.segment] += count.messages
            hashes[count.segment] += count.hash_sum
        winner.ClearField("counts")
    for segment, total in messages.items():
        request.totals.add(segment=segment, messages=total, hash_sum=hashes[segment] & _HASH_MASK)


def abort_request() -> pb.BaseCommand:
    """ABORT_GROUP."""
    request = pb.CommandAbortGroup(request_id=0, key="", epoch=0)
    return pb.BaseCommand(type=pb.BaseCommand.ABORT_GROUP, abort_group=request)


def extend_request(group: TxnId, timeout_ms: int) -> pb.BaseCommand:
    """EXTEND_GROUP."""
    request = pb.CommandExtendGroup(
        request_id=0, key="", epoch=0, group_least_bits=group.group.least, timeout_ms=timeout_ms
    )
    return pb.BaseCommand(type=pb.BaseCommand.EXTEND_GROUP, extend_group=request)


def _name(what: str, text: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidArgument(f"The {what} is {text!r}; give it a text that is not empty.")
    return text


def _batch(number: int) -> int:
    if not isinstance(number, int) or not 0 <= number <= LONG_MAX:
        raise InvalidArgument(f"The batch is {number!r}; give its number, from 0 on.")
    return number
