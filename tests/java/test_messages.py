"""What the official client may put into a message, and ordinary topics through the v5 client."""

import pytest

from tests.java.conftest import RunCase
from tests.java.expectations import assert_every_message_once, assert_key_order


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("compression", ["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"])
def test_every_compression_arrives(run_case: RunCase, compression: str, batching: bool) -> None:
    facts = run_case("compression", type=compression, batching=batching)
    assert facts["received"] == facts["intact"] == facts["sent"] == 40


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
def test_messages_up_to_five_megabytes_arrive_and_larger_ones_are_refused(
    run_case: RunCase, batching: bool
) -> None:
    facts = run_case("sizes", batching=batching)
    assert facts["intact"] == facts["sizes"]
    assert max(facts["intact"]) > 5 * 1024 * 1024 - 2048
    # The client learns the limit when it connects, and names it.
    assert "5242880 bytes" in facts["refusal"]
    assert facts["works_after_refusal"]


def test_chunked_message_arrives(run_case: RunCase) -> None:
    assert run_case("chunking")["intact"]


def test_attributes_of_a_message_arrive(run_case: RunCase) -> None:
    facts = run_case("attributes")
    assert facts["properties"] == [f"v{i}" for i in range(8)]
    assert facts["event_times_kept"] == 8
    assert facts["publish_times_set"] == 8
    assert facts["with_key"] == 0
    # Without keys the eight messages went round the four segments.
    assert facts["producer_names"] == [f"named-seg-{i}" for i in range(4)]


def test_v5_client_uses_a_persistent_topic(run_case: RunCase) -> None:
    facts = run_case("persistent_topic")
    assert_every_message_once(facts, at_least=200)
    assert_key_order(facts)
    assert facts["left_after_acks"] == 0


def test_scalable_topic_is_resolved_from_a_persistent_name(
    run_case: RunCase, on_peer: bool
) -> None:
    facts = run_case("scalable_as_persistent")
    assert_every_message_once(facts, at_least=100)
    assert facts["resolved_topic"].startswith("topic://")
    if on_peer:
        # Its controller knows topic:// names only: docs/differences.md, short names
        assert "Failed to initialize controller" in facts["stream_subscribe_error"]
    else:
        assert facts.get("stream_subscribe_error", "") == ""
