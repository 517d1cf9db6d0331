"""Entries of one segment as brokers store them, and a `Reading` of them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from magnetar.compression import CompressionType, compress
from magnetar.layout import Layout
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_batch, build_entry, parse_metadata
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import PlanLimits, RangePlan

LEDGER = 7
ANSWER = 3
"""Entries in one answer."""


def metadata(sequence_id: int, **fields: object) -> pb.MessageMetadata:
    given = {"producer_name": "p", "publish_time": 1000 + sequence_id} | fields
    return pb.MessageMetadata(sequence_id=sequence_id, **given)  # type: ignore[arg-type]


def single(sequence_id: int, value: bytes, **fields: object) -> bytes:
    return build_entry(metadata(sequence_id, **fields), value)


def batch(
    sequence_id: int,
    values: Sequence[bytes],
    compression: CompressionType = CompressionType.NONE,
    **fields: object,
) -> bytes:
    payload = build_batch(
        [
            (pb.SingleMessageMetadata(payload_size=0, sequence_id=sequence_id + i), value)
            for i, value in enumerate(values)
        ]
    )
    about = metadata(
        sequence_id,
        num_messages_in_batch=len(values),
        compression=int(compression),
        uncompressed_size=len(payload),
        **fields,
    )
    return build_entry(about, compress(compression, payload))


def pieces(sequence_id: int, value: bytes, count: int, **fields: object) -> list[bytes]:
    """Of one message; the last one takes what is over."""
    size = max(len(value) // count, 1)
    parts = [value[i * size : (i + 1) * size] for i in range(count - 1)]
    parts.append(value[(count - 1) * size :])
    return [
        build_entry(
            metadata(
                sequence_id,
                uuid=f"p-{sequence_id}",
                num_chunks_from_msg=count,
                total_chunk_msg_size=len(value),
                chunk_id=number,
                uncompressed_size=len(value),
                **fields,
            ),
            part,
        )
        for number, part in enumerate(parts)
    ]


class StoredSegment:
    """A `Reading` of one segment, whatever it is asked for."""

    def __init__(self, entries: Sequence[bytes]) -> None:
        self.stored = [StoredEntry(LEDGER, number, data) for number, data in enumerate(entries)]
        self.horizon = len(entries)
        self.trimmed = 0
        self.looked_at = 0
        """Entries that were handed out."""

    def layout(self) -> Layout:
        raise NotImplementedError("there is one segment")

    def plan(
        self,
        segment_topic: str,
        start: Position | None,
        *,
        end: Position | None = None,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        from_publish_time_ms: int | None = None,
        before_publish_time_ms: int | None = None,
    ) -> RangePlan:
        PlanLimits(max_messages, max_bytes, from_publish_time_ms, before_publish_time_ms)
        first = self.trimmed if start is None else self._index(start)
        lost, first = first < self.trimmed, max(first, self.trimmed)
        if from_publish_time_ms is not None:
            times = [parse_metadata(each.data).publish_time for each in self.stored[first:]]
            late = (i for i, time in enumerate(times) if time >= from_publish_time_ms)
            first += next(late, len(times))
        last = self.horizon if end is None else min(self.horizon, self._index(end))
        count = max(last - first, 0)
        return RangePlan(
            start=Position(LEDGER, first),
            end=Position(LEDGER, first + count),
            entries=count,
            messages=None,
            bytes=None,
            first_publish_time_ms=None,
            last_publish_time_ms=None,
            earliest=Position(LEDGER, self.trimmed),
            horizon=Position(LEDGER, self.horizon),
            raw_end=Position(LEDGER, len(self.stored)),
            sealed=True,
            lost=lost,
            backlog_messages=None,
            backlog_bytes=None,
            hidden_messages=None,
        )

    def entries(
        self, segment_topic: str, start: Position, end: Position
    ) -> Iterator[Sequence[StoredEntry]]:
        first, last = max(self._index(start), self.trimmed), min(self._index(end), self.horizon)
        for at in range(first, last, ANSWER):
            answer = self.stored[at : min(at + ANSWER, last)]
            self.looked_at += len(answer)
            yield answer

    def _index(self, position: Position) -> int:
        return bisect_left([each.position for each in self.stored], position)
