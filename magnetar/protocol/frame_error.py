"""Every way for bytes of a peer to be wrong.

All of them end the connection, except `ChecksumMismatch`: there the frame's limits and its command
are sound, so the decoder hands the command over with the error and goes on.
"""

from typing import ClassVar

from magnetar.protocol.received import Received
from magnetar.protocol.server_error import PeerError, ServerError


class FrameError(PeerError):
    """Bytes that are not the protocol.

    `frames_before` holds the frames which the same `feed` call had decoded before it met the bad
    bytes: they came first, so they are to be served first.
    """

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    frames_before: tuple[Received, ...] = ()


class FrameTooLarge(FrameError):
    """The frame announces more bytes than the limit."""


class MalformedFrame(FrameError):
    """Lengths that contradict each other, or bytes left over."""


class MalformedCommand(FrameError):
    """Not a `BaseCommand`, or one that lacks what it must have, or whose text is not UTF-8."""


class UnexpectedPayload(FrameError):
    """Bytes after a command that carries no payload."""


class MissingPayload(FrameError):
    """SEND or MESSAGE without an entry."""


class MalformedEntry(FrameError):
    """The entry after SEND or MESSAGE contradicts itself."""


class MalformedMetadata(FrameError):
    """The metadata of an entry, or of a message in a batch, cannot be read."""


class MalformedBatch(FrameError):
    """A batch holds fewer or more messages than its metadata says."""


class ChecksumMismatch(FrameError):
    """The CRC32C of an entry is not that of its bytes.  Reported on SEND_ERROR, not by a close."""

    code: ClassVar[ServerError] = ServerError.CHECKSUM_ERROR


class ReplicatorOnly(FrameError):
    """A SEND that only a replicator writes.  Reported on SEND_ERROR, not by a close."""
