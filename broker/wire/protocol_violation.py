"""The error for peers that violate the protocol."""

from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class ProtocolViolation(PeerError):
    """The peer sent what the protocol forbids here; the connection ends."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
