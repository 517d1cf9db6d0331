"""Message ids and checkpoints of the official Java client, read as it does, written as it did."""

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import pytest

from magnetar.checkpoint import Checkpoint, CheckpointKind
from magnetar.message_id import EntryId, MessageId
from tests.unit.magnetar.golden import golden

Told = Mapping[str, Any]


def told(entry: EntryId) -> Told:
    """An id as the Java client tells it, without the names of its classes."""
    meaning: dict[str, object] = {
        "ledger_id": entry.ledger_id,
        "entry_id": entry.entry_id,
        "partition": entry.partition,
        "batch_index": entry.batch_index,
        "batch_size": entry.batch_size,
    }
    if entry.first_chunk is not None:
        meaning["first_chunk"] = told(EntryId(*entry.first_chunk))
    return meaning


def without_classes(meaning: object) -> object:
    if not isinstance(meaning, Mapping):
        return meaning
    return {key: without_classes(value) for key, value in meaning.items() if key != "class"}


@pytest.mark.parametrize("item", golden("message_ids"), ids=lambda item: item["what"])
def test_message_ids(item: Told) -> None:
    meaning = item["meaning"]
    message_id = MessageId.from_bytes(b64decode(item["bytes"]))
    assert message_id.segment_id == meaning["segment_id"]
    assert message_id.topic == meaning["parent_topic"]
    assert told(message_id.entry) == without_classes(meaning["position"])
    positions = {str(segment): told(entry) for segment, entry in message_id.positions.items()}
    assert positions == without_classes(meaning["position_vector"])
    topics = {
        topic: {str(segment): told(entry) for segment, entry in positions.items()}
        for topic, positions in message_id.positions_of_topics.items()
    }
    assert topics == without_classes(meaning.get("topic_vectors", {}))
    if len(topics) < 2:  # of several Java's order is that of a hash table
        assert message_id.to_bytes() == b64decode(item["bytes"])


@pytest.mark.parametrize("item", golden("checkpoints"), ids=lambda item: item["what"])
def test_checkpoints(item: Told) -> None:
    meaning = item["meaning"]
    checkpoint = Checkpoint.from_bytes(b64decode(item["bytes"]))
    assert (checkpoint.kind is CheckpointKind.EARLIEST) is meaning["earliest"]
    assert (checkpoint.kind is CheckpointKind.LATEST) is meaning["latest"]
    positions = {str(segment): told(entry) for segment, entry in checkpoint.positions.items()}
    assert positions == without_classes(meaning.get("positions", {}))
    assert checkpoint.to_bytes() == b64decode(item["bytes"])
