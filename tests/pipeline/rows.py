"""What tests put into topics and find in them, by our own client.

Rules: what is found is all that a reader sees that begins at the beginning, each parent before its
children, up to the end that there is when it is asked for.  To see the end, marked messages are
sent; so nothing under test may read the topic afterwards, unless it leaves them out.
"""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import magnetar
from protocol.key_hash import KEY_SPACE, key_hash

PATIENCE_S: Final = 60
MARK: Final = "tests.mark"
BATCH: Final = 500
PARTS: Final = 64
"""Of the key space: no segment of a test is smaller than two of them."""
Pair = tuple[str, bytes]


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


async def publish(client: magnetar.Client, topic: str, rows: Iterable[Pair]) -> None:
    """Each row as a message; returns when all are stored."""
    async with client.producer(topic) as producer:
        for key, value in rows:
            await producer.room()
            producer.send_nowait(value, key=key)
        await producer.flush()


async def committed(client: magnetar.Client, topic: str) -> list[Row]:
    """Everything in a topic that readers see; see the module's rules.

    Raises `TimeoutError` if an end does not come in sight: an open transaction is before it.
    """
    mark = f"{id(topic):x}-{asyncio.get_running_loop().time()}"
    async with client.checkpoint_consumer(topic) as reader:
        missing = await _mark(client, topic, mark)
        found: list[Row] = []
        async with asyncio.timeout(PATIENCE_S):
            while missing:
                for message in await reader.receive_batch(BATCH, timeout_s=PATIENCE_S):
                    if message.properties.get(MARK) == mark:
                        missing.discard(message.value)
                    elif MARK not in message.properties:
                        found.append(_row(message))
        return found


def _row(message: magnetar.Message[bytes]) -> Row:
    return Row(
        message.key,
        message.value,
        tuple(sorted(message.properties.items())),
        message.id.segment_id,
    )


async def _mark(client: magnetar.Client, topic: str, mark: str) -> set[bytes]:
    """Send a message to every part of the key space; their values."""
    async with client.producer(topic) as producer:
        for part, key in _keys_of_parts().items():
            producer.send_nowait(b"%d" % part, key=key, properties={MARK: mark})
        await producer.flush()
    return {b"%d" % part for part in range(PARTS)}


def _keys_of_parts() -> dict[int, str]:
    """A key that hashes into each part of the key space."""
    found: dict[int, str] = {}
    for number in itertools.count():
        key = f"mark-{number}"
        found.setdefault((key_hash(key.encode()) >> 16) * PARTS // KEY_SPACE, key)
        if len(found) == PARTS:
            return found
    raise AssertionError


def of_key(rows: Sequence[Row]) -> dict[str, list[bytes]]:
    """The values of each key, in the order in which they were found."""
    found: dict[str, list[bytes]] = {}
    for row in rows:
        found.setdefault(row.key or "", []).append(row.value)
    return found
