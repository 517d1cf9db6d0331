"""What can go wrong for a user of the client.  Pure.

Rules: every error is a `MagnetarError`.  What a broker refused is a `BrokerError`: one class for
each `ServerError`, found by `error_of`.  What happened on this side is a `ClientError`.  Each says
whether the same request may succeed later (`retriable`): the client tries those again by itself
until its time is up.  Messages are sentences that end with the next step.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from magnetar.protocol.server_error import MagnetarError, ServerError

__all__ = [
    "AlreadyClosed",
    "AuthenticationFailed",
    "AuthorizationFailed",
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
    """The broker does not believe who this client says it is."""

    code = ServerError.AUTHENTICATION_ERROR


class TokenNotRenewed(AuthenticationFailed):
    """Its tokens were good until now; the function that gives them may have a better one later."""

    retriable = True


class AuthorizationFailed(BrokerError):
    """This client may not do that."""

    code = ServerError.AUTHORIZATION_ERROR


class ConsumerBusy(BrokerError):
    """Another consumer has what was asked for, and it is not shared."""

    code = ServerError.CONSUMER_BUSY


class ServiceNotReady(BrokerError):
    """The broker does not serve this now, or not any more."""

    code = ServerError.SERVICE_NOT_READY
    retriable = True


class ProducerBlocked(BrokerError):
    """The topic's backlog is over its quota."""

    code = ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR
    retriable = True


class ChecksumFailed(BrokerError):
    """A message was damaged on its way."""

    code = ServerError.CHECKSUM_ERROR


class UnsupportedVersion(BrokerError):
    """The broker speaks no version of the protocol that has this."""

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
    """The broker has as much to do as it may."""

    code = ServerError.TOO_MANY_REQUESTS
    retriable = True


class TopicTerminated(BrokerError):
    """The topic takes no more messages."""

    code = ServerError.TOPIC_TERMINATED_ERROR


class ProducerBusy(BrokerError):
    """Another producer has this name, or the topic for itself."""

    code = ServerError.PRODUCER_BUSY


class InvalidTopicName(BrokerError):
    """The broker takes no topic of that name."""

    code = ServerError.INVALID_TOPIC_NAME


class IncompatibleSchema(BrokerError):
    """The topic has a schema that this one does not go with."""

    code = ServerError.INCOMPATIBLE_SCHEMA


class ConsumerAssignFailed(BrokerError):
    """The broker could not give this consumer its share of the keys."""

    code = ServerError.CONSUMER_ASSIGN_ERROR


class CoordinatorNotFound(BrokerError):
    """The broker that was asked does not lead this transaction coordinator now."""

    code = ServerError.TRANSACTION_COORDINATOR_NOT_FOUND
    retriable = True


class InvalidTransactionStatus(BrokerError):
    """The transaction has ended, or ended otherwise."""

    code = ServerError.INVALID_TXN_STATUS


class ExpiredTransaction(InvalidTransactionStatus):
    """The transaction was aborted because its key was opened anew, by somebody else."""


class NotAllowed(BrokerError):
    """The broker does not allow this, whoever asks."""

    code = ServerError.NOT_ALLOWED_ERROR


class TransactionConflict(BrokerError):
    """Another transaction, or this one, acknowledged the message before."""

    code = ServerError.TRANSACTION_CONFLICT


class TransactionNotFound(BrokerError):
    """There is no such transaction, or it is somebody else's."""

    code = ServerError.TRANSACTION_NOT_FOUND


class ProducerFenced(BrokerError):
    """Another producer took the topic for itself."""

    code = ServerError.PRODUCER_FENCED


class ClientError(MagnetarError):
    """Something happened on this side."""

    retriable: ClassVar[bool] = False


class InvalidArgument(ClientError, ValueError):
    """What was given cannot be; nothing was sent."""


class WrongLoop(ClientError, RuntimeError):
    """What belongs to one event loop was used on another, or in a thread without one."""


class ConnectionLost(ClientError, ConnectionError):
    """The connection to the broker broke, or could not be made."""

    retriable = True


class OperationTimedOut(ClientError, TimeoutError):
    """No answer came in time.  What was asked for may still happen."""

    retriable = True


class AlreadyClosed(ClientError):
    """The client, or this part of it, is closed."""


class NotSupported(ClientError):
    """The broker does not offer this."""


class MessageTooLarge(ClientError):
    """The message is larger than the broker takes."""


class InvalidMessage(ClientError):
    """A message cannot be unpacked or decoded."""


class ProducerQueueFull(ClientError):
    """As many messages wait for their receipt as may: await `room()`."""


class TransactionTimedOut(ClientError):
    """The transaction's time is up: the broker aborts it."""


class TransactionFailed(ClientError):
    """Something sent or acknowledged in the transaction failed, so it was aborted."""


class TransactionKeyFenced(ClientError):
    """Somebody else has opened the transaction key since: this holder is shut out for good."""


_CLASSES: Final[tuple[type[BrokerError], ...]] = (
    MetadataFailed,
    PersistenceFailed,
    AuthenticationFailed,
    AuthorizationFailed,
    ConsumerBusy,
    ServiceNotReady,
    ProducerBlocked,
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
    | {int(ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION): ProducerBlocked}
)


def error_of(code: int, message: str) -> BrokerError:
    """The error that stands for an answer's code; codes of later brokers are `BrokerFailed`."""
    return _BY_CODE.get(code, BrokerFailed)(message)
