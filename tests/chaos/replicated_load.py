"""Producers of a replicated scalable topic in several clusters, and what each cluster has of it.

They are clients of the Python library, which go on by themselves when their broker was killed.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, cast

import magnetar
from magnetar.consume.settings import InitialPosition
from magnetar.errors import MagnetarError
from magnetar.produce.producer import Producer
from tests.chaos.replication_judge import NOTHING_ABSENT, Held, Outcome, Sent, problems
from tests.support.replicating_clusters import Cluster
from tests.support.waiting import end, until, until_awaited

LOCAL_NAME: Final = "shared"
TOPIC: Final = f"topic://public/default/{LOCAL_NAME}"
PATH: Final = f"/scalable/public/default/{LOCAL_NAME}"
AUDIT: Final = "audit"
"""A subscription on which nothing is acknowledged before the end: it keeps all messages."""
KEYS: Final = 8
"""Of each producer."""
BATCH: Final = 20
FREE: Final = "free"
"""How streams of messages without key begin."""
LARGE: Final = 5_400_000
"""Bytes that do not fit into one message."""
LARGE_COUNT: Final = 3
"""Such messages of each cluster, at most."""
PAUSE_S: Final = 0.08
SEND_S: Final = 120
"""A send whose broker was killed waits for its successor."""
TRANSACTION_S: Final = 15
QUIET_S: Final = 2.0
"""Consumers that get nothing for so long have everything."""
READ_S: Final = 60
CHANGED_S: Final = 60
POLL_S: Final = 0.2


class ClusterLoad:
    """What is sent in one cluster, and what its producers know of it."""

    def __init__(self, cluster: Cluster, rng: random.Random, label: str) -> None:
        """`label` is part of the names of its streams."""
        self.cluster = cluster
        self._label = label
        self.sent: dict[Sent, Outcome] = {}
        self._rng = rng
        self._next: dict[str, int] = {}
        self._large = 0
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Start the producers."""
        client = await self._stack.enter_async_context(magnetar.connect(self.cluster.url))
        name = self.cluster.name
        works: list[tuple[Callable[[magnetar.Client, Producer[bytes]], Awaitable[None]], bool]] = [
            (self._send_alone, False),
            (self._send_batches, True),
            (self._send_transactions, True),
        ]
        for number, (work, batching) in enumerate(works):
            producer = await self._stack.enter_async_context(
                client.producer(
                    TOPIC,
                    name=f"{name}-{self._label}{number}",
                    batching=batching,
                    compression="lz4" if batching else "none",
                    chunking=not batching,
                    send_timeout_s=SEND_S,
                )
            )
            self._tasks.append(asyncio.create_task(self._repeat(work, client, producer)))

    async def stop(self) -> None:
        """Return when the producers know what came of all that they sent."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """End everything."""
        await end(*self._tasks)
        await self._stack.aclose()

    @property
    def receipts(self) -> int:
        """The messages that are known to be stored."""
        return sum(each is Outcome.STORED for each in self.sent.values())

    async def goes_on(self, more: int = 60) -> None:
        """Return when so many more messages have receipts."""
        enough = self.receipts + more
        await until(lambda: self.receipts >= enough or any(each.done() for each in self._tasks), 60)
        for task in self._tasks:
            if task.done():
                task.result()

    async def _repeat(
        self,
        work: Callable[[magnetar.Client, Producer[bytes]], Awaitable[None]],
        client: magnetar.Client,
        producer: Producer[bytes],
    ) -> None:
        while not self._stop.is_set():
            await work(client, producer)
            await asyncio.sleep(PAUSE_S)

    def _message(self, stream: str) -> Sent:
        number = self._next.get(stream, 0)
        self._next[stream] = number + 1
        message = Sent(self.cluster.name, stream, number)
        self.sent[message] = Outcome.UNKNOWN
        return message

    def _stream(self, producer: Producer[bytes]) -> str:
        """A key of this producer's own, or none."""
        if not self._rng.randrange(10):
            return FREE + self._label
        return f"{producer.name}-{self._rng.randrange(KEYS)}"

    async def _send_alone(self, client: magnetar.Client, producer: Producer[bytes]) -> None:
        """One message, which is awaited; a few are large."""
        large = self._large < LARGE_COUNT and not self._rng.randrange(30)
        self._large += large
        message = self._message(f"{producer.name}-large" if large else self._stream(producer))
        size = LARGE if large else 0
        await producer.send(_content(message, size), key=_key(message))
        self.sent[message] = Outcome.STORED

    async def _send_batches(self, client: magnetar.Client, producer: Producer[bytes]) -> None:
        """Messages of many keys at once."""
        messages = [self._message(self._stream(producer)) for _ in range(BATCH)]
        sends = [producer.send_nowait(_content(each), key=_key(each)) for each in messages]
        await asyncio.gather(*sends)
        self.sent.update(dict.fromkeys(messages, Outcome.STORED))

    async def _send_transactions(self, client: magnetar.Client, producer: Producer[bytes]) -> None:
        """A transaction of some messages, which commits or aborts."""
        messages = [self._message(self._stream(producer)) for _ in range(self._rng.randrange(1, 9))]
        commits = self._rng.random() < 0.7
        try:
            transaction = await client.transaction(timeout_s=TRANSACTION_S)
        except MagnetarError:
            # Nothing was sent: no cluster has anything of it.
            self.sent.update(dict.fromkeys(messages, Outcome.ABORTED))
            return
        try:
            sends = [
                producer.send_nowait(_content(each), key=_key(each), transaction=transaction)
                for each in messages
            ]
            await asyncio.gather(*sends)
            await (transaction.commit() if commits else transaction.abort())
        except MagnetarError:
            return  # unknown
        outcome = Outcome.STORED if commits else Outcome.ABORTED
        self.sent.update(dict.fromkeys(messages, outcome))


def _key(message: Sent) -> str | None:
    return None if message.stream.startswith(FREE) else f"{message.origin}:{message.stream}"


def _content(message: Sent, size: int = 0) -> bytes:
    return f"{message.origin}:{message.stream}:{message.number}:".encode().ljust(size, b".")


def message_in(content: bytes) -> Sent:
    """The message with this content."""
    origin, stream, number, _ = content.split(b":", 3)
    return Sent(origin.decode(), stream.decode(), int(number))


@asynccontextmanager
async def loads(
    clusters: Sequence[Cluster], rng: random.Random, label: str = ""
) -> AsyncIterator[list[ClusterLoad]]:
    """Producers in each cluster; all are gone at the end."""
    made = [ClusterLoad(each, rng, label) for each in clusters]
    try:
        for each in made:
            await each.start()
        yield made
    finally:
        for each in made:
            await each.close()


async def stop_all(load: Sequence[ClusterLoad]) -> dict[Sent, Outcome]:
    """Stop the producers; what they sent, and what came of it."""
    for each in load:
        await each.stop()
    return {message: told for each in load for message, told in each.sent.items()}


def stored_of(sent: Mapping[Sent, Outcome]) -> set[Sent]:
    """The messages that are known to be stored."""
    return {message for message, told in sent.items() if told is Outcome.STORED}


async def make_topic(cluster: Cluster, segments: int) -> None:
    """Create the topic in one cluster, and keep all of its messages there."""
    status, answer = await cluster.broker.rest("PUT", PATH, numInitialSegments=segments)
    assert status == 204, answer
    status, answer = await cluster.broker.rest(
        "PUT", f"{PATH}/subscriptions/{AUDIT}", type="STREAM"
    )
    assert status == 204, answer


async def read_all(cluster: Cluster, wanted: set[Sent]) -> list[Held]:
    """What a cluster has, for each key in its order, once it has what is wanted and nothing comes.

    Whatever is missing after READ_S is left to the judge.
    """
    found: list[Held] = []
    missing = set(wanted)
    async with (
        magnetar.connect(cluster.url) as client,
        client.stream_consumer(TOPIC, AUDIT, initial_position=InitialPosition.EARLIEST) as consumer,
    ):
        ends_s = asyncio.get_running_loop().time() + READ_S
        while asyncio.get_running_loop().time() < ends_s:
            messages = await consumer.receive_batch(500, timeout_s=QUIET_S)
            for each in messages:
                held = Held(message_in(each.data), each.replicated_from or "")
                found.append(held)
                missing.discard(held.message)
                # Children of a segment are read when all of it is acknowledged.
                await consumer.ack(each)
            if not messages and not missing:
                break
    return found


async def segments_of(cluster: Cluster) -> dict[int, dict[str, object]]:
    """The segments of the topic's record."""
    status, record = await cluster.broker.rest("GET", PATH)
    assert status == 200, record
    shown = cast("dict[str, dict[str, dict[str, object]]]", record)["segments"]
    return {int(number): each for number, each in shown.items()}


async def everything_is_everywhere_once(
    clusters: Sequence[Cluster],
    sent: Mapping[Sent, Outcome],
    absent: Mapping[str, Container[Sent]] = NOTHING_ABSENT,
) -> None:
    """Read all, and have it judged."""
    stored = stored_of(sent)
    wanted = [{m for m in stored if m not in absent.get(c.name, ())} for c in clusters]
    read = await asyncio.gather(*map(read_all, clusters, wanted))
    held = {cluster.name: had for cluster, had in zip(clusters, read, strict=True)}
    print({name: len(had) for name, had in held.items()}, f"{len(stored)} with receipt")
    unordered = {each.stream for each in sent if each.stream.startswith(FREE)}
    found = problems(sent, held, unordered, absent)
    assert not found, "\n".join(found)


async def cursors_of(cluster: Cluster, target: str) -> list[bool | None]:
    """Of each segment, whether all of it is sent to another cluster; None without a cursor."""
    found: list[bool | None] = []
    for number, segment in (await segments_of(cluster)).items():
        bounds = cast("dict[str, int]", segment["hashRange"])
        name = f"{bounds['start']:04x}-{bounds['end']:04x}-{number}"
        status, stats = await cluster.broker.rest(
            "GET", f"/segments/public/default/{LOCAL_NAME}/{name}/internalStats"
        )
        assert status == 200, stats
        shown = cast("dict[str, object]", stats)
        cursors = cast("dict[str, dict[str, str]]", shown["cursors"])
        cursor = cursors.get(f"pulsar.repl.{target}")
        if cursor is None:
            found.append(None)
        else:
            last = _position(cast("str", shown["lastConfirmedEntry"]))
            found.append(_position(cursor["markDeletePosition"]) >= last)
    return found


def _position(text: str) -> tuple[int, int]:
    ledger, entry = text.split(":")
    return int(ledger), int(entry)


async def until_cursors(
    cluster: Cluster, target: str, are_right: Callable[[list[bool | None]], bool]
) -> None:
    """Return when the replicator's cursors in all segments are as they should be."""

    async def is_so() -> bool:
        right = are_right(await cursors_of(cluster, target))
        if not right:
            await asyncio.sleep(POLL_S)
        return right

    try:
        await until_awaited(is_so, CHANGED_S)
    except TimeoutError:
        shown = await cursors_of(cluster, target)
        raise AssertionError(f"the cursors of {cluster.name} for {target} are {shown}") from None
