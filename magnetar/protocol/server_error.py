"""Pulsar's error codes and the exceptions that carry them.

Every exception that may reach a peer derives from `MagnetarError` through exactly one of three
classes, which say who can correct it: `PeerError` (the client), `OperatorError` (configuration,
limits, disk) and `InternalError` (a defect).  Each class has the one `ServerError` code with which
it is reported.  Messages are sentences that end with the next step.
"""

from enum import IntEnum
from typing import ClassVar


class ServerError(IntEnum):
    """The error codes on the wire, with Pulsar's numbers."""

    UNKNOWN_ERROR = 0
    METADATA_ERROR = 1
    PERSISTENCE_ERROR = 2
    AUTHENTICATION_ERROR = 3
    AUTHORIZATION_ERROR = 4
    CONSUMER_BUSY = 5
    SERVICE_NOT_READY = 6
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR = 7
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION = 8
    CHECKSUM_ERROR = 9
    UNSUPPORTED_VERSION_ERROR = 10
    TOPIC_NOT_FOUND = 11
    SUBSCRIPTION_NOT_FOUND = 12
    CONSUMER_NOT_FOUND = 13
    TOO_MANY_REQUESTS = 14
    TOPIC_TERMINATED_ERROR = 15
    PRODUCER_BUSY = 16
    INVALID_TOPIC_NAME = 17
    INCOMPATIBLE_SCHEMA = 18
    CONSUMER_ASSIGN_ERROR = 19
    TRANSACTION_COORDINATOR_NOT_FOUND = 20
    INVALID_TXN_STATUS = 21
    NOT_ALLOWED_ERROR = 22
    TRANSACTION_CONFLICT = 23
    TRANSACTION_NOT_FOUND = 24
    PRODUCER_FENCED = 25


class MagnetarError(Exception):
    """Root of every error that can be reported to a peer or an operator."""

    code: ClassVar[ServerError] = ServerError.UNKNOWN_ERROR


class PeerError(MagnetarError):
    """The peer requested what it may not have or does not exist, or violated the protocol."""


class OperatorError(MagnetarError):
    """An operator must act: on the configuration, a limit or the disk."""


class InternalError(MagnetarError):
    """A defect of this process: a broken invariant, or a lost race that the caller may retry."""
