"""Rows to a producer, and back from its receipts."""

import asyncio
from collections.abc import Sequence

import pytest

from magnetar.errors import InvalidMessage, MessageTooLarge
from magnetar.layout import Layout, Segment
from magnetar.produce.receipts import Receipts
from magnetar.spark.row_sender import RowSender
from magnetar.spark.sink_rows import Rows
from magnetar.spark.task_report import RowCount

TOPIC = "topic://public/default/t"


def rows(*hashes: int) -> Rows:
    return Rows([b"v"] * len(hashes), ["k"] * len(hashes), None, None, hashes)


def layout(*ids: int) -> Layout:
    """Segments, of which the last one is active."""
    return Layout(
        len(ids),
        [
            Segment(
                segment_id=one,
                hash_start=0,
                hash_end=0xFFFF,
                active=one == ids[-1],
                parent_ids=(),
                child_ids=(),
                topic=f"segment-{one}",
                legacy=False,
            )
            for one in ids
        ],
    )


class Producer:
    """Receipts are given when the test says."""

    def __init__(self) -> None:
        self.topic = TOPIC
        self.given: list[tuple[Receipts, int]] = []
        self.keys: list[object] = []
        self.closed = False

    async def send_many(self, values: Sequence[bytes], **columns: object) -> Receipts:
        receipts = Receipts(len(values), asyncio.get_running_loop().create_future())
        self.given.append((receipts, len(values)))
        self.keys.append(columns["keys"])
        return receipts

    def store(self, place: int, *segments: int) -> None:
        receipts, count = self.given[place]
        assert len(segments) == count
        for row, segment in enumerate(segments):
            receipts.add_receipt(row, segment, (1, 1, row, count, -1, None))

    async def close(self) -> None:
        self.closed = True


def sender(producer: Producer, *segments: int) -> RowSender:
    async def ask_layout() -> Layout:
        return layout(*segments)

    return RowSender(producer, None, ask_layout)  # type: ignore[arg-type]


async def test_rows_count_for_the_segment_of_their_receipt() -> None:
    producer = Producer()
    one = sender(producer, 0, 1)
    await one.send(rows(2**64 - 1, 2, 3))
    await one.send(rows(5, 7))
    settling = asyncio.ensure_future(one.settle())
    producer.store(1, 1, 1)
    await asyncio.sleep(0)
    assert not settling.done()
    producer.store(0, 0, 1, 0)
    assert await settling == {"segment-0": RowCount(2, 2), "segment-1": RowCount(3, 14)}
    assert producer.keys[0] == ["k"] * 3
    await one.close()
    assert producer.closed


async def test_stored_rows_are_forgotten() -> None:
    producer = Producer()
    one = sender(producer, 0)
    for place in range(5):
        await one.send(rows(1))
        producer.store(place, 0)
    await one.send(rows(1))
    assert len(one._sent) == 1
    producer.store(5, 0)
    assert await one.settle() == {"segment-0": RowCount(6, 6)}


async def test_failed_row_is_raised_by_the_next_send_or_the_end() -> None:
    producer = Producer()
    one = sender(producer, 0)
    await one.send(rows(1))
    producer.given[0][0].failed(MessageTooLarge("too large"))
    with pytest.raises(MessageTooLarge):
        await one.send(rows(1))
    with pytest.raises(MessageTooLarge):
        await one.settle()
    await one.close()


async def test_rows_in_a_deleted_segment_fail() -> None:
    producer = Producer()
    one = sender(producer, 7)
    await one.send(rows(1))
    producer.store(0, 3)
    with pytest.raises(InvalidMessage, match="segment 3"):
        await one.settle()


async def test_sender_without_rows_counts_nothing() -> None:
    assert await sender(Producer(), 0).settle() == {}
