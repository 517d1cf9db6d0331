"""A payload larger than the broker takes, in chunks.  Pure.

Pure.  Rules: chunks of one message share its sequence id, its uuid and its metadata; `chunk_id`
counts from 0; `total_chunk_msg_size` is that of the payload as it is sent, so compressed.  A chunk
and its metadata together are not larger than `max_message_size`.  Chunks are never in batches.
"""

from typing import Final

from magnetar.errors import MessageTooLarge

CHUNK_FIELDS_BYTES: Final = 128
"""What the fields of chunks and the numbers of the metadata may need beside the uuid."""


def chunk_uuid(producer_name: str, sequence_id: int) -> str:
    """What the chunks of one message have in common: no other of that producer has it."""
    return f"{producer_name}-{sequence_id}"


def fits(payload_size: int, metadata_size: int, max_message_size: int) -> bool:
    """Whether the broker takes the message as it is."""
    return payload_size + metadata_size <= max_message_size


def cut_chunks(payload: bytes, metadata_size: int, max_message_size: int) -> list[memoryview]:
    """The chunks of a payload, of equal size but the last; `metadata_size` is that of a chunk.

    Raises `MessageTooLarge` if the metadata leaves no room.
    """
    size = max_message_size - metadata_size
    if size <= 0:
        raise MessageTooLarge(
            f"The metadata of a message is {metadata_size} bytes and the broker takes messages of "
            f"{max_message_size}: give it a shorter key or fewer properties."
        )
    view = memoryview(payload)
    return [view[start : start + size] for start in range(0, len(payload), size)]
