"""`ProducerOptions`, the settings of a producer as keyword arguments.

A test compares them with the fields of `ProducerSettings`.
"""

from collections.abc import Mapping
from typing import TypedDict

from magnetar.compression import CompressionType
from magnetar.produce.producer_settings import AccessMode, AccessModeName, CompressionName

__all__ = ["ProducerOptions"]


class ProducerOptions(TypedDict, total=False):
    """The fields of `ProducerSettings` as keyword arguments."""

    name: str | None
    access_mode: AccessMode | AccessModeName
    batching: bool
    batch_max_messages: int
    batch_max_bytes: int
    batch_max_delay_ms: float
    compression: CompressionType | CompressionName
    chunking: bool
    max_pending_messages: int
    max_pending_bytes: int
    send_timeout_s: float
    properties: Mapping[str, str]
