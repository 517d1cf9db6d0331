"""Chunks of a payload that is larger than the broker's maximum message size.  Pure."""

from typing import Final

from magnetar.errors import MessageTooLarge

CHUNK_FIELDS_BYTES: Final = 128
"""Bytes that the fields of a chunk may add to the metadata, beside the uuid."""


def chunk_uuid(producer_name: str, sequence_id: int) -> str:
    """The uuid that the chunks of one message share, and no other message of the producer has."""
    return f"{producer_name}-{sequence_id}"


def fits(payload_size: int, metadata_size: int, max_message_size: int) -> bool:
    """Whether the message is within the broker's maximum, in one piece."""
    return payload_size + metadata_size <= max_message_size


def split_payload(payload: bytes, metadata_size: int, max_message_size: int) -> list[memoryview]:
    """Split a payload into chunks, which with their metadata have at most `max_message_size` bytes.

    Raises `MessageTooLarge` if the metadata alone has that size.
    """
    size = max_message_size - metadata_size
    if size <= 0:
        raise MessageTooLarge(
            f"The metadata of a message is {metadata_size} bytes and the broker allows messages of "
            f"{max_message_size}: give it a shorter key or fewer properties."
        )
    view = memoryview(payload)
    return [view[start : start + size] for start in range(0, len(payload), size)]
