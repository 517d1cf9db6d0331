"""Samples the keys of a segment's newest entries, when a split is considered."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from broker.scalable.key_sample import KeySample
from broker.topics.topic import Topic
from config.bounds import (
    KEY_SAMPLE_AGE_MS,
    KEY_SAMPLE_BYTES,
    KEY_SAMPLE_ENTRIES,
    KEY_SAMPLE_LEAST,
    KEY_SAMPLE_READS,
    KEY_SAMPLE_SPAN,
)
from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import key_hash
from magnetar.protocol.message import parse_metadata, partition_key
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from storage.managed_ledger.ledger_map import LedgerInfo


class _Sampled(NamedTuple):
    """An entry's metadata, and its stored bytes."""

    metadata: MessageMetadata
    size: int


async def sample_keys(topic: Topic, now_ms: int) -> KeySample:
    """Sample the keys of a segment's newest entries, from KEY_SAMPLE_READS places.

    Entries that are older than KEY_SAMPLE_AGE_MS count only if there are too few others.  Raises as
    `ManagedLedger.read`.
    """
    by_position: dict[Position, _Sampled] = {}
    for start in places(topic.ledger.ledgers):
        entries = await topic.ledger.read(
            start,
            max_entries=KEY_SAMPLE_ENTRIES,
            max_bytes=KEY_SAMPLE_BYTES // KEY_SAMPLE_READS,
        )
        for entry in entries:
            try:
                metadata = parse_metadata(entry.data)
            except FrameError:
                continue
            if not metadata.marker_type:
                by_position[entry.position] = _Sampled(metadata, len(entry.data))
    found = list(by_position.values())
    recent = [each for each in found if now_ms - each.metadata.publish_time <= KEY_SAMPLE_AGE_MS]
    return _sample_of(recent if len(recent) >= KEY_SAMPLE_LEAST else found)


def _sample_of(found: list[_Sampled]) -> KeySample:
    messages: Counter[int | None] = Counter()
    sizes: Counter[int | None] = Counter()
    for metadata, size in found:
        key = partition_key(metadata)
        hashed = None if key is None else key_hash(key)
        messages[hashed] += max(metadata.num_messages_in_batch, 1)
        sizes[hashed] += size
    return KeySample(_of_keys(messages), messages[None], len(found), _of_keys(sizes), sizes[None])


def _of_keys(counts: Counter[int | None]) -> dict[int, int]:
    return {hashed: count for hashed, count in counts.items() if hashed is not None}


def places(ledgers: Sequence[LedgerInfo]) -> list[Position]:
    """Where the newest KEY_SAMPLE_SPAN entries are read from, spread evenly, newest first."""
    span = min(KEY_SAMPLE_SPAN, sum(each.entries for each in ledgers))
    pause = max(span // KEY_SAMPLE_READS, KEY_SAMPLE_ENTRIES)
    wanted = [min(back, span) for back in range(pause, span + pause, pause)][:KEY_SAMPLE_READS]
    found: list[Position] = []
    newer = 0
    for info in reversed(ledgers):
        here = [back for back in wanted if newer < back <= newer + info.entries]
        found += [Position(info.ledger_id, info.entries - (back - newer)) for back in here]
        newer += info.entries
        if newer >= span:
            break
    return found
