"""The errors for malformed bytes of a peer.

All of them end the connection, except `ChecksumMismatch` and `ReplicatorOnly`: there the frame and
its command are sound, so the decoder returns the command with the error and goes on.
"""

from typing import ClassVar

from magnetar.protocol.received import Received
from magnetar.protocol.server_error import PeerError, ServerError


class FrameError(PeerError):
    """Bytes that violate the protocol.

    `frames_before` are the frames that the same `feed` call decoded before the bad bytes; they are
    to be served first.
    """

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    frames_before: tuple[Received, ...] = ()


class FrameTooLarge(FrameError):
    """The frame announces more bytes than the limit."""


class MalformedFrame(FrameError):
    """The lengths in a frame contradict each other, or bytes are left over."""


class MalformedCommand(FrameError):
    """The bytes are not a `BaseCommand`, or it lacks a field, or its text is not UTF-8."""


class UnexpectedPayload(FrameError):
    """Bytes follow a command that has no payload."""


class MissingPayload(FrameError):
    """A SEND or MESSAGE has no entry."""


class MalformedEntry(FrameError):
    """The lengths in the entry of a SEND or MESSAGE contradict each other."""


class MalformedMetadata(FrameError):
    """The metadata of an entry, or of a message in a batch, cannot be read."""


class MalformedBatch(FrameError):
    """A batch has fewer or more messages than its metadata says."""


class ChecksumMismatch(FrameError):
    """The CRC32C of an entry does not match its bytes.  Answered by SEND_ERROR, not by a close."""

    code: ClassVar[ServerError] = ServerError.CHECKSUM_ERROR


class ReplicatorOnly(FrameError):
    """A SEND that only a replicator sends.  Answered by SEND_ERROR, not by a close."""
