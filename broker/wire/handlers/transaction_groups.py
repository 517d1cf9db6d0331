"""Groups of attempts, Magnetar's own (commands 1004 to 1011): begin, commit, abort, extend.

Every request is made under a transaction key and its epoch, as the connection's principal.  A group
belongs to no connection: any with the epoch may send requests.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping

from broker.wire.connection import Connection, Handler
from broker.wire.handlers.transactions import complete_response, require_enabled
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandAbortGroup,
    CommandAbortGroupResponse,
    CommandBeginAttempt,
    CommandBeginAttemptResponse,
    CommandCommitGroup,
    CommandCommitGroupResponse,
    CommandExtendGroup,
    CommandExtendGroupResponse,
)
from magnetar.protocol.pulsar_pb2 import (
    SegmentCount as WireCount,
)
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from txn.errors import InvalidGroup
from txn.group import Batch, Counts, SegmentCount, bounded_commit
from txn.transaction_groups import TransactionGroups
from txn.transaction_key import KeyName

_Request = CommandBeginAttempt | CommandCommitGroup | CommandAbortGroup | CommandExtendGroup
_Response = (
    CommandBeginAttemptResponse
    | CommandCommitGroupResponse
    | CommandAbortGroupResponse
    | CommandExtendGroupResponse
)


async def _answer(
    connection: Connection,
    request: _Request,
    answer: BaseCommand,
    response: _Response,
    work: Callable[[TransactionGroups, KeyName], Awaitable[None]],
) -> None:
    """Send `answer` after `work` filled its `response`, or with the error that `work` raised."""
    coordinators = require_enabled(connection).coordinators
    # As in `transactions`, every answer names the coordinator.
    response.request_id, response.txnid_most_bits = request.request_id, request.tc_id

    async def done() -> None:
        coordinator = CoordinatorId(request.tc_id)
        await work(*coordinators.groups_of(coordinator, connection.owner, request.key))

    await complete_response(response, done())
    connection.send(answer)


def _counts(subject: str, received: Collection[WireCount]) -> Counts:
    counts = {each.segment: SegmentCount(each.messages, each.hash_sum) for each in received}
    if len(counts) != len(received):
        raise InvalidGroup(f"{subject} counts a segment twice: add up what was written there.")
    return counts


async def begin(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """BEGIN_ATTEMPT; its timeout is in milliseconds."""
    request = command.begin_attempt
    answer = BaseCommand(type=BaseCommand.BEGIN_ATTEMPT_RESPONSE)
    response = answer.begin_attempt_response

    async def work(groups: TransactionGroups, name: KeyName) -> None:
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

    await _answer(connection, request, answer, response, work)


async def commit(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """COMMIT_GROUP: commit the winners among a group's attempts."""
    request = command.commit_group
    answer = BaseCommand(type=BaseCommand.COMMIT_GROUP_RESPONSE)
    response = answer.commit_group_response

    async def work(groups: TransactionGroups, name: KeyName) -> None:
        has_group, most = request.HasField("group_least_bits"), request.tc_id
        winners = [
            (
                TxnId(most, each.attempt_least_bits),
                _counts(f"Attempt {each.attempt_least_bits}", each.counts),
            )
            for each in request.winners
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
                _counts("The total", request.totals) if request.totals else None,
            ),
            [attempt for attempt, _ in winners],
        )
        response.done = committed.done
        if committed.group is not None:
            response.group_least_bits = committed.group.least

    await _answer(connection, request, answer, response, work)


async def abort(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """ABORT_GROUP: abort what is open of the key under that epoch."""
    request = command.abort_group
    answer = BaseCommand(type=BaseCommand.ABORT_GROUP_RESPONSE)
    response = answer.abort_group_response

    async def work(groups: TransactionGroups, name: KeyName) -> None:
        response.aborted = await groups.abort(name, request.epoch)

    await _answer(connection, request, answer, response, work)


async def extend(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """EXTEND_GROUP: give the attempts of a group more time; it is in milliseconds."""
    request = command.extend_group
    answer = BaseCommand(type=BaseCommand.EXTEND_GROUP_RESPONSE)
    response = answer.extend_group_response

    async def work(groups: TransactionGroups, name: KeyName) -> None:
        group = TxnId(request.tc_id, request.group_least_bits)
        response.deadline_ms = await groups.extend(name, request.epoch, group, request.timeout_ms)

    await _answer(connection, request, answer, response, work)


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.BEGIN_ATTEMPT: begin,
    BaseCommand.COMMIT_GROUP: commit,
    BaseCommand.ABORT_GROUP: abort,
    BaseCommand.EXTEND_GROUP: extend,
}
