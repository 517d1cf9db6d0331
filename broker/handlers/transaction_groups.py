"""Groups of attempts, Magnetar's own (commands 1004 to 1011): begun in, committed, aborted.

Rules:

- Every request is made under a transaction key and its epoch, as that connection's principal.  No
  connection holds a group: any that presents the epoch may ask.
- Every answer names the coordinator, errors included, as those of `transactions` do.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from broker.handlers.transactions import answered, enabled
from protocol.pulsar_pb2 import (
    BaseCommand,
    CommandAbortGroup,
    CommandAbortGroupResponse,
    CommandBeginAttempt,
    CommandBeginAttemptResponse,
    CommandCommitGroup,
    CommandCommitGroupResponse,
    CommandExtendGroup,
    CommandExtendGroupResponse,
    GroupWinner,
)
from txn.errors import InvalidGroup
from txn.group import Batch, Counts, SegmentCount, bounded_commit
from txn.transaction_groups import TransactionGroups
from txn.transaction_key import KeyName
from txn.txn_id import CoordinatorId, TxnId

if TYPE_CHECKING:
    from broker.connection import Connection
    from broker.handlers import Handler

_Request = CommandBeginAttempt | CommandCommitGroup | CommandAbortGroup | CommandExtendGroup


def _groups(connection: "Connection", request: _Request) -> tuple[TransactionGroups, KeyName]:
    coordinators = enabled(connection).coordinators
    return coordinators.groups_of(CoordinatorId(request.tc_id), connection.principal, request.key)


def _counts(winner: GroupWinner) -> Counts:
    counts = {each.segment: SegmentCount(each.messages, each.hash_sum) for each in winner.counts}
    if len(counts) != len(winner.counts):
        raise InvalidGroup(
            f"Attempt {winner.attempt_least_bits} counts a segment twice: add up what it wrote."
        )
    return counts


async def begin(connection: "Connection", command: BaseCommand, entry: bytes | None) -> None:
    """BEGIN_ATTEMPT; its timeout is in milliseconds."""
    request = command.begin_attempt
    enabled(connection)
    response = CommandBeginAttemptResponse(
        request_id=request.request_id, txnid_most_bits=request.tc_id
    )

    async def work() -> None:
        groups, name = _groups(connection, request)
        batch = Batch(request.query, request.batch) if request.HasField("batch") else None
        begun = await groups.begin_attempt(
            name, request.epoch, request.nonce, request.timeout_ms, batch
        )
        if begun is None:
            response.done = True
            return
        response.txnid_least_bits = begun.attempt.least
        response.group_least_bits = begun.attempt.group.least
        response.deadline_ms = begun.deadline_ms

    await answered(response, work())
    connection.send(
        BaseCommand(type=BaseCommand.BEGIN_ATTEMPT_RESPONSE, begin_attempt_response=response)
    )


async def commit(connection: "Connection", command: BaseCommand, entry: bytes | None) -> None:
    """COMMIT_GROUP: of its attempts, only the winners."""
    request = command.commit_group
    enabled(connection)
    response = CommandCommitGroupResponse(
        request_id=request.request_id, txnid_most_bits=request.tc_id
    )

    async def work() -> None:
        groups, name = _groups(connection, request)
        has_group, most = request.HasField("group_least_bits"), request.tc_id
        winners = [
            (TxnId(most, each.attempt_least_bits), _counts(each)) for each in request.winners
        ]
        committed = await groups.commit(
            name,
            request.epoch,
            request.nonce,
            TxnId(most, request.group_least_bits) if has_group else None,
            bounded_commit(
                Batch(request.query, request.batch),
                request.positions if request.HasField("positions") else None,
                winners,
            ),
            [attempt for attempt, _ in winners],
        )
        response.done = committed.done
        if committed.group is not None:
            response.group_least_bits = committed.group.least

    await answered(response, work())
    connection.send(
        BaseCommand(type=BaseCommand.COMMIT_GROUP_RESPONSE, commit_group_response=response)
    )


async def abort(connection: "Connection", command: BaseCommand, entry: bytes | None) -> None:
    """ABORT_GROUP: what is open of the key under that epoch."""
    request = command.abort_group
    enabled(connection)
    response = CommandAbortGroupResponse(
        request_id=request.request_id, txnid_most_bits=request.tc_id
    )

    async def work() -> None:
        groups, name = _groups(connection, request)
        response.aborted = await groups.abort(name, request.epoch)

    await answered(response, work())
    connection.send(
        BaseCommand(type=BaseCommand.ABORT_GROUP_RESPONSE, abort_group_response=response)
    )


async def extend(connection: "Connection", command: BaseCommand, entry: bytes | None) -> None:
    """EXTEND_GROUP: its attempts are still at work."""
    request = command.extend_group
    enabled(connection)
    response = CommandExtendGroupResponse(
        request_id=request.request_id, txnid_most_bits=request.tc_id
    )

    async def work() -> None:
        groups, name = _groups(connection, request)
        group = TxnId(request.tc_id, request.group_least_bits)
        response.deadline_ms = await groups.extend(name, request.epoch, group, request.timeout_ms)

    await answered(response, work())
    connection.send(
        BaseCommand(type=BaseCommand.EXTEND_GROUP_RESPONSE, extend_group_response=response)
    )


HANDLERS: "Mapping[int, Handler]" = {
    BaseCommand.BEGIN_ATTEMPT: begin,
    BaseCommand.COMMIT_GROUP: commit,
    BaseCommand.ABORT_GROUP: abort,
    BaseCommand.EXTEND_GROUP: extend,
}
