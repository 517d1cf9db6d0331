"""Transaction keys, Magnetar's own (commands 1000 to 1003): open a key, and attach to it.

A key belongs to the connection's principal.  A connection that uses a key is closed when a newer
epoch of it is opened.
"""

from collections.abc import Mapping

from broker.wire.connection import Connection, Handler
from broker.wire.handlers.transactions import complete_response, require_enabled
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandAttachTransactionKeyResponse,
    CommandOpenTransactionKeyResponse,
)
from magnetar.protocol.pulsar_pb2 import GroupRecord as WireGroupRecord
from magnetar.protocol.txn_id import CoordinatorId
from txn.group import GroupRecord
from txn.records import TxnState
from txn.transaction_key import require_name_of_request


def _group_record(committed: GroupRecord) -> WireGroupRecord:
    record = WireGroupRecord(
        query=committed.batch.query,
        batch=committed.batch.number,
        txnid_least_bits=committed.group.least,
        txnid_most_bits=committed.group.most,
    )
    if committed.positions is not None:
        record.positions = committed.positions
    return record


async def open_key(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """OPEN_TRANSACTION_KEY: open a new epoch, after transactions of older ones have ended."""
    request = command.open_transaction_key
    coordinators = require_enabled(connection).coordinators
    response = CommandOpenTransactionKeyResponse(
        request_id=request.request_id, txnid_most_bits=request.tc_id
    )

    async def work() -> None:
        keys, name = coordinators.keys_of(
            CoordinatorId(request.tc_id), connection.owner, request.key
        )
        opener = require_name_of_request(request.opener)
        opened = await keys.open(name, request.epoch, opener, connection)
        response.epoch = opened.epoch
        if opened.last is not None:
            response.last_txnid_most_bits = opened.last.most
            response.last_txnid_least_bits = opened.last.least
            if opened.ended is not None:
                response.last_committed = opened.ended is TxnState.COMMITTED
        if opened.committed is not None:
            response.last_group.CopyFrom(_group_record(opened.committed))

    await complete_response(response, work())
    connection.send(
        BaseCommand(
            type=BaseCommand.OPEN_TRANSACTION_KEY_RESPONSE, open_transaction_key_response=response
        )
    )


async def attach_key(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """ATTACH_TRANSACTION_KEY: use the key on this connection, under its present epoch."""
    request = command.attach_transaction_key
    coordinators = require_enabled(connection).coordinators
    response = CommandAttachTransactionKeyResponse(
        request_id=request.request_id, txnid_most_bits=request.tc_id
    )

    async def work() -> None:
        keys, name = coordinators.keys_of(
            CoordinatorId(request.tc_id), connection.owner, request.key
        )
        await keys.attach(name, request.epoch, connection)

    await complete_response(response, work())
    connection.send(
        BaseCommand(
            type=BaseCommand.ATTACH_TRANSACTION_KEY_RESPONSE,
            attach_transaction_key_response=response,
        )
    )


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.OPEN_TRANSACTION_KEY: open_key,
    BaseCommand.ATTACH_TRANSACTION_KEY: attach_key,
}
