"""The metadata that a client gives to a producer or consumer: it is kept, and shown in statistics.

Apache Pulsar bounds that of consumers.
"""

import json
from collections.abc import Iterable, Mapping
from typing import ClassVar

from config.bounds import MAX_PROPERTIES_BYTES
from magnetar.protocol.pulsar_pb2 import KeyValue
from magnetar.protocol.server_error import PeerError, ServerError
from storage.managed_ledger.records import REPLICATED


class MetadataTooLarge(PeerError):
    """The client gives more metadata than is kept: give less."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class ReservedProperty(PeerError):
    """The client gives a property that is the broker's: use another name."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


def metadata_of(pairs: Iterable[KeyValue], most_bytes: int, what: str) -> Mapping[str, str]:
    """The metadata of a producer or consumer.  Raises `MetadataTooLarge`."""
    metadata = {item.key: item.value for item in pairs}
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > most_bytes:
        raise MetadataTooLarge(
            f"{what} has {size} bytes of metadata, and {most_bytes} are the most: give it fewer "
            "or shorter properties."
        )
    return metadata


def subscription_properties_of(pairs: Iterable[KeyValue]) -> Mapping[str, str]:
    """The properties of a new subscription, bounded as over REST.

    Raises `MetadataTooLarge` and `ReservedProperty`.
    """
    properties = {item.key: item.value for item in pairs}
    require_unreserved(properties)
    if properties and len(json.dumps(properties)) > MAX_PROPERTIES_BYTES:
        raise MetadataTooLarge(
            f"Properties of a subscription may have {MAX_PROPERTIES_BYTES} bytes as JSON: "
            "give fewer."
        )
    return properties


def require_unreserved(properties: Mapping[str, str]) -> None:
    """Raise `ReservedProperty` for the property that marks a subscription as replicated."""
    if REPLICATED in properties:
        raise ReservedProperty(
            f"The property {REPLICATED!r} is the broker's: use another name, or subscribe with "
            "replicateSubscriptionState."
        )
