"""Errors of consumers' requests, one class for each reason.

The code decides what a client does next: ConsumerBusy, ConsumerAssignError and NotAllowedError are
final for a v5 client, ServiceNotReady is tried again.
"""

from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class ConsumerBusy(PeerError):
    """Another consumer holds the subscription, or consumers of another type do."""

    code: ClassVar[ServerError] = ServerError.CONSUMER_BUSY


class ConsumerAssignError(PeerError):
    """Key_Shared hash ranges are invalid, or taken by another consumer."""

    code: ClassVar[ServerError] = ServerError.CONSUMER_ASSIGN_ERROR


class ConsumerNotFound(PeerError):
    """The request names a consumer that this connection does not have."""

    code: ClassVar[ServerError] = ServerError.CONSUMER_NOT_FOUND


class ConsumerNotAllowed(PeerError):
    """This type of subscription, or this broker, does not serve the request."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class SubscriptionRefused(PeerError):
    """A subscription of that name is of the other durability, or policies do not allow it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class SubscriptionUnavailable(PeerError):
    """The subscription is being closed, deleted or reset: the client tries again."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY
