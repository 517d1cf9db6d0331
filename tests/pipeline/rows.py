"""What tests put into topics and find in them, by our own client.

Rules: what is found is what a checkpoint consumer gets that begins at the beginning.  It must be
what `read_range` finds by another way, message for message, and the end of what is stored: where a
transaction is open it is waited for.  The consumer reads all segments side by side, so what it gets
is put in the order of the topic: segments by their numbers, which puts parents before children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import magnetar
from magnetar.layout import Segment
from magnetar.reads import MessageColumns, Visibility, take_apart
from tests.support.child_process import once_it_is

PATIENCE_S: Final = 60
BATCH: Final = 500
Pair = tuple[str, bytes]
Place = tuple[int, int, int, int]
"""Segment, ledger, entry, index in the batch (-1: in none)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A message that was found."""

    key: str | None
    value: bytes
    properties: tuple[tuple[str, str], ...]
    segment_id: int


def pairs(count: int, *, keys: int = 20, first: int = 0) -> list[Pair]:
    """`k<n mod keys>` and `<n>`, for `n` from `first` on."""
    return [(f"k{number % keys}", b"%d" % number) for number in range(first, first + count)]


async def publish(
    client: magnetar.Client, topic: str, rows: Sequence[Pair], *, at_once: int = 1000
) -> None:
    """Each row as a message; returns when all are stored.

    Entries hold `at_once` rows at most, for a batch of a query has whole entries.
    """
    async with client.producer(topic) as producer:
        for begin in range(0, len(rows), at_once):
            for key, value in rows[begin : begin + at_once]:
                await producer.room()
                producer.send_nowait(value, key=key)
            await producer.flush()


async def committed(
    client: magnetar.Client, topic: str, *, at_rest: bool = True, patience_s: float = PATIENCE_S
) -> list[Row]:
    """Everything in a topic that readers see; see the module's rules.

    Raises `ChildFailed` if a transaction stays open, unless the topic need not be `at_rest`.
    """
    expected: set[Place] = set()
    for segment in (await client.layout(topic)).segments.values():
        if at_rest:
            await _rest(client, segment, patience_s)
        expected |= await _readable(client, segment)
    missing, found = set(expected), list[Row]()
    async with client.checkpoint_consumer(topic) as reader:
        while missing:
            batch = await reader.receive_batch(BATCH, timeout_s=patience_s)
            assert batch, f"a consumer does not get {len(missing)} of {len(expected)} messages"
            for message in batch:
                entry = message.id.entry
                place = (message.id.segment_id, *entry.key, entry.batch_index)
                assert place in missing, f"a consumer gets {message}, which is not to be read"
                missing.discard(place)
                found.append(_row(message))
    return in_order(found)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Each parent before its children, whose numbers are higher; of a segment as they are."""
    return sorted(rows, key=attrgetter("segment_id"))


async def _rest(client: magnetar.Client, segment: Segment, patience_s: float) -> None:
    async def at_rest() -> bool:
        plan = await client.plan_range(segment.topic)
        return plan.horizon == plan.raw_end

    await once_it_is(at_rest, "the horizon", patience_s)


async def _readable(client: magnetar.Client, segment: Segment) -> set[Place]:
    """Where there are messages that `read_range` lets be read."""
    plan = await client.plan_range(segment.topic)
    columns = MessageColumns()
    async for entries in client.read_range(segment.topic, plan.earliest, plan.raw_end):
        for entry in entries:
            assert entry.visibility is Visibility.READABLE
            take_apart(entry, columns)
    indexes = iter(columns.batch_indexes)
    return {
        (segment.segment_id, run.ledger_id, run.entry_id, next(indexes))
        for run in columns.runs
        for _ in range(run.messages)
    }


def _row(message: magnetar.Message[bytes]) -> Row:
    return Row(
        message.key,
        message.value,
        tuple(sorted(message.properties.items())),
        message.id.segment_id,
    )


def of_key(rows: Sequence[Row]) -> dict[str, list[bytes]]:
    """The values of each key, in the order in which they were found."""
    found: dict[str, list[bytes]] = {}
    for row in rows:
        found.setdefault(row.key or "", []).append(row.value)
    return found
