"""What can be set of a producer, checked when it is given."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from magnetar.compression import CompressionType
from magnetar.errors import InvalidArgument
from magnetar.settings import check_positive, member_of

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class AccessMode(enum.IntEnum):
    """Who may write to the topic while this producer does (numbers are the wire's)."""

    SHARED = 0
    """Anybody."""
    EXCLUSIVE = 1
    """Nobody else; `ProducerBusy` if somebody does, `ProducerFenced` if somebody takes it over."""
    WAIT_FOR_EXCLUSIVE = 2
    """Nobody else; opening waits, without limit, until the others have gone."""
    EXCLUSIVE_WITH_FENCING = 3
    """Nobody else; whoever does is put out."""


AccessModeName = Literal["shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing"]
CompressionName = Literal["none", "lz4", "zlib", "zstd", "snappy"]


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """Of `Client.producer`."""

    name: str | None = None
    """Stays the same over restarts of a program that wants its messages deduplicated."""
    access_mode: AccessMode | AccessModeName = AccessMode.SHARED
    """Who else may write to the topic."""
    batching: bool = True
    """Whether messages that are sent at about the same time share an entry."""
    batch_max_messages: int = 1000
    """Messages in a batch."""
    batch_max_bytes: int = 128 * 1024
    """Bytes in a batch, before it is compressed; never more than the broker takes of a message.  A
    larger message is sent alone."""
    batch_max_delay_ms: float = 1.0
    """How long a message may wait for others while earlier ones of its segment have no receipt yet;
    when all have theirs it leaves at once."""
    compression: CompressionType | CompressionName = CompressionType.NONE
    """Of batches and messages."""
    chunking: bool = False
    """Whether what is larger than the broker takes is sent in chunks, else it is refused."""
    max_pending_messages: int = 10_000
    """Messages without receipt; at that many `send` waits and `send_nowait` raises."""
    max_pending_bytes: int = 64 * 1024 * 1024
    """Bytes of them."""
    send_timeout_s: float = 30.0
    """After that time without receipt a message has failed (it may be stored all the same)."""
    properties: Mapping[str, str] = field(default_factory=lambda: _NONE)
    """What brokers show of the producer."""

    def __post_init__(self) -> None:
        for name in (
            "batch_max_messages",
            "batch_max_bytes",
            "max_pending_messages",
            "max_pending_bytes",
            "send_timeout_s",
        ):
            check_positive(name, getattr(self, name))
        if not 0 <= self.batch_max_delay_ms <= 60_000:
            raise InvalidArgument(
                f"batch_max_delay_ms is {self.batch_max_delay_ms}; give it milliseconds from 0 to "
                "60000."
            )
        if self.name == "":
            raise InvalidArgument("The producer's name is empty; give one, or leave it out.")
        member_of(AccessMode, self.access_mode)
        member_of(CompressionType, self.compression)
