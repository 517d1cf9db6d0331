"""The decoded frames of a peer: a `Send` for SEND, a `Frame` for every other command.

An `error` below is a `ChecksumMismatch`, or in a `Send` a `ReplicatorOnly`.  Its type is
`PeerError` here, because `frame_error` imports this module.
"""

from typing import NamedTuple

from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.server_error import PeerError


class Frame(NamedTuple):
    """One frame of a peer, for every command but SEND, which is a `Send`.

    `entry` is set for MESSAGE, unless `error` is set because the entry's checksum was wrong.
    """

    command: BaseCommand
    entry: bytes | None = None
    error: PeerError | None = None
    broker_metadata: bytes | None = None


class Send(NamedTuple):
    """One SEND of a peer: the fields of `CommandSend` by their names, and its entry.

    `entry` is the entry to store, unless `error` is set: then the entry's checksum was wrong, or
    the SEND has a message id, as for a shadow topic, and the answer is a SEND_ERROR with the
    error's code.  `plain` says that the entry is neither a chunk nor a marker and has no
    transaction, neither in the command nor in its metadata.
    """

    producer_id: int
    sequence_id: int
    highest_sequence_id: int
    num_messages: int
    entry: bytes | None
    plain: bool = True
    is_chunk: bool = False
    txnid: tuple[int, int] | None = None
    """The most and least bits of the transaction; (0, 0) is a transaction too."""
    error: PeerError | None = None
    marker: bool = False
    """Whether it is a marker, by the SEND: only a replicator may send one."""


Received = Frame | Send
