"""What a frame of a peer becomes: a `Send` for SEND, a `Frame` for every other command.

A `FrameError` holds those that came before it, so this module knows nothing of `frame_error`: the
`error` below has the type that a peer is answered with.  It is always a `ChecksumMismatch`, or in
a `Send` a `ReplicatorOnly`.
"""

from typing import NamedTuple

from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.server_error import PeerError


class Frame(NamedTuple):
    """One frame of a peer, for every command but SEND, which is a `Send`.

    `entry` is set for MESSAGE unless `error` is: then the entry's checksum was wrong.
    """

    command: BaseCommand
    entry: bytes | None = None
    error: PeerError | None = None
    broker_metadata: bytes | None = None


class Send(NamedTuple):
    """One SEND of a peer: the fields of `CommandSend` by their names, and its entry.

    `entry` is what is to be stored, unless `error` is set: then the entry's checksum was wrong, or
    the SEND has what only replicators send, and the answer is a SEND_ERROR with the error's code.
    `plain`: nothing of the rarer kinds, so a whole entry, no chunk, no transaction, and none that
    the message can name.
    """

    producer_id: int
    sequence_id: int
    highest_sequence_id: int
    num_messages: int
    entry: bytes | None
    plain: bool = True
    is_chunk: bool = False
    txnid: tuple[int, int] | None = None
    """Most and least bits; (0, 0) is a transaction too."""
    error: PeerError | None = None


Received = Frame | Send
