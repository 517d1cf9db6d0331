"""Groups of attempts: a group commits its winners at once, once for each batch of a query.  Pure.

    attempt = await key.begin_attempt(nonce)         # one for each try of each part of a batch
    ... send, acknowledge in it; await attempt.settled() ...
    await key.commit_group(nonce, attempt.group, [Winner(attempt.id, counts)], query=..., batch=...)

A nonce is the name of one group; each try of a batch needs a new one.  When a group commits, its
winners are committed and all other attempts are aborted.  The key keeps the last committed batch of
each query, so that a batch that was committed before is not committed again (`done`).
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
    """The last batch that a group of a key has committed."""

    query: str
    batch: int
    positions: str | None
    """The positions given to the commit."""
    group: TxnId | None


@dataclass(frozen=True, slots=True)
class SegmentCount:
    """The number of messages that an attempt wrote to a segment, and the sum of their hashes."""

    messages: int
    hash_sum: int
    """The sum of the payloads' hashes, modulo 2^64."""


@dataclass(frozen=True, slots=True)
class Winner:
    """An attempt to commit, with its counts by the topic names of segments."""

    attempt: TxnId
    counts: Mapping[str, SegmentCount]


@dataclass(frozen=True, slots=True)
class CommittedGroup:
    """The result of the commit of a group."""

    done: bool
    """Whether the batch had been committed before by another group, so that this one is aborted."""
    group: TxnId | None
    """The group that committed the batch, if that is known."""


def record_of(message: pb.GroupRecord) -> GroupRecord:
    """The record in a broker's answer."""
    has_group = message.HasField("txnid_least_bits")
    return GroupRecord(
        message.query,
        message.batch,
        message.positions if message.HasField("positions") else None,
        TxnId(message.txnid_most_bits, message.txnid_least_bits) if has_group else None,
    )


def attempt_request(
    nonce: str, timeout_ms: int, query: str | None, batch: int | None
) -> pb.BaseCommand:
    """The command BEGIN_ATTEMPT.  Raises `InvalidArgument`."""
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
    """The command COMMIT_GROUP.  Raises `InvalidArgument`, also if it is too large."""
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
        added = request.winners.add(attempt_least_bits=winner.attempt.least)
        for segment, count in winner.counts.items():
            added.counts.add(
                segment=segment, messages=count.messages, hash_sum=count.hash_sum & _HASH_MASK
            )
    if request.ByteSize() > MAX_COMMIT_BYTES:
        _replace_by_totals(request)
    if (size := request.ByteSize()) > MAX_COMMIT_BYTES:
        raise InvalidArgument(
            f"The commit of batch {batch} has {size} bytes, and at most {MAX_COMMIT_BYTES} are "
            "allowed: write with fewer tasks, to fewer segments, or read fewer topics with one "
            "query."
        )
    return pb.BaseCommand(type=pb.BaseCommand.COMMIT_GROUP, commit_group=request)


def _replace_by_totals(request: pb.CommandCommitGroup) -> None:
    """Replace the counts of each winner by totals of each segment."""
    messages, hashes = Counter[str](), Counter[str]()
    for winner in request.winners:
        for count in winner.counts:
            messages[count.segment] += count.messages
            hashes[count.segment] += count.hash_sum
        winner.ClearField("counts")
    for segment, total in messages.items():
        request.totals.add(segment=segment, messages=total, hash_sum=hashes[segment] & _HASH_MASK)


def abort_request() -> pb.BaseCommand:
    """The command ABORT_GROUP."""
    request = pb.CommandAbortGroup(request_id=0, key="", epoch=0)
    return pb.BaseCommand(type=pb.BaseCommand.ABORT_GROUP, abort_group=request)


def extend_request(group: TxnId, timeout_ms: int) -> pb.BaseCommand:
    """The command EXTEND_GROUP."""
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
