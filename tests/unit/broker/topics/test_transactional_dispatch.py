"""Dispatch while transactions hold messages: nothing is lost, nothing that is held is shown.

Nobody who shares gets a message that he or another one has.  Some messages have a delivery time,
and nobody who shares gets them before.
"""

import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from broker.topics.consumer import Consumer, SubscriptionType
from broker.topics.transactional_acks import TransactionalAcks
from config.bounds import TXN_SLICE_POSITIONS
from magnetar.protocol.ack_set import from_words, pending_all, to_words
from magnetar.protocol.ids import Position
from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.txn_id import TxnId
from tests.support.bounds import set_bound
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, attach, entry_bytes, settle
from txn.errors import InvalidTxnStatus, TransactionConflict
from txn.pending_ack import PendingAck, bits_of
from txn.pending_acks_core import Apply, Effect, Hold, PendingAcksCore, Refuse, Release
from txn.records import AckedPosition, AckRecord, TxnState

KINDS = list(SubscriptionType)
SHARING = [kind for kind in KINDS if kind.individual]
singly = pytest.mark.parametrize("kind", SHARING, ids=[kind.label for kind in SHARING])


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
        self.hands: dict[FakeConnection, dict[Position, int]] = {}
        """Which messages of which entries consumers have, and did not give back."""
        self.flying: list[list[PendingAck]] = []
        self.txns = [TxnId(0, least) for least in range(3)]
        self.records = 0
        self.released = 0
        self.sliced = 0
        self.names = 0

    async def run(self, steps: int) -> None:
        self.append()
        await self.join()
        moves: tuple[Callable[[], Awaitable[object] | None], ...] = (
            self.append,
            self.take,
            self.take,
            self.take,
            self.go_on,
            self.go_on,
            self.go_on,
            self.end,
            self.plain,
            self.redeliver,
            self.nack,
            self.come_or_go,
        )
        between_slices: tuple[Callable[[], Awaitable[object] | None], ...] = (
            self.take,
            self.go_on,
            self.end,
            self.redeliver,
            self.nack,
            self.come_or_go,
            self.go_on_ending,
            self.go_on_ending,
        )
        for _ in range(steps):
            before = self.pending()
            again = self.rng.choice(between_slices if self.core.ending else moves)()
            if again is not None:
                await again
            await settle(6)
            held_all_along = before & self.pending()
            delivered = self.delivered()
            shown = {position for position, _, _ in delivered}
            assert not shown & held_all_along
            if self.kind.individual:
                self.take_in_hand(delivered)
                early = [each for each in shown if self.due_ms[each.entry_id] > self.topic.now_ms]
                assert not early
            self.topic.now_ms += self.rng.randint(0, 5)
            self.subscription.wake()
        await self.finish()

    # Moves

    def append(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            size = self.rng.choice((1, 1, 3, 3))
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
        self.seen[made[1]], self.hands[made[1]] = 0, {}

    def come_or_go(self) -> Awaitable[object] | None:
        self.flow()
        if self.rng.random() < 0.6:
            return None
        most = 1 if self.kind is SubscriptionType.EXCLUSIVE else 3
        if self.consumers and (len(self.consumers) == most or self.rng.random() < 0.5):
            consumer, connection = self.consumers.pop(self.rng.randrange(len(self.consumers)))
            consumer.close()
            self.hands[connection].clear()
            return None
        return self.join()

    def flow(self) -> None:
        for consumer, _ in self.consumers:
            consumer.flow(self.rng.randint(0, 20))

    def random_ack(self) -> AckedPosition:
        number = self.rng.randrange(max(len(self.sizes) - 5, 0), len(self.sizes))
        size = self.sizes[number]
        if size == 1 or self.rng.random() < 0.2:
            return AckedPosition(Position(1, number))
        named = self.rng.sample(range(size), self.rng.randint(1, size))
        left = pending_all(size) & ~sum(1 << each for each in named)
        return AckedPosition(Position(1, number), tuple(to_words(left)) or (0,), size)

    def take(self) -> None:
        txn = self.rng.choice(self.txns)
        cumulative = not self.kind.individual and self.rng.random() < 0.3
        acks = [self.random_ack() for _ in range(1 if cumulative else self.rng.randint(1, 6))]
        self.end_all()
        for each in acks:
            with suppress(TransactionConflict, InvalidTxnStatus):
                self.flying.append(self.core.reserve(txn, [each], cumulative=cumulative))

    def go_on(self) -> None:
        for _ in range(min(self.rng.randint(1, 4), len(self.flying))):
            self.go_on_with_one()

    def go_on_with_one(self) -> None:
        taken = self.flying.pop(self.rng.randrange(len(self.flying)))
        self.put(taken)
        if self.rng.random() < 0.15:
            self.do(self.core.failed(taken))
        else:
            self.core.stored(taken)
            self.do(self.core.confirmed(taken))
            self.do(self.core.end_late(taken))
        self.clean()

    def put(self, taken: list[PendingAck]) -> None:
        for ack in taken:
            self.records += 1
            record = AckRecord(ack.txn, "t", "s", 1, self.records, ack.cumulative, ack.acks)
            self.core.putting(ack, record)

    def end(self) -> None:
        if self.rng.random() < 0.5:
            index = self.rng.randrange(len(self.txns))
            self.decide(self.txns[index])
            self.txns[index] = TxnId(0, max(self.txns).least + 1)

    def decide(self, txn: TxnId) -> None:
        outcomes = (TxnState.COMMITTED, TxnState.ABORTED, TxnState.ABORTED)
        self.do(self.core.decided(txn, self.rng.choice(outcomes)))
        self.clean()

    def go_on_ending(self) -> None:
        """A slice of what has ended."""
        self.sliced += self.core.ending
        self.do(self.core.end_some())
        self.clean()

    def end_all(self) -> None:
        while self.core.ending:
            self.go_on_ending()

    def do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Hold(acks) | Apply(acks) | Release(acks):
                    for ack in acks:
                        self.out_of_hand(ack.acks)
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
            self.out_of_hand([ack])

    def redeliver(self) -> None:
        if self.consumers:
            consumer, connection = self.rng.choice(self.consumers)
            several = [Position(1, self.rng.randrange(len(self.sizes))) for _ in range(3)]
            some = {each: self.rng.choice((-1, 0b001, 0b110)) for each in several}
            wanted = self.rng.choice((None, some))
            self.subscription.redeliver(consumer, wanted, None)
            hand = self.hands[connection]
            for each, bits in (dict.fromkeys(hand, -1) if wanted is None else wanted).items():
                hand[each] = hand.get(each, 0) & ~bits

    def nack(self) -> None:
        """One message that a consumer has."""
        if not self.consumers:
            return
        consumer, connection = self.rng.choice(self.consumers)
        had = [(position, bits) for position, bits in self.hands[connection].items() if bits]
        for position, bits in self.rng.sample(had, min(len(had), 3)):
            bit = bits & -bits
            self.subscription.redeliver(consumer, {position: bit}, None)
            self.hands[connection][position] ^= bit

    # What is seen

    def pending(self) -> set[Position]:
        every = (Position(1, number) for number in range(len(self.sizes)))
        return {
            each
            for each in every
            if self.core.held.is_pending(each) and not self.cursor.is_acknowledged(each)
        }

    def take_in_hand(self, delivered: list[tuple[Position, int, FakeConnection]]) -> None:
        for position, bits, connection in delivered:
            for hand in self.hands.values():
                assert not hand.get(position, 0) & bits, f"{position} is in a consumer's hands"
            mine = self.hands[connection]
            mine[position] = mine.get(position, 0) | bits

    def out_of_hand(self, acks: Iterable[AckedPosition]) -> None:
        for ack in acks:
            for hand in self.hands.values():
                hand[ack.position] = hand.get(ack.position, 0) & ~bits_of(ack)

    def delivered(self) -> list[tuple[Position, int, FakeConnection]]:
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
                found.append((Position(1, number), bits, connection))
        return found

    def shown(self) -> list[tuple[Position, int]]:
        return [(position, bits) for position, bits, _ in self.delivered()]

    async def finish(self) -> None:
        """All ends; everybody gives everything back: what is not acknowledged comes again."""
        for txn in self.txns:
            self.decide(txn)
        self.end_all()
        while self.flying:
            self.go_on()
        assert not self.core.held.any
        if not self.consumers:
            await self.join()
        self.topic.now_ms += 100
        await settle(400)
        for consumer, _ in self.consumers:
            consumer.flow(10_000)
        await settle(400)
        self.delivered()
        for consumer, _ in self.consumers:
            self.subscription.redeliver(consumer, None, None)
        await settle(400)
        got: dict[Position, int] = {}
        for position, bits, _ in self.delivered():
            assert not got.get(position, 0) & bits, position
            got[position] = got.get(position, 0) | bits
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


@pytest.mark.parametrize("slice_positions", [TXN_SLICE_POSITIONS, 1], ids=["whole", "sliced"])
@pytest.mark.parametrize("kind", KINDS, ids=[kind.label for kind in KINDS])
async def test_random_histories_lose_nothing_and_show_nothing_held(
    kind: SubscriptionType, slice_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers ask for redelivery, come and go between the slices of ends too.

    With slices of one, other events come between the entries of a consumer that come back, too.
    """
    if slice_positions == 1:
        set_bound(monkeypatch, "RETURNED_AT_ONCE", 1)
    set_bound(
        monkeypatch, "TXN_SLICE_POSITIONS", slice_positions, in_module="txn.pending_acks_core"
    )
    set_bound(
        monkeypatch,
        "TXN_SLICE_POSITIONS",
        slice_positions,
        in_module="broker.topics.transactional_acks",
    )
    released = sliced = 0
    for seed in range(60):
        history = History(seed, kind)
        try:
            await history.run(60)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        released += history.released
        sliced += history.sliced
    assert released > 30
    assert (sliced > 30) == (slice_positions == 1)


async def test_messages_of_a_batch_that_were_left_out_come_when_their_ack_is_refused() -> None:
    """Asked for again while it is written, as a client does that aborts meanwhile."""
    history = History(0, SubscriptionType.EXCLUSIVE)
    history.sizes = [3]
    history.topic.ledger.put(entry_bytes(0, count=3))
    await history.join()
    history.consumers[0][0].flow(10)
    await settle()
    assert history.shown() == [(Position(1, 0), 0b111)]
    first = AckedPosition(Position(1, 0), (0b110,), 3)
    taken = history.core.reserve(history.txns[0], [first], cumulative=True)
    history.subscription.redeliver(history.consumers[0][0], None, None)
    await settle()
    assert history.shown() == [(Position(1, 0), 0b110)]
    history.do(history.core.failed(taken))
    await settle()
    assert history.shown() == [(Position(1, 0), 0b111)]


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends are carried out by single records."""
    set_bound(monkeypatch, "TXN_SLICE_POSITIONS", 1, in_module="txn.pending_acks_core")
    set_bound(monkeypatch, "TXN_SLICE_POSITIONS", 1, in_module="broker.topics.transactional_acks")


async def holding(kind: SubscriptionType) -> History:
    """A consumer has a batch of 3, and an entry behind; it acknowledged the first and the last."""
    history = History(0, kind)
    history.sizes = [3, 1]
    history.topic.ledger.put(entry_bytes(0, "k", count=3), entry_bytes(1, "k"))
    await history.join()
    history.consumers[0][0].flow(1_000)
    await settle()
    for ack in (AckedPosition(Position(1, 0), (0b110,), 3), AckedPosition(Position(1, 1))):
        taken = history.core.reserve(history.txns[0], [ack], cumulative=False)
        history.put(taken)
        history.core.stored(taken)
        history.do(history.core.confirmed(taken))
    await settle()
    assert history.shown() == [(Position(1, 0), 0b111), (Position(1, 1), 0b1)]
    return history


@pytest.mark.usefixtures("sliced")
@singly
@pytest.mark.parametrize("again", ["nacks", "asks for all", "leaves"])
async def test_redelivery_between_abort_slices_delivers_each_message_once(
    kind: SubscriptionType, again: str
) -> None:
    history = await holding(kind)
    history.do(history.core.decided(history.txns[0], TxnState.ABORTED))
    history.do(history.core.end_some())
    consumer, _ = history.consumers[0]
    if again == "leaves":
        await history.join()
        history.consumers[1][0].flow(1_000)
        consumer.close()
    else:
        wanted = {Position(1, 0): 0b010} if again == "nacks" else None
        history.subscription.redeliver(consumer, wanted, None)
    await settle()
    shown = history.shown()
    history.do(history.core.end_some())
    await settle()
    shown += history.shown()
    given = 0b011 if again == "nacks" else 0b111
    assert sum(bits for position, bits in shown if position == Position(1, 0)) == given
    assert [bits for position, bits in shown if position == Position(1, 1)] == [0b1]
    assert history.subscription.unacked == 4
