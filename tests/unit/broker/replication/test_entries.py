"""What another cluster gets of an entry."""

import pytest

from broker.replication.entries import Route, Skipped, outgoing, skipped
from broker.topics.source_positions import SOURCE_POSITION
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry, parse_metadata, payload_of
from magnetar.protocol.pulsar_pb2 import MessageMetadata

POSITION = Position(7, 3)


def metadata(**fields: object) -> MessageMetadata:
    """Metadata of a message of a client."""
    made = MessageMetadata(producer_name="p", sequence_id=5, publish_time=1000)
    made.MergeFrom(MessageMetadata(**fields))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"marker_type": 21}, Skipped.MARKER),
        ({"replicated_from": "east"}, Skipped.REPLICATED),
        ({"replicated_from": "west"}, Skipped.REPLICATED),
        ({"replicate_to": ["west", "north"]}, None),
        ({"replicate_to": ["north"]}, Skipped.NOT_ADDRESSED),
        ({"replicate_to": ["__local__"]}, Skipped.NOT_ADDRESSED),
    ],
)
def test_each_entry_is_sent_or_skipped_for_its_reason(
    fields: dict[str, object], reason: Skipped | None
) -> None:
    assert skipped(metadata(**fields), "west") is reason


def test_an_entry_expires_by_its_publish_time() -> None:
    assert skipped(metadata(), "west", now_ms=3000, ttl_s=2) is None
    assert skipped(metadata(), "west", now_ms=3001, ttl_s=2) is Skipped.EXPIRED


def test_an_entry_tells_its_origin_and_keeps_all_else() -> None:
    before = metadata(
        partition_key="k", num_messages_in_batch=2, highest_sequence_id=6, event_time=9
    )
    sent = outgoing(build_entry(before, b"batch"), before, POSITION, "east", None)
    found = parse_metadata(sent)
    assert bytes(payload_of(sent)) == b"batch"
    assert found.replicated_from == "east"
    assert [(each.key, each.value) for each in found.properties] == [(SOURCE_POSITION, "7:3")]
    found.ClearField("replicated_from")
    found.ClearField("properties")
    assert found == before


def test_a_committed_message_is_sent_without_its_transaction() -> None:
    before = metadata(txnid_most_bits=1, txnid_least_bits=2)
    found = parse_metadata(outgoing(build_entry(before, b""), before, POSITION, "east", None))
    assert not found.HasField("txnid_most_bits")
    assert not found.HasField("txnid_least_bits")


def test_a_schema_version_is_that_of_the_other_cluster() -> None:
    before = metadata(schema_version=b"\0" * 7 + b"\4")
    entry = build_entry(before, b"")
    there = parse_metadata(outgoing(entry, before, POSITION, "east", b"\0" * 7 + b"\1"))
    assert there.schema_version == b"\0" * 7 + b"\1"
    without = parse_metadata(outgoing(entry, before, POSITION, "east", None))
    assert not without.HasField("schema_version")


def test_the_name_of_the_producer_is_apache_pulsars() -> None:
    assert Route("east", "west").producer == "pulsar.repl.east-->west"
