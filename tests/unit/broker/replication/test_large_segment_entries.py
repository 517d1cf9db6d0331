"""Chunked messages and batches that are larger than what a sender of segments may hold."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

import broker.replication.segment_entries
from broker.replication.segment_replicator import SegmentReplicator
from config.bounds import REPLICATED_BYTES_AT_ONCE
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_batch, payload_of
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster
from tests.unit.broker.replication.test_scalable_topic_backlogs import (
    payloads_of,
    publish,
    replicator_of,
)
from tests.unit.broker.replication.test_scalable_topics import (
    Written,
    entries_of,
    has,
    is_done,
    make,
    pair,
    segments_of,
    split,
    writing,
)

__all__ = ["pair"]

Pair = tuple[Cluster, Cluster]
SIZE = 100_000


def chunks_of(cluster: Cluster, count: int) -> list[pb.MessageMetadata]:
    """The metadata of the chunks of one message."""
    return [
        pb.MessageMetadata(
            publish_time=cluster.broker.clock.now_ms(),
            uuid="u",
            chunk_id=number,
            num_chunks_from_msg=count,
            total_chunk_msg_size=count * SIZE,
        )
        for number in range(count)
    ]


async def publish_chunks(cluster: Cluster, payloads: Sequence[bytes]) -> None:
    """Write one message in chunks."""
    await publish(cluster, payloads, chunks_of(cluster, len(payloads)))


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were sent in each turn of the loop."""
    run, found = SegmentReplicator.run, list[int]()

    def measured(replicator: SegmentReplicator) -> None:
        before = replicator.counts.bytes
        run(replicator)
        found.append(replicator.counts.bytes - before)

    monkeypatch.setattr(SegmentReplicator, "run", measured)
    return found


async def test_one_turn_sends_few_chunks_of_a_message(pair: Pair, turns: list[int]) -> None:
    east, west = pair
    await make(east)
    await make(west)
    await west.stop()
    sent = [bytes([number]) * SIZE for number in range(40)]
    await publish_chunks(east, sent)
    await west.start()
    await until(lambda: is_done(east))
    assert max(turns) < REPLICATED_BYTES_AT_ONCE + 2 * SIZE
    assert await payloads_of(west) == sent


async def test_a_chunked_message_goes_on_after_each_chunk_that_a_rate_holds_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATION_READ_AHEAD_BYTES", 0)
    set_bound(monkeypatch, "REPLICATOR_WINDOW_ENTRIES", 1)
    east, west = pair
    rate = {"dispatchThrottlingRateInMsg": 2, "ratePeriodInSecond": 3600}
    await east.ask("POST", f"{NAMESPACE}/replicatorDispatchRate", rate)
    await make(east)
    await make(west)
    sent = [bytes([number]) * SIZE for number in range(6)]
    await publish_chunks(east, sent)
    replicator = replicator_of(east)
    await until(lambda: replicator.counts.messages == 2)
    # What is in the other cluster already goes again, with the rest.
    await split(west, 0)
    await east.ask("DELETE", f"{NAMESPACE}/replicatorDispatchRate")
    await until(lambda: is_done(east))
    assert sent in [
        [bytes(payload_of(each.data)) for each in await entries_of(segment)]
        for segment in segments_of(west)
    ]


async def test_a_message_of_which_a_chunk_was_deleted_holds_nothing_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await make(east)
    await make(west)
    chunks, read = chunks_of(east, 3), ManagedLedger.read

    async def read_undeleted(
        ledger: ManagedLedger,
        first: Position,
        **limits: Any,  # noqa: ANN401
    ) -> Sequence[Entry]:
        """As after a ledger was trimmed whose entries were skipped."""
        is_chunk = ledger.name.endswith("0000-ffff-0") and limits["max_bytes"] == 1
        return [] if is_chunk and first.entry_id == 0 else await read(ledger, first, **limits)

    monkeypatch.setattr(ManagedLedger, "read", read_undeleted)
    await publish(east, [b"a", b"b", b"c"], chunks)
    await publish(east, [b"behind"])
    await until(lambda: is_done(east))
    assert await payloads_of(west) == [b"behind"]


@pytest.mark.parametrize("largest", [10, 1 << 20])
async def test_batches_are_divided_in_a_thread_from_a_size_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    set_bound(monkeypatch, "REPLICATED_BATCH_BYTES", largest)
    loop_thread, built_in, build = threading.get_ident(), set[int](), build_batch

    def note(messages: Any) -> bytes:  # noqa: ANN401
        built_in.add(threading.get_ident())
        return build(messages)

    monkeypatch.setattr(broker.replication.segment_entries, "build_batch", note)
    east, west = pair
    await make(east, 1)
    await make(west, 3)
    written: Written = {}
    async with writing(east, written, compression="lz4") as writer:
        await writer.write(10)
    await has(west, written)
    assert (loop_thread in built_in) is (largest > 10)
