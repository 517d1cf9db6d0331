"""Actors that make histories: appenders, tellers of a bank, relays, and readers of all topics.

Rules:

- Appenders write to some keys of a topic of lists in each transaction; relays of two kinds take
  that topic to another one each, in transactions: an ordered one by cumulative acknowledgements, a
  shared one by individual ones.  Tellers transfer between accounts, the keys of a bank.
- Each actor has a session of its own.  Some transactions abort on purpose; what a client raises is
  an abort, and the actor goes on.
- A *cut* writes to every key, in a transaction that is made anew until it commits.  Tellers stand
  still meanwhile.  A segment's readers get it when everything before it there is decided: so a
  reader that has all of a cut has, of each transaction that was before it, all or nothing.
- At the end: a cut; readers read up to it, those who read all the time and a new one.  The relays
  go on until each message is through, for a bounded time: what is missing then is lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import magnetar
from tests.cluster.histories.checker import bank_anomalies, relay_anomalies, topic_anomalies
from tests.cluster.histories.history import (
    Operation,
    Outcome,
    Read,
    Reading,
    TopicHistory,
    Write,
)
from tests.cluster.histories.sessions import (
    ClientFailed,
    Consumer,
    Received,
    Session,
    Transaction,
)
from tests.support.waiting import end

KEYS: Final = tuple(f"k{number}" for number in range(12))
ACCOUNTS: Final = tuple(f"a{number}" for number in range(6))
APPENDERS: Final = 2
TELLERS: Final = 2
SHARED_RELAYS: Final = 2
LONGEST_APPEND: Final = 5
LONGEST_BATCH: Final = 20
TRANSFERS_PER_AUDIT: Final = 20
ABORTED: Final = 0.15
"""How many transactions abort on purpose."""
POLL_S: Final = 0.05
PAUSE_S: Final = 0.05
"""After a failure."""
REST_S: Final = 0.1
"""How long a writer rests at most between two transactions: relays have to follow."""
END_S: Final = 60.0
"""How long readers and relays may stand still in the end."""
RECEIVED_AT_ONCE: Final = 200


OpenSession = Callable[[], Awaitable[Session]]


@dataclass
class Stage:
    """The four topics, and what happens on them."""

    lists: TopicHistory
    bank: TopicHistory
    ordered: TopicHistory
    shared: TopicHistory
    wanted: int
    """So many transactions are to commit."""
    ordered_relays: int
    luck: random.Random
    committed: int = 0
    troubled: bool = False
    """Faults are still to come."""
    relaying: bool = True
    stalled: Callable[[], Awaitable[None]] | None = None
    """Called when readers stand still that should not."""
    tellers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TELLERS))
    """A teller has one while it transfers, a cut has all."""

    @classmethod
    def named(cls, name: str, wanted: int, ordered_relays: int, seed: int) -> Stage:
        """With topics of that name."""
        return cls(
            lists=TopicHistory(f"{name}-lists", KEYS),
            bank=TopicHistory(f"{name}-bank", ACCOUNTS),
            ordered=TopicHistory(f"{name}-ordered", KEYS),
            shared=TopicHistory(f"{name}-shared", KEYS),
            wanted=wanted,
            ordered_relays=ordered_relays,
            luck=random.Random(seed),
        )

    @property
    def topics(self) -> Sequence[TopicHistory]:
        """All of them."""
        return (self.lists, self.bank, self.ordered, self.shared)

    def outcomes(self) -> Counter[Outcome]:
        """How many transactions ended how."""
        return Counter(each.outcome for topic in self.topics for each in topic.operations)

    @property
    def is_busy(self) -> bool:
        """Whether there is more to be written."""
        return self.troubled or self.committed < self.wanted

    def new_luck(self) -> random.Random:
        """Of one actor: what it draws does not depend on the others."""
        return random.Random(self.luck.getrandbits(32))

    def anomalies(self) -> list[str]:
        """What must not be."""
        source = self.lists.readings[-1]
        return [
            *(anomaly for topic in self.topics for anomaly in topic_anomalies(topic)),
            *bank_anomalies(self.bank),
            *relay_anomalies(source, self.ordered, ordered=True),
            *relay_anomalies(source, self.shared, ordered=False),
        ]


async def transact(
    stage: Stage,
    session: Session,
    operation: Operation,
    topic: str,
    *,
    abort: bool = False,
    first: Callable[[Transaction], Awaitable[None]] | None = None,
) -> None:
    """Do it in a transaction, after what is to be `first` in it; its outcome is noted."""
    transaction: Transaction | None = None
    try:
        transaction = await session.begin()
        if first is not None:
            await first(transaction)
        await session.send(name_of(topic), operation.writes, transaction)
        if not abort:
            operation.commit_at = time.monotonic()
            operation.outcome = Outcome.UNKNOWN
            operation.outcome = await transaction.commit()
            stage.committed += operation.outcome is Outcome.OK
            return
    except ClientFailed:
        await asyncio.sleep(PAUSE_S)
    finally:
        operation.ended_at = time.monotonic()
    if transaction is not None:
        await transaction.abort()


def name_of(topic: str) -> str:
    """The scalable topic's."""
    return f"topic://public/default/{topic}"


# Actors


async def append(stage: Stage, session: Session, luck: random.Random, name: str) -> None:
    """Transactions that write to some keys, some of them more than once."""

    def writes(operation: str) -> Sequence[Write]:
        keys = luck.choices(KEYS, k=luck.randint(1, LONGEST_APPEND))
        return [Write(key, f"{operation}.{place}") for place, key in enumerate(keys)]

    while stage.is_busy:
        operation = stage.lists.begin(name, time.monotonic(), writes)
        await transact(stage, session, operation, stage.lists.topic, abort=luck.random() < ABORTED)
        await asyncio.sleep(luck.uniform(0, REST_S))


async def transfer(stage: Stage, session: Session, luck: random.Random, name: str) -> None:
    """Transfers, each of a debit and a credit."""

    def writes(operation: str) -> Sequence[Write]:
        payer, payee = luck.sample(ACCOUNTS, 2)
        amount = luck.randint(1, 100)
        return [
            Write(payer, f"{operation}.debit", amount=-amount),
            Write(payee, f"{operation}.credit", amount=amount),
        ]

    while stage.is_busy:
        async with stage.tellers:
            operation = stage.bank.begin(name, time.monotonic(), writes)
            await transact(
                stage, session, operation, stage.bank.topic, abort=luck.random() < ABORTED
            )
        await asyncio.sleep(luck.uniform(0, REST_S))


async def audit(stage: Stage, session: Session) -> None:
    """A cut of the bank after some transfers, again and again."""
    while stage.is_busy:
        done = len(stage.bank.operations)
        while stage.is_busy and len(stage.bank.operations) < done + TRANSFERS_PER_AUDIT:
            await asyncio.sleep(PAUSE_S)
        async with AsyncExitStack() as still:
            for _ in range(TELLERS):
                await still.enter_async_context(stage.tellers)
            await cut(stage, stage.bank, session)


async def cut(stage: Stage, history: TopicHistory, session: Session) -> Operation:
    """Write to every key, until it is committed; the transaction that is."""
    async with asyncio.timeout(END_S):
        while True:
            operation = history.begin(
                "cut",
                time.monotonic(),
                lambda name: [Write(key, f"{name}.{key}") for key in history.keys],
                cut=True,
            )
            await transact(stage, session, operation, history.topic)
            if operation.outcome is Outcome.OK:
                return operation


@dataclass
class Relay:
    """Takes lists to another topic."""

    stage: Stage
    output: TopicHistory
    session: Session
    luck: random.Random
    name: str

    async def run(self, consumer: Consumer) -> None:
        """Until it is told to stop."""
        while self.stage.relaying:
            try:
                batch = await consumer.receive(self.luck.randint(1, LONGEST_BATCH))
            except ClientFailed:
                await consumer.take_back((), acknowledged=False)
                await asyncio.sleep(PAUSE_S)
                continue
            if batch:
                await self._relay(consumer, batch)
        await consumer.close()

    async def _relay(self, consumer: Consumer, batch: Sequence[Received]) -> None:
        operation = self.output.begin(self.name, time.monotonic(), lambda name: ())
        acknowledged = False

        async def acknowledge(transaction: Transaction) -> None:
            nonlocal acknowledged
            used = await consumer.ack(batch, transaction)
            acknowledged = True
            operation.writes = [
                Write(each.key, f"{operation.name}.{place}", source=each.value)
                for place, each in enumerate(used)
            ]

        abort = self.stage.is_busy and self.luck.random() < ABORTED
        await transact(
            self.stage, self.session, operation, self.output.topic, abort=abort, first=acknowledge
        )
        if operation.outcome is not Outcome.OK:
            await consumer.take_back(batch, acknowledged=acknowledged)


async def read(session: Session, topic: str, reading: Reading) -> None:
    """Read for ever.

    An ordered reader is a stream consumer, that may get again what it has not acknowledged; one
    that is not is a checkpoint consumer, that gets nothing again.
    """
    if reading.ordered:
        consumer = await session.stream(name_of(topic), reading.reader)
    else:
        consumer = await session.reader(name_of(topic))
    known: set[magnetar.MessageId] = set()
    while True:
        messages = await consumer.receive(RECEIVED_AT_ONCE)
        now = time.monotonic()
        for each in messages:
            if not reading.ordered or each.place not in known:
                reading.add(Read(each.key, each.value, now))
            known.add(each.place)
        if messages:
            await consumer.ack(messages, None)


# The whole


async def run(stage: Stage, open_session: OpenSession, open_other: OpenSession) -> None:
    """Make the histories of a stage.  Another client is one of the two readers in the end."""
    async with AsyncExitStack() as stack:

        async def session(opening: OpenSession = open_session) -> Session:
            opened = await opening()
            stack.push_async_callback(opened.close)
            return opened

        async def sessions(count: int) -> list[Session]:
            return await asyncio.gather(*(session() for _ in range(count)))

        live = [
            asyncio.create_task(read(each, topic.topic, new_reading(topic, "live")))
            for each, topic in zip(await sessions(len(stage.topics)), stage.topics, strict=True)
        ]
        relaying = stage.ordered_relays + SHARED_RELAYS
        relays = [
            asyncio.create_task(each) for each in await relays_of(stage, await sessions(relaying))
        ]
        writers = await sessions(1 + APPENDERS + TELLERS)
        try:
            async with asyncio.TaskGroup() as writing:
                for work in writers_of(stage, writers):
                    writing.create_task(work)
            last = [await session(), await session(open_other)]
            await read_to_a_cut(stage, stage.lists, last, live)
            await read_to_a_cut(stage, stage.bank, last, live)
            await all_is_relayed(stage, [*live, *relays])
            stage.relaying = False
            await asyncio.gather(*relays)
            await read_to_a_cut(stage, stage.ordered, last, live)
            await read_to_a_cut(stage, stage.shared, last, live)
        finally:
            await end(*live, *relays)


def writers_of(stage: Stage, sessions: Sequence[Session]) -> list[Coroutine[None, None, None]]:
    """What writes to lists and bank."""
    auditor, *others = sessions
    works = [
        (append if number < APPENDERS else transfer)(
            stage, each, stage.new_luck(), f"writer{number}"
        )
        for number, each in enumerate(others)
    ]
    return [audit(stage, auditor), *works]


async def relays_of(stage: Stage, sessions: Sequence[Session]) -> list[Coroutine[None, None, None]]:
    """Those of both kinds, subscribed."""
    source = name_of(stage.lists.topic)
    works: list[Coroutine[None, None, None]] = []
    for number, session in enumerate(sessions):
        ordered = number < stage.ordered_relays
        output = stage.ordered if ordered else stage.shared
        consumer = await (session.stream if ordered else session.queue)(source, output.topic)
        relay = Relay(stage, output, session, stage.new_luck(), f"relay{number}")
        works.append(relay.run(consumer))
    return works


def new_reading(history: TopicHistory, reader: str, *, ordered: bool = False) -> Reading:
    """A new reading of a topic."""
    reading = Reading(f"{reader}-of-{history.topic}", ordered)
    history.readings.append(reading)
    return reading


async def read_to_a_cut(
    stage: Stage,
    history: TopicHistory,
    last: Sequence[Session],
    live: Sequence[asyncio.Task[None]],
) -> None:
    """Those who read all the time have a new cut of a topic, and new readers have everything."""
    made = await cut(stage, history, last[0])
    marks = {write.value for write in made.writes}
    fresh = [
        asyncio.create_task(
            read(each, history.topic, new_reading(history, f"last{number}", ordered=True))
        )
        for number, each in enumerate(last)
    ]

    def is_read() -> bool:
        everything = history.readings[-1].values
        return marks <= everything and all(everything <= each.values for each in history.readings)

    try:
        await while_it_moves(stage, is_read, history.readings, [*live, *fresh])
    finally:
        await end(*fresh)


async def while_it_moves(
    stage: Stage,
    is_done: Callable[[], bool],
    readings: Sequence[Reading],
    tasks: Sequence[asyncio.Task[None]],
) -> None:
    """Return when it is done, or no reader gets anything more: the checker finds what is missing.

    Raises what one of the tasks raised.
    """
    length, since = -1, time.monotonic()
    while not is_done() and time.monotonic() < since + END_S:
        for task in tasks:
            if task.done():
                task.result()
        if (now := sum(len(each.reads) for each in readings)) != length:
            length, since = now, time.monotonic()
        await asyncio.sleep(POLL_S)
    if not is_done() and stage.stalled is not None:
        await stage.stalled()


async def all_is_relayed(stage: Stage, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Everything in the lists is in both outputs, as those who read all the time see them."""
    due = stage.lists.readings[-1].values
    outputs = (stage.ordered, stage.shared)
    await while_it_moves(
        stage,
        lambda: all(due <= sources_in(output) for output in outputs),
        [output.readings[0] for output in outputs],
        tasks,
    )


def sources_in(output: TopicHistory) -> set[str]:
    """What was made of which messages, as the first reader has it."""
    sources = {write.value: write.source for _, write in output.written()}
    return {sources[read.value] for read in output.readings[0].reads if read.value in sources}
