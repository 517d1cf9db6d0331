"""Entries that the official Java client sent, unpacked to the messages that it was told to send."""

from base64 import b64decode
from itertools import groupby
from typing import Any

import pytest

from magnetar.consume.decoding import ChunkAssembly, Decoder
from magnetar.consume.message import RawMessage
from magnetar.protocol.pulsar_pb2 import CommandMessage
from tests.unit.magnetar.golden import golden

Item = dict[str, Any]
EVENT_TIME_MS = 1_700_000_000_123
SEGMENT = "segment"
SENT = [
    list(items)
    for _, items in groupby(
        (item for item in golden("entries") if "json" not in item["what"]),
        key=lambda item: item["what"],
    )
]


def value_of(kept: str | Item) -> bytes:
    """A value from the file."""
    if isinstance(kept, str):
        return b64decode(kept)
    return b64decode(kept["of"]) * int(kept["times"])


@pytest.mark.parametrize("items", SENT, ids=lambda items: items[0]["what"])
def test_golden_entries_decode_to_what_was_sent(items: list[Item]) -> None:
    decoder: Decoder[str] = Decoder(
        SEGMENT, ChunkAssembly(1, 0, max_size=1000, max_bytes=1000), None
    )
    received: list[RawMessage[str]] = []
    for number, item in enumerate(items):
        message = CommandMessage(consumer_id=1)
        message.message_id.ledger_id, message.message_id.entry_id = 7, number
        decoded = decoder.decode(message, b64decode(item["entry"]), now_ms=0)
        assert not decoded.why
        received += decoded.messages
    values = [value_of(kept) for kept in items[0]["values"]]
    assert [each.payload for each in received] == values
    metadata = [each.own_metadata for each in received]
    assert [each.partition_key for each in metadata] == ["key", "", "größer"][: len(values)]
    for each in metadata:
        assert {pair.key: pair.value for pair in each.properties} == {"a": "1", "ü": ""}
        assert each.event_time == EVENT_TIME_MS
    last = len(items) - 1
    batched = len(values) > 1
    assert [each.entry_id.batch_index for each in received] == (
        list(range(len(values))) if batched else [-1]
    )
    assert all(each.entry_id[:2] == (7, last) for each in received)
    assert all(each.entry_id.first_chunk == ((7, 0) if last else None) for each in received)
