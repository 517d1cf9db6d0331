"""Transaction commands while transactions are off: each is refused in the form its client reads.

Rules: requests get ERROR NotAllowedError; the watch of coordinators, which has no request id, gets
its own update with that error; closing that watch means nothing.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from protocol.pulsar_pb2 import BaseCommand, CommandWatchTcAssignmentsUpdate
from protocol.pulsar_pb2 import ServerError as WireError
from protocol.server_error import PeerError, ServerError

if TYPE_CHECKING:
    from broker.connection import Connection
    from broker.handlers import Handler

_SENTENCE = "Transactions are not enabled on this broker: use a client without them."


class TransactionsOff(PeerError):
    """The broker has no transaction coordinator: use a client without transactions."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


def refuse(connection: "Connection", command: BaseCommand, entry: bytes | None) -> None:
    """Any request of a transaction."""
    raise TransactionsOff(_SENTENCE)


def refuse_watch(connection: "Connection", command: BaseCommand, entry: bytes | None) -> None:
    """WATCH_TC_ASSIGNMENTS."""
    connection.send(
        BaseCommand(
            type=BaseCommand.WATCH_TC_ASSIGNMENTS_UPDATE,
            watch_tc_assignments_update=CommandWatchTcAssignmentsUpdate(
                watch_id=command.watch_tc_assignments.watch_id,
                error=cast("WireError", int(TransactionsOff.code)),
                message=_SENTENCE,
            ),
        )
    )


def ignore(connection: "Connection", command: BaseCommand, entry: bytes | None) -> None:
    """WATCH_TC_ASSIGNMENTS_CLOSE."""


HANDLERS: "Mapping[int, Handler]" = {
    BaseCommand.NEW_TXN: refuse,
    BaseCommand.ADD_PARTITION_TO_TXN: refuse,
    BaseCommand.ADD_SUBSCRIPTION_TO_TXN: refuse,
    BaseCommand.END_TXN: refuse,
    BaseCommand.END_TXN_ON_PARTITION: refuse,
    BaseCommand.END_TXN_ON_SUBSCRIPTION: refuse,
    BaseCommand.TC_CLIENT_CONNECT_REQUEST: refuse,
    BaseCommand.WATCH_TC_ASSIGNMENTS: refuse_watch,
    BaseCommand.WATCH_TC_ASSIGNMENTS_CLOSE: ignore,
}
