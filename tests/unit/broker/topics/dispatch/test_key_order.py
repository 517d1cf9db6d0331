"""Key order: a random subscription against the three promises (one holder, in order, all sent)."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.topics.dispatch.key_order import KeyOrder
from broker.topics.dispatch.redelivery import RedeliveryCounts, ReplayQueue
from broker.topics.dispatch.selection import AutoSplit, StickyRanges
from magnetar.protocol.ids import Position


@dataclass(eq=False)
class Candidate:
    name: str
    priority_level: int = 0
    pending: dict[Position, int] = field(default_factory=dict)


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


class Model:
    """A dispatcher reduced to its bookkeeping; everything it sends is checked."""

    def __init__(self) -> None:
        self.order: KeyOrder[Candidate] = KeyOrder(AutoSplit())
        self.consumers: list[Candidate] = []
        self.next_entry = 0
        self.made = 0
        self.acked: set[int] = set()
        self.sent_first: dict[int, list[int]] = {}

    def join(self) -> None:
        self.made += 1
        consumer = Candidate(f"c{self.made}")
        self.order.assignment.add(consumer, ())
        self.consumers.append(consumer)
        self.order.assignment_changed()

    def leave(self, consumer: Candidate) -> None:
        self.consumers.remove(consumer)
        self.order.assignment.remove(consumer)
        pending = list(consumer.pending.items())
        consumer.pending.clear()
        self.order.consumer_left(consumer)
        for position, key_hash in pending:
            self.order.park(position, key_hash)

    def send(self, consumer: Candidate, position: Position, key_hash: int) -> None:
        holders = [each for each in self.consumers if key_hash in each.pending.values()]
        assert holders in ([], [consumer]), "a hash is with two consumers"
        self.order.sent(key_hash, consumer)
        consumer.pending[position] = key_hash
        history = self.sent_first.setdefault(key_hash, [])
        if position.entry_id not in history:
            assert not history or history[-1] < position.entry_id, "a key went out of order"
            history.append(position.entry_id)

    def read(self, key_hash: int, roomy: bool) -> None:
        position = at(self.next_entry)
        self.next_entry += 1
        consumer = self.order.receiver(key_hash)
        if consumer is None or not roomy:
            self.order.park(position, key_hash)
        else:
            self.send(consumer, position, key_hash)

    def drain(self, consumer: Candidate, limit: int) -> int:
        done = 0
        while done < limit and (position := self.order.first_waiting(consumer)) is not None:
            key_hash = self.order.unpark(position)
            assert key_hash is not None
            self.send(consumer, position, key_hash)
            done += 1
        return done

    def ack(self, consumer: Candidate, position: Position) -> None:
        key_hash = consumer.pending.pop(position)
        self.acked.add(position.entry_id)
        self.order.settled(key_hash, consumer)

    def nack(self, consumer: Candidate, position: Position) -> None:
        key_hash = consumer.pending.pop(position)
        self.order.park(position, key_hash)
        self.order.settled(key_hash, consumer)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_holder_in_order_and_nothing_left(data: st.DataObject) -> None:
    model = Model()
    model.join()
    for _ in range(data.draw(st.integers(1, 60))):
        act = data.draw(
            st.sampled_from(["read", "read", "drain", "ack", "nack", "join", "leave", "queue"])
        )
        busy = [each for each in model.consumers if each.pending]
        if act == "read":
            model.read(
                data.draw(st.sampled_from([1, 9000, 30000, 60000])), data.draw(st.booleans())
            )
        elif act == "join" and len(model.consumers) < 5:
            model.join()
        elif act == "queue":
            model.order.queue_waiting(data.draw(st.integers(1, 10)))
        elif act == "leave" and model.consumers:
            model.leave(data.draw(st.sampled_from(model.consumers)))
        elif act == "drain" and model.consumers:
            model.drain(data.draw(st.sampled_from(model.consumers)), data.draw(st.integers(1, 3)))
        elif act in ("ack", "nack") and busy:
            consumer = data.draw(st.sampled_from(busy))
            position = data.draw(st.sampled_from(sorted(consumer.pending)))
            (model.ack if act == "ack" else model.nack)(consumer, position)
    if not model.consumers:
        model.join()
    moved = True
    while moved:
        moved = False
        model.order.queue_waiting(model.order.waiting + 1)
        for consumer in model.consumers:
            moved = bool(model.drain(consumer, 100)) or moved
            for position in sorted(consumer.pending):
                model.ack(consumer, position)
                moved = True
    assert model.acked == set(range(model.next_entry))
    assert model.order.waiting == 0


def test_a_moved_hash_drains_before_its_new_owner_gets_it() -> None:
    order: KeyOrder[Candidate] = KeyOrder(StickyRanges())
    old, new = Candidate("old"), Candidate("new")
    order.assignment.add(old, [(0, 65535)])
    order.sent(7, old)
    order.assignment.remove(old)
    order.assignment.add(new, [(0, 65535)])
    order.assignment_changed()
    assert order.receiver(7) is None
    order.park(at(1), 7)
    assert not order.has_waiting(new)
    assert order.settled(7, old)
    assert order.first_waiting(new) == at(1)


def test_out_of_order_may_be_allowed() -> None:
    order: KeyOrder[Candidate] = KeyOrder(StickyRanges(), allow_out_of_order=True)
    old, new = Candidate("old"), Candidate("new")
    order.assignment.add(old, [(0, 65535)])
    order.sent(7, old)
    order.assignment.remove(old)
    order.assignment.add(new, [(0, 65535)])
    order.assignment_changed()
    assert order.receiver(7) is new


def test_message_of_an_unassigned_hash_waits_for_a_consumer() -> None:
    order: KeyOrder[Candidate] = KeyOrder(StickyRanges())
    half, other = Candidate("half"), Candidate("other")
    order.assignment.add(half, [(0, 100)])
    assert order.receiver(200) is None
    order.park(at(0), 200)
    assert not order.has_waiting(half)
    order.assignment.add(other, [(101, 65535)])
    order.assignment_changed()
    assert order.queue_waiting(10)
    assert order.first_waiting(other) == at(0)


def test_chunk_waits_for_the_consumer_that_has_those_before_it() -> None:
    order: KeyOrder[Candidate] = KeyOrder(StickyRanges())
    old, new = Candidate("old"), Candidate("new")
    order.assignment.add(old, [(0, 65535)])
    order.sent(7, old)
    order.assignment.remove(old)
    order.assignment.add(new, [(0, 65535)])
    order.assignment_changed()
    assert order.may_have_rest(7, old)
    assert not order.may_have_rest(7, new)
    order.bind(at(1), 7, old)
    order.park(at(2), 7)
    order.assignment_changed()
    assert order.queue_waiting(10)
    assert (order.first_waiting(old), order.first_waiting(new)) == (at(1), None)
    assert order.has_bound(old)
    assert order.unpark(at(1)) == 7
    assert not order.has_bound(old)
    order.bind(at(3), 7, old)
    order.consumer_left(old)
    assert order.queue_waiting(10)
    assert [order.unpark(at(2)), order.first_waiting(new)] == [7, at(3)]


def test_nothing_that_waits_is_sent_before_all_of_it_is_queued_for_new_owners() -> None:
    order: KeyOrder[Candidate] = KeyOrder(StickyRanges())
    owner = Candidate("owner")
    for entry_id in (2, 0, 1):
        order.park(at(entry_id), 7)
    order.assignment.add(owner, [(0, 65535)])
    order.assignment_changed()
    assert not order.queue_waiting(2)
    assert order.first_waiting(owner) is None
    assert not order.has_waiting(owner)
    assert order.unpark(at(0)) == 7
    order.park(at(3), 7)
    assert order.queue_waiting(2)
    assert [order.unpark(at(1)), order.first_waiting(owner)] == [7, at(2)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 9))))
def test_the_replay_queue_is_an_ordered_set(steps: list[tuple[str, int]]) -> None:
    queue, model = ReplayQueue(), set[Position]()
    for act, entry_id in steps:
        position = at(entry_id)
        if act == "add":
            queue.add(position)
            model.add(position)
        elif act == "discard":
            queue.discard(position)
            model.discard(position)
        else:
            expected = min(model, default=None)
            assert queue.first() == expected
            assert queue.pop() == expected
            model.discard(expected or at(-1))
        assert len(queue) == len(model)
        assert (position in queue) == (position in model)


def test_counts_are_kept_until_acknowledged() -> None:
    counts = RedeliveryCounts()
    counts.raise_for(at(1))
    counts.raise_for(at(1))
    assert (counts[at(1)], counts[at(2)], len(counts)) == (2, 0, 1)
    counts.forget(at(1))
    assert (counts[at(1)], len(counts)) == (0, 0)
