"""Dispatch while transactions hold messages: nothing is lost, nothing that is held is shown.

Some messages have a delivery time, and nobody who shares gets them before.
"""

import random
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from broker.consumer import Consumer, SubscriptionType
from broker.transactional_acks import TransactionalAcks
from protocol.ack_set import from_words, pending_all, to_words
from protocol.ids import Position
from protocol.pulsar_pb2 import BaseCommand
from tests.unit.broker.egress.fakes import FakeConnection, FakeTopic, attach, entry_bytes, settle
from txn.errors import InvalidTxnStatus, TransactionConflict
from txn.pending_ack import PendingAck
from txn.pending_acks_core import Apply, Effect, Hold, PendingAcksCore, Refuse, Release
from txn.records import AckedPosition, AckRecord, TxnState
from txn.txn_id import TxnId

KINDS = list(SubscriptionType)


class History:
    """One subscription under random consumers, transactions and redelivery requests."""

    def __init__(self, seed: int, kind: SubscriptionType) -> None:
        self.rng = random.Random(seed)
        self.kind = kind
        self.topic = FakeTopic()
        self.subscription = self.topic.subscription()
        self.cursor = self.subscription.cursor
        self.core = PendingAcksCore(self.cursor)
        self.listener = TransactionalAcks(self.subscription)
        self.listener.pending = SimpleNamespace(core=self.core)  # type: ignore[assignment]
        self.subscription.messages_held = self.core.held
        self.sizes: list[int] = []
        self.due_ms: list[int] = []
        self.consumers: list[tuple[Consumer, FakeConnection]] = []
        self.seen: dict[FakeConnection, int] = {}
        self.flying: list[list[PendingAck]] = []
        self.txns = [TxnId(0, least) for least in range(3)]
        self.records = 0
        self.released = 0
        self.names = 0

    async def run(self, steps: int) -> None:
        self.append()
        await self.join()
        moves = (
            self.append,
            self.take,
            self.take,
            self.take,
            self.go_on,
            self.go_on,
            self.end,
            self.plain,
            self.redeliver,
            self.come_or_go,
        )
        for _ in range(steps):
            before = self.pending()
            again = self.rng.choice(moves)()
            if again is not None:
                await again
            await settle(6)
            held_all_along = before & self.pending()
            shown = {position for position, _ in self.delivered()}
            assert not shown & held_all_along
            if self.kind.individual:
                early = [each for each in shown if self.due_ms[each.entry_id] > self.topic.now_ms]
                assert not early
            self.topic.now_ms += self.rng.randint(0, 5)
            self.subscription.wake()
        await self.finish()

    # Moves

    def append(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            size = self.rng.choice((1, 1, 3))
            number = len(self.sizes)
            self.sizes.append(size)
            due_ms = self.topic.now_ms + self.rng.randint(1, 50) if self.rng.random() < 0.3 else 0
            self.due_ms.append(due_ms)
            data = entry_bytes(number, f"k{number % 5}", count=size, deliver_at_time=due_ms)
            self.topic.ledger.put(data)

    async def join(self) -> None:
        self.names += 1
        made = await attach(self.subscription, self.kind, f"c{self.names}", permits=5)
        self.consumers.append(made)
        self.seen[made[1]] = 0

    def come_or_go(self) -> object:
        self.flow()
        if self.rng.random() < 0.6:
            return None
        most = 1 if self.kind is SubscriptionType.EXCLUSIVE else 3
        if self.consumers and (len(self.consumers) == most or self.rng.random() < 0.5):
            consumer, _ = self.consumers.pop(self.rng.randrange(len(self.consumers)))
            consumer.close()
            return None
        return self.join()

    def flow(self) -> None:
        for consumer, _ in self.consumers:
            consumer.flow(self.rng.randint(0, 20))

    def random_ack(self) -> AckedPosition:
        number = self.rng.randrange(len(self.sizes))
        size = self.sizes[number]
        if size == 1 or self.rng.random() < 0.2:
            return AckedPosition(Position(1, number))
        named = self.rng.sample(range(size), self.rng.randint(1, size))
        left = pending_all(size) & ~sum(1 << each for each in named)
        return AckedPosition(Position(1, number), tuple(to_words(left)) or (0,), size)

    def take(self) -> None:
        txn = self.rng.choice(self.txns)
        cumulative = not self.kind.individual and self.rng.random() < 0.3
        acks = [self.random_ack() for _ in range(1 if cumulative else self.rng.randint(1, 3))]
        try:
            self.flying.append(self.core.reserve(txn, acks, cumulative=cumulative))
        except (TransactionConflict, InvalidTxnStatus):
            return

    def go_on(self) -> None:
        if not self.flying:
            return
        taken = self.flying.pop(self.rng.randrange(len(self.flying)))
        for ack in taken:
            self.records += 1
            record = AckRecord(ack.txn, "t", "s", 1, self.records, ack.cumulative, ack.acks)
            self.core.putting(ack, record)
        if self.rng.random() < 0.15:
            self.do(self.core.failed(taken))
        else:
            self.core.stored(taken)
            self.do(self.core.confirmed(taken))
        self.clean()

    def end(self) -> None:
        if self.rng.random() < 0.5:
            index = self.rng.randrange(len(self.txns))
            self.decide(self.txns[index])
            self.txns[index] = TxnId(0, max(self.txns).least + 1)

    def decide(self, txn: TxnId) -> None:
        self.do(self.core.decided(txn, self.rng.choice((TxnState.COMMITTED, TxnState.ABORTED))))
        self.clean()

    def do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Hold(acks):
                    self.listener.held(acks)
                case Apply(acks):
                    for ack in acks:
                        for each in ack.acks:
                            self.apply(each, cumulative=ack.cumulative)
                    self.listener.applied(acks)
                case Release(acks):
                    self.released += 1
                    self.listener.released(acks)
                case Refuse(acks):
                    self.listener.refused(acks)

    def apply(self, ack: AckedPosition, *, cumulative: bool) -> None:
        if cumulative:
            self.cursor.acknowledge_up_to(ack.position, ack.ack_set)
        elif ack.ack_set:
            self.cursor.acknowledge_batch(ack.position, ack.ack_set, ack.batch_size)
        else:
            self.cursor.acknowledge(ack.position)

    def clean(self) -> None:
        self.core.durable(self.core.applying)
        for ack in self.core.deletable:
            self.core.deleted(ack)

    def plain(self) -> None:
        if self.consumers and self.rng.random() < 0.7:
            consumer, _ = self.rng.choice(self.consumers)
            ack = self.random_ack()
            self.subscription.acknowledge(consumer, [(ack.position, ack.ack_set, ack.batch_size)])

    def redeliver(self) -> None:
        if self.consumers:
            consumer, _ = self.rng.choice(self.consumers)
            several = [Position(1, self.rng.randrange(len(self.sizes))) for _ in range(3)]
            self.subscription.redeliver(consumer, self.rng.choice((None, several)), None)

    # What is seen

    def pending(self) -> set[Position]:
        every = (Position(1, number) for number in range(len(self.sizes)))
        return {
            each
            for each in every
            if self.core.held.is_pending(each) and not self.cursor.is_acknowledged(each)
        }

    def delivered(self) -> list[tuple[Position, int]]:
        """What consumers got since this was last asked, with the messages of each entry."""
        found = []
        for connection, seen in self.seen.items():
            messages = connection.commands(BaseCommand.MESSAGE)
            self.seen[connection] = len(messages)
            for each in messages[seen:]:
                number = each.message.message_id.entry_id
                size = self.sizes[number]
                words = list(each.message.ack_set)
                bits = from_words(words, size) if words else pending_all(size)
                found.append((Position(1, number), bits))
        return found

    async def finish(self) -> None:
        """All ends; everybody gives everything back: what is not acknowledged comes again."""
        for txn in self.txns:
            self.decide(txn)
        while self.flying:
            self.go_on()
        assert not self.core.held.any
        if not self.consumers:
            await self.join()
        self.topic.now_ms += 100
        await settle()
        self.delivered()
        for consumer, _ in self.consumers:
            consumer.flow(10_000)
        await settle()
        for consumer, _ in self.consumers:
            self.subscription.redeliver(consumer, None, None)
        await settle()
        got = dict(self.delivered())
        for number, size in enumerate(self.sizes):
            position = Position(1, number)
            if not self.cursor.is_acknowledged(position):
                words = self.cursor.ack_set(position)
                left = from_words(words, size) if words else pending_all(size)
                assert got.get(position) == left, position
            else:
                assert position not in got
        if self.kind.individual:
            assert not self.subscription.delayed
            unacked = sum(got[position].bit_count() for position in got)
            assert self.subscription.unacked == unacked


@pytest.mark.parametrize("kind", KINDS, ids=[kind.label for kind in KINDS])
async def test_random_histories_lose_nothing_and_show_nothing_held(kind: SubscriptionType) -> None:
    released = 0
    for seed in range(60):
        history = History(seed, kind)
        try:
            await history.run(60)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        released += history.released
    assert released > 30


async def test_messages_of_a_batch_that_were_left_out_come_when_their_ack_is_refused() -> None:
    """Asked for again while it is written, as a client does that aborts meanwhile."""
    history = History(0, SubscriptionType.EXCLUSIVE)
    history.sizes = [3]
    history.topic.ledger.put(entry_bytes(0, count=3))
    await history.join()
    history.consumers[0][0].flow(10)
    await settle()
    assert history.delivered() == [(Position(1, 0), 0b111)]
    first = AckedPosition(Position(1, 0), (0b110,), 3)
    taken = history.core.reserve(history.txns[0], [first], cumulative=True)
    history.subscription.redeliver(history.consumers[0][0], None, None)
    await settle()
    assert history.delivered() == [(Position(1, 0), 0b110)]
    history.do(history.core.failed(taken))
    await settle()
    assert history.delivered() == [(Position(1, 0), 0b111)]
