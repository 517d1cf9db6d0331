"""The settings of a producer."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from magnetar.compression import CompressionType
from magnetar.errors import InvalidArgument
from magnetar.settings import check_flag, check_positive, member_of

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class AccessMode(enum.IntEnum):
    """Whether other producers may write to the topic too.  The numbers are those on the wire."""

    SHARED = 0
    """Other producers may write."""
    EXCLUSIVE = 1
    """No other producer may write.  Opening raises `ProducerBusy` if one does; a later producer
    that takes over the topic fences this one (`ProducerFenced`)."""
    WAIT_FOR_EXCLUSIVE = 2
    """No other producer may write.  Opening waits, without limit, until the others have gone."""
    EXCLUSIVE_WITH_FENCING = 3
    """No other producer may write.  Opening fences the others."""


AccessModeName = Literal["shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing"]
CompressionName = Literal["none", "lz4", "zlib", "zstd", "snappy"]


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """The settings of `Client.producer`.  Raises `InvalidArgument` for invalid values."""

    name: str | None = None
    """The producer's name, the same over restarts if messages are to be deduplicated."""
    access_mode: AccessMode | AccessModeName = AccessMode.SHARED
    """Whether other producers may write to the topic: 'shared', 'exclusive', 'wait_for_exclusive'
    or 'exclusive_with_fencing' (see `AccessMode`)."""
    batching: bool = True
    """Whether messages that are sent at about the same time share an entry."""
    batch_max_messages: int = 1000
    """The most messages in a batch."""
    batch_max_bytes: int = 128 * 1024
    """The most bytes in a batch, before compression; less if the broker's maximum message size is
    smaller.  A larger message is sent alone."""
    batch_max_delay_ms: float = 1.0
    """How long a message may wait for others while earlier ones of its segment have no receipt yet;
    without such messages it is sent at once."""
    compression: CompressionType | CompressionName = CompressionType.NONE
    """The compression of entries: 'none', 'lz4', 'zlib', 'zstd' or 'snappy'."""
    chunking: bool = False
    """Whether a message larger than the broker's maximum is sent in chunks; else it is refused."""
    max_pending_messages: int = 10_000
    """Messages without receipt; at this number `send` waits and `send_nowait` raises."""
    max_pending_bytes: int = 64 * 1024 * 1024
    """Bytes of the messages without receipt, with the same effect."""
    send_timeout_s: float = 30.0
    """Time without receipt after which a message fails; it may be stored all the same."""
    properties: Mapping[str, str] = field(default_factory=lambda: _NONE)
    """Properties that brokers show in the producer's statistics."""

    def __post_init__(self) -> None:
        for name in (
            "batch_max_messages",
            "batch_max_bytes",
            "max_pending_messages",
            "max_pending_bytes",
            "send_timeout_s",
        ):
            check_positive(name, getattr(self, name))
        check_flag("batching", self.batching)
        check_flag("chunking", self.chunking)
        if not 0 <= self.batch_max_delay_ms <= 60_000:
            raise InvalidArgument(
                f"batch_max_delay_ms is {self.batch_max_delay_ms}; give it milliseconds from 0 to "
                "60000."
            )
        if self.name == "":
            raise InvalidArgument("The producer's name is empty; give one, or leave it out.")
        member_of(AccessMode, self.access_mode)
        member_of(CompressionType, self.compression)
