"""Errors of transactional requests, with the codes that clients map (PIP-473).  Pure.

Rules: `InvalidTxnStatus` and `TransactionNotFound` end a transaction for its client;
`TransactionConflict` refuses one acknowledgement, after which the transaction can only abort;
`TransactionEnded` is what a SEND gets, because for a SEND a client gives up on NotAllowedError only
and sends again and again after anything else.  A request under an old epoch of a transaction key is
`TransactionKeyFenced`; a transaction of an old epoch is `InvalidTxnStatus` whose sentence has the
word EXPIRED, by which clients tell it from others.
"""

from http import HTTPStatus
from typing import ClassVar, Final

from magnetar.protocol.server_error import InternalError, OperatorError, PeerError, ServerError
from magnetar.protocol.txn_id import TxnId

EXPIRED: Final = "ExpiredTransaction"
"""In the sentence about a transaction that an older epoch of its key began."""


class TransactionNotFound(PeerError):
    """There is no such transaction, or it belongs to somebody else: begin another one."""

    code: ClassVar[ServerError] = ServerError.TRANSACTION_NOT_FOUND
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class InvalidTxnStatus(PeerError):
    """The transaction ended, and otherwise than asked for."""

    code: ClassVar[ServerError] = ServerError.INVALID_TXN_STATUS
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class TransactionEnded(PeerError):
    """A write came after the end of its transaction."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class TransactionConflict(PeerError):
    """The message is acknowledged already, or held by another transaction."""

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
    """There can be no such key, it hashes elsewhere, or the transaction is not of that key."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class InvalidGroup(PeerError):
    """There can be no such group, or what it is to commit is not of it or too much."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class TransactionKeyNotFound(PeerError):
    """Nobody opened that key, or it was deleted since."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class TooManyTransactionKeys(OperatorError):
    """The coordinator has as many keys, or one of them as many connections, as it may have."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class TooManyTransactions(OperatorError):
    """The coordinator has as many open transactions as it may have."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class TooManyPendingAcks(OperatorError):
    """Open transactions hold as many messages of a subscription as they may."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class CorruptTransactionRecord(OperatorError):
    """A record of a transaction cannot be read: repair or restore the metadata store."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class SegmentOwnershipLost(InternalError):
    """Another owner took the segment: this one stops, and the client finds the new one."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class TransactionAssertion(InternalError):
    """A rule of the protocol does not hold: report it as a defect."""

    code: ClassVar[ServerError] = ServerError.UNKNOWN_ERROR
