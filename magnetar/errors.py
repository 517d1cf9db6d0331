"""The errors of the client.  Pure.

Every error is a `MagnetarError`: a `BrokerError` if a broker refused a request, with one class for
each `ServerError`, else a `ClientError`.  `retriable` says whether the same request may succeed
later; the client retries such errors itself until its time is up.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from magnetar.protocol.server_error import MagnetarError, ServerError

__all__ = [
    "AlreadyClosed",
    "AuthenticationFailed",
    "AuthorizationFailed",
    "BacklogExceeded",
    "BrokerError",
    "BrokerFailed",
    "ChecksumFailed",
    "ClientError",
    "ConnectionLost",
    "ConsumerAssignFailed",
    "ConsumerBusy",
    "ConsumerNotFound",
    "CoordinatorNotFound",
    "ExpiredTransaction",
    "IncompatibleSchema",
    "InvalidArgument",
    "InvalidMessage",
    "InvalidTopicName",
    "InvalidTransactionStatus",
    "MagnetarError",
    "MessageTooLarge",
    "MetadataFailed",
    "NotAllowed",
    "NotSupported",
    "OperationTimedOut",
    "PersistenceFailed",
    "ProducerBlocked",
    "ProducerBusy",
    "ProducerFenced",
    "ProducerQueueFull",
    "ServiceNotReady",
    "SubscriptionNotFound",
    "TokenNotRenewed",
    "TooManyRequests",
    "TopicNotFound",
    "TopicTerminated",
    "TransactionConflict",
    "TransactionFailed",
    "TransactionKeyFenced",
    "TransactionNotFound",
    "TransactionTimedOut",
    "UnsupportedVersion",
    "WrongLoop",
    "error_of",
]


MAX_REASON: Final = 4000
"""Characters of the reason that a broker gives: it goes into logs, statistics and records."""


class BrokerError(MagnetarError):
    """The broker refused a request.  `code` is its reason."""

    retriable: ClassVar[bool] = False


class BrokerFailed(BrokerError):
    """The broker failed on the request, or gave a reason that this client does not know."""

    retriable = True


class MetadataFailed(BrokerError):
    """The broker's metadata store failed."""

    code = ServerError.METADATA_ERROR
    retriable = True


class PersistenceFailed(BrokerError):
    """The broker could not store something."""

    code = ServerError.PERSISTENCE_ERROR
    retriable = True


class AuthenticationFailed(BrokerError):
    """The broker does not accept this client's credentials."""

    code = ServerError.AUTHENTICATION_ERROR


class TokenNotRenewed(AuthenticationFailed):
    """A token failed after earlier ones were accepted; a later one may be better."""

    retriable = True


class AuthorizationFailed(BrokerError):
    """This client lacks the permission."""

    code = ServerError.AUTHORIZATION_ERROR


class ConsumerBusy(BrokerError):
    """Another consumer holds the subscription or segment, which is not shared."""

    code = ServerError.CONSUMER_BUSY


class ServiceNotReady(BrokerError):
    """The broker does not serve this now, or not any more."""

    code = ServerError.SERVICE_NOT_READY
    retriable = True


class ProducerBlocked(BrokerError):
    """The topic's backlog is over its quota, and producers wait until it is below."""

    code = ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR
    retriable = True


class BacklogExceeded(BrokerError):
    """The topic's backlog is over its quota, and producers fail."""

    code = ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION


class ChecksumFailed(BrokerError):
    """A message was damaged on its way."""

    code = ServerError.CHECKSUM_ERROR


class UnsupportedVersion(BrokerError):
    """The broker's version of the protocol does not have this request."""

    code = ServerError.UNSUPPORTED_VERSION_ERROR


class TopicNotFound(BrokerError):
    """There is no such topic."""

    code = ServerError.TOPIC_NOT_FOUND


class SubscriptionNotFound(BrokerError):
    """There is no such subscription."""

    code = ServerError.SUBSCRIPTION_NOT_FOUND


class ConsumerNotFound(BrokerError):
    """The broker does not know this consumer any more."""

    code = ServerError.CONSUMER_NOT_FOUND
    retriable = True


class TooManyRequests(BrokerError):
    """The broker is at its limit of requests."""

    code = ServerError.TOO_MANY_REQUESTS
    retriable = True


class TopicTerminated(BrokerError):
    """The topic takes no more messages."""

    code = ServerError.TOPIC_TERMINATED_ERROR


class ProducerBusy(BrokerError):
    """Another producer has this name, or exclusive access to the topic."""

    code = ServerError.PRODUCER_BUSY


class InvalidTopicName(BrokerError):
    """The broker does not accept this name of a topic."""

    code = ServerError.INVALID_TOPIC_NAME


class IncompatibleSchema(BrokerError):
    """The schema is incompatible with that of the topic."""

    code = ServerError.INCOMPATIBLE_SCHEMA


class ConsumerAssignFailed(BrokerError):
    """The broker could not give this consumer its share of the keys."""

    code = ServerError.CONSUMER_ASSIGN_ERROR


class CoordinatorNotFound(BrokerError):
    """The broker does not lead this transaction coordinator now."""

    code = ServerError.TRANSACTION_COORDINATOR_NOT_FOUND
    retriable = True


class InvalidTransactionStatus(BrokerError):
    """The transaction has ended, or has ended the other way."""

    code = ServerError.INVALID_TXN_STATUS


class ExpiredTransaction(InvalidTransactionStatus):
    """The transaction was aborted because another process opened its transaction key."""


class NotAllowed(BrokerError):
    """The broker does not allow this to any client."""

    code = ServerError.NOT_ALLOWED_ERROR


class TransactionConflict(BrokerError):
    """Another transaction, or this one, has acknowledged the message already."""

    code = ServerError.TRANSACTION_CONFLICT


class TransactionNotFound(BrokerError):
    """There is no such transaction, or it belongs to another client."""

    code = ServerError.TRANSACTION_NOT_FOUND


class ProducerFenced(BrokerError):
    """Another producer has taken exclusive access to the topic."""

    code = ServerError.PRODUCER_FENCED


class ClientError(MagnetarError):
    """An error that the client found itself; the broker did not report it."""

    retriable: ClassVar[bool] = False


class InvalidArgument(ClientError, ValueError):
    """An argument is invalid; nothing was sent."""


class WrongLoop(ClientError, RuntimeError):
    """An object of one event loop was used on another loop, or in a thread without one."""


class ConnectionLost(ClientError, ConnectionError):
    """The connection to the broker broke, or could not be made."""

    retriable = True


class OperationTimedOut(ClientError, TimeoutError):
    """No answer came in time.  The request may still take effect."""

    retriable = True


class AlreadyClosed(ClientError):
    """The client, or this part of it, is closed."""


class NotSupported(ClientError):
    """The broker does not have this feature."""


class MessageTooLarge(ClientError):
    """The message is larger than the broker allows."""


class InvalidMessage(ClientError):
    """A message cannot be unpacked or decoded."""


class ProducerQueueFull(ClientError):
    """Too many messages wait for their receipts: await `room()`."""


class TransactionTimedOut(ClientError):
    """The transaction's time is up: the broker aborts it."""


class TransactionFailed(ClientError):
    """A message or an acknowledgement in the transaction failed, so it was aborted."""


class TransactionKeyFenced(ClientError):
    """Another process has opened the transaction key since; this holder is fenced for good."""


_CLASSES: Final[tuple[type[BrokerError], ...]] = (
    MetadataFailed,
    PersistenceFailed,
    AuthenticationFailed,
    AuthorizationFailed,
    ConsumerBusy,
    ServiceNotReady,
    ProducerBlocked,
    BacklogExceeded,
    ChecksumFailed,
    UnsupportedVersion,
    TopicNotFound,
    SubscriptionNotFound,
    ConsumerNotFound,
    TooManyRequests,
    TopicTerminated,
    ProducerBusy,
    InvalidTopicName,
    IncompatibleSchema,
    ConsumerAssignFailed,
    CoordinatorNotFound,
    InvalidTransactionStatus,
    NotAllowed,
    TransactionConflict,
    TransactionNotFound,
    ProducerFenced,
)
_BY_CODE: Final[Mapping[int, type[BrokerError]]] = MappingProxyType(
    {int(each.code): each for each in _CLASSES}
)


def error_of(code: int, message: str) -> BrokerError:
    """The error for the code of an answer; `BrokerFailed` for a code of a later broker.

    Of the message MAX_REASON characters are kept.
    """
    return _BY_CODE.get(code, BrokerFailed)(message[:MAX_REASON])
