"""Errors of transactional requests, with the codes that clients map (PIP-473).  Pure."""

from http import HTTPStatus
from typing import ClassVar, Final

from magnetar.protocol.server_error import InternalError, OperatorError, PeerError, ServerError
from magnetar.protocol.txn_id import TxnId

EXPIRED: Final = "ExpiredTransaction"
"""The word in the error for a transaction that an older epoch of its key began.

Clients tell the error from other `InvalidTxnStatus` by it.
"""


class TransactionNotFound(PeerError):
    """There is no such transaction, or another principal began it: begin another one."""

    code: ClassVar[ServerError] = ServerError.TRANSACTION_NOT_FOUND
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class InvalidTxnStatus(PeerError):
    """The transaction has ended, and not in the way that was requested."""

    code: ClassVar[ServerError] = ServerError.INVALID_TXN_STATUS
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class TransactionEnded(PeerError):
    """A SEND came after the end of its transaction.

    Its code is NotAllowedError, as clients repeat a SEND endlessly after any other.
    """

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class TransactionConflict(PeerError):
    """The message is acknowledged already, or held by a transaction: abort the transaction."""

    code: ClassVar[ServerError] = ServerError.TRANSACTION_CONFLICT


class HeldByTransactions(TransactionConflict):
    """Transactions hold the message; these `holders` may have ended meanwhile (A8)."""

    def __init__(self, message: str, holders: frozenset[TxnId] = frozenset()) -> None:
        super().__init__(message)
        self.holders = holders


class CoordinatorNotFound(PeerError):
    """This broker does not lead that coordinator: follow the assignments."""

    code: ClassVar[ServerError] = ServerError.TRANSACTION_COORDINATOR_NOT_FOUND
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class TransactionKeyFenced(PeerError):
    """The key has another epoch than the request: a newer holder opened it, or it is gone."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class InvalidTransactionKey(PeerError):
    """The key is invalid, is another coordinator's, or is not the key of the transaction."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class InvalidGroup(PeerError):
    """The group is invalid, or its commit names other attempts than its own, or is too large."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class TransactionKeyNotFound(PeerError):
    """The key was never opened, or was deleted."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class TooManyTransactionKeys(OperatorError):
    """The coordinator has as many keys, or connections that hold keys, as it may have."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class TooManyTransactions(OperatorError):
    """The coordinator has as many open transactions as it may have."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class TooManyPendingAcks(OperatorError):
    """Open transactions hold as many messages of a subscription as they may."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class CorruptTransactionRecord(OperatorError):
    """A record of a transaction is unreadable: repair or restore the metadata store."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class SegmentOwnershipLost(InternalError):
    """Another owner took the segment: this one stops, and the client finds the new one."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class TransactionAssertion(InternalError):
    """A rule of the protocol does not hold: report it as a defect."""

    code: ClassVar[ServerError] = ServerError.UNKNOWN_ERROR
