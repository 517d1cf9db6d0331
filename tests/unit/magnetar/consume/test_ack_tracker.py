"""The tracker against a model of a broker, in random schedules."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from magnetar.consume.ack_tracker import (
    Acknowledgement,
    AckTracker,
    acknowledgement_of,
    acknowledgement_up_to,
)
from magnetar.consume.message import EntryKey
from magnetar.errors import InvalidArgument
from magnetar.message_id import EntryId
from magnetar.protocol.ack_set import from_words, pending_all, to_words


@dataclass
class BrokerModel:
    """What of each entry is not acknowledged; sizes as in ids: 0 is no batch."""

    sizes: dict[EntryKey, int]
    has_sets: bool
    """Whether it acknowledges single messages of a batch."""
    pending: dict[EntryKey, int] = field(default_factory=dict)
    elsewhere: dict[EntryKey, int] = field(default_factory=dict)
    """What others hold."""

    def __post_init__(self) -> None:
        self.pending = {key: pending_all(max(size, 1)) for key, size in self.sizes.items()}

    def apply(self, ack: Acknowledgement) -> None:
        if not ack.ack_set:
            self.pending[ack.key] = 0
        elif self.has_sets:
            self.pending[ack.key] &= from_words(ack.ack_set, ack.batch_size)

    def apply_up_to(self, ack: Acknowledgement) -> None:
        for key in self.pending:
            if key < ack.key:
                self.pending[key] = 0
        self.apply(ack)

    def offers(self, key: EntryKey) -> int:
        """The bits that MESSAGE says."""
        if not self.has_sets:
            return pending_all(max(self.sizes[key], 1))
        return self.pending[key] & ~self.elsewhere.get(key, 0)


def acknowledge(tracker: AckTracker, message_id: EntryId) -> None:
    tracker.acknowledge(message_id.key, message_id.batch_index, message_id.batch_size)


class Run:
    """An application, the tracker and the broker."""

    def __init__(self, seed: int, *, has_sets: bool) -> None:
        self.rng = Random(seed)
        keys = [(1, entry) for entry in range(6)]
        self.broker = BrokerModel(
            {key: self.rng.choice((0, 0, 1, 3, 70)) for key in keys}, has_sets
        )
        if has_sets:
            for key, size in self.broker.sizes.items():
                if size > 1 and self.rng.random() < 0.3:
                    self.broker.elsewhere[key] = self.rng.getrandbits(size) & ~1
        self.tracker = AckTracker()
        self.out: dict[EntryKey, int] = {}
        self.acked: dict[EntryKey, int] = dict.fromkeys(keys, 0)

    def ids(self) -> Iterator[EntryId]:
        for key, bits in self.out.items():
            for index in range(bits.bit_length()):
                if bits >> index & 1:
                    size = self.broker.sizes[key]
                    yield EntryId(*key, index if size else -1, size)

    def deliver(self) -> None:
        waiting = [key for key in self.broker.pending if self.broker.offers(key)]
        if waiting:
            self.deliver_entry(self.rng.choice(waiting))

    def deliver_entry(self, key: EntryKey) -> None:
        if not self.broker.pending[key]:
            return
        size = self.broker.sizes[key]
        if size:
            mine = self.broker.offers(key)
            given = self.tracker.deliver_batch(key, size, mine, pending_all(size))
            assert not given & ~mine
        else:
            given = int(self.tracker.deliver(key))
        self.out[key] = self.out.get(key, 0) | given

    def ack(self) -> None:
        if ids := list(self.ids()):
            self.ack_id(self.rng.choice(ids))

    def ack_id(self, message_id: EntryId) -> None:
        acknowledge(self.tracker, message_id)
        bit = 1 << max(message_id.batch_index, 0)
        self.acked[message_id.key] |= bit
        self.out[message_id.key] &= ~bit

    def nack(self) -> None:
        if ids := list(self.ids()):
            key = self.rng.choice(ids).key
            self.flush()
            self.tracker.forget([key])
            self.deliver_entry(key)

    def flush(self) -> None:
        up_to, acks = self.tracker.take_group()
        assert up_to is None
        for ack in acks:
            self.broker.apply(ack)
        self.check()

    def reattach(self) -> None:
        self.tracker.start_attachment()

    def check(self) -> None:
        """Nothing is acknowledged but by the application."""
        for key, pending in self.broker.pending.items():
            cleared = pending_all(max(self.broker.sizes[key], 1)) & ~pending
            assert not cleared & ~self.acked[key], key


@pytest.mark.parametrize("has_sets", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_everything_is_acknowledged_and_nothing_else(seed: int, has_sets: bool) -> None:
    run = Run(seed, has_sets=has_sets)
    steps = [run.deliver, run.deliver, run.ack, run.ack, run.ack, run.nack, run.flush, run.reattach]
    for _ in range(run.rng.randrange(80)):
        run.rng.choice(steps)()
    run.reattach()
    for _ in range(3):
        for key in run.broker.pending:
            run.deliver_entry(key)
        for message_id in list(run.ids()):
            run.ack_id(message_id)
        run.flush()
        run.reattach()
    for key, pending in run.broker.pending.items():
        assert pending == run.broker.elsewhere.get(key, 0), key
    run.reattach()
    assert run.tracker.known == 0
    assert run.tracker.waiting == 0


@pytest.mark.parametrize("seed", range(30))
def test_cumulative_ones_cover_what_is_before_them(seed: int) -> None:
    rng = Random(seed)
    sizes = {(1, entry): rng.choice((0, 1, 4)) for entry in range(8)}
    broker = BrokerModel(sizes, has_sets=True)
    tracker = AckTracker()
    order: list[EntryId] = []
    for key, size in sizes.items():
        if size:
            tracker.deliver_batch(key, size, pending_all(size), pending_all(size))
            order += [EntryId(*key, index, size) for index in range(size)]
        else:
            tracker.deliver(key)
            order.append(EntryId(*key))
    highest = -1
    for _ in range(6):
        place = rng.randrange(len(order))
        highest = max(highest, place)
        tracker.acknowledge_up_to(order[place])
        if rng.random() < 0.5:
            up_to, acks = tracker.take_group()
            assert not acks
            if up_to is not None:
                broker.apply_up_to(up_to)
    up_to, _ = tracker.take_group()
    if up_to is not None:
        broker.apply_up_to(up_to)
    for place, message_id in enumerate(order):
        bit = 1 << max(message_id.batch_index, 0)
        assert bool(broker.pending[message_id.key] & bit) == (place > highest)


def test_acked_messages_are_not_handed_out_again() -> None:
    tracker = AckTracker()
    assert tracker.deliver_batch((1, 0), 3, 0b111, 0b111) == 0b111
    tracker.acknowledge((1, 0), 1, 3)
    assert tracker.deliver_batch((1, 0), 3, 0b111, 0b111) == 0b101
    tracker.take_group()
    assert tracker.deliver_batch((1, 0), 3, 0b111, 0b111) == 0b101
    tracker.start_attachment()
    assert tracker.deliver_batch((1, 0), 3, 0b111, 0b111) == 0b111
    assert tracker.deliver((1, 1))
    tracker.acknowledge((1, 1), -1, 0)
    tracker.start_attachment()
    assert not tracker.deliver((1, 1))
    tracker.take_group()
    assert tracker.deliver((1, 1))


def test_unsent_ack_survives_a_reconnect_and_is_sent_with_the_rest() -> None:
    tracker = AckTracker()
    tracker.deliver_batch((1, 0), 3, 0b111, 0b111)
    tracker.acknowledge((1, 0), 1, 3)
    tracker.start_attachment()
    assert tracker.deliver_batch((1, 0), 3, 0b111, 0b111) == 0b101
    tracker.acknowledge((1, 0), 0, 3)
    assert tracker.take_group() == (None, [Acknowledgement((1, 0), [0b100], 3)])


def test_single_ones_that_a_cumulative_one_covers_are_not_sent() -> None:
    tracker = AckTracker()
    for entry in range(4):
        tracker.deliver((1, entry))
    for entry in (0, 1, 3):
        tracker.acknowledge((1, entry), -1, 0)
    tracker.acknowledge_up_to(EntryId(1, 1))
    assert tracker.take_group() == (Acknowledgement((1, 1)), [Acknowledgement((1, 3), [], 0)])


def test_cumulatively_acknowledged_is_not_handed_out_again_on_the_same_attachment() -> None:
    tracker = AckTracker()
    tracker.acknowledge_up_to(EntryId(1, 5, 1, 3))
    tracker.take_group()
    assert not tracker.deliver((1, 4))
    assert tracker.deliver_batch((1, 5), 3, 0b111, 0b111) == 0b100
    assert tracker.deliver((1, 6))
    tracker.start_attachment()
    assert tracker.deliver((1, 4))


def test_compacted_messages_count_as_acknowledged() -> None:
    tracker = AckTracker()
    assert tracker.deliver_batch((1, 0), 3, 0b111, 0b010) == 0b010
    tracker.acknowledge((1, 0), 1, 3)
    assert tracker.take_group() == (None, [Acknowledgement((1, 0), [], 3)])


def test_batch_messages_of_other_consumers_are_not_acked() -> None:
    tracker = AckTracker()
    assert tracker.deliver_batch((1, 0), 3, 0b011, 0b111) == 0b011
    tracker.acknowledge((1, 0), 0, 3)
    tracker.acknowledge((1, 0), 1, 3)
    assert tracker.take_group() == (None, [Acknowledgement((1, 0), [0b100], 3)])


def test_all_entries_of_a_chunked_message_go_together() -> None:
    tracker = AckTracker()
    assert tracker.deliver_chunks(((1, 0), (1, 3)))
    message_id = EntryId(1, 3, first_chunk=(1, 0))
    assert tracker.entries_of(message_id) == ((1, 0), (1, 3))
    acknowledge(tracker, message_id)
    assert [ack.key for ack in tracker.take_group()[1]] == [(1, 0), (1, 3)]
    assert tracker.known == 0


def test_chunks_stay_acknowledgeable_over_one_new_attachment() -> None:
    tracker = AckTracker()
    message_id = EntryId(1, 3, first_chunk=(1, 0))
    tracker.deliver_chunks(((1, 0), (1, 3)))
    tracker.start_attachment()
    assert tracker.entries_of(message_id) == ((1, 0), (1, 3))
    tracker.start_attachment()
    assert tracker.known == 0
    acknowledge(tracker, message_id)
    assert [ack.key for ack in tracker.take_group()[1]] == [(1, 3)]


def test_in_a_transaction_only_that_message_is_acknowledged() -> None:
    tracker = AckTracker()
    tracker.deliver_batch((1, 0), 3, 0b111, 0b111)
    assert tracker.hold(EntryId(1, 0, 1, 3)) == [Acknowledgement((1, 0), [0b101], 3)]
    tracker.acknowledge((1, 0), 0, 3)
    tracker.acknowledge((1, 0), 2, 3)
    assert tracker.take_group() == (None, [Acknowledgement((1, 0), [0b010], 3)])
    assert tracker.known == 0


def test_single_acknowledgements_as_they_are_sent() -> None:
    assert acknowledgement_of(EntryId(1, 0)) == Acknowledgement((1, 0))
    assert acknowledgement_of(EntryId(1, 0, 0, 1)) == Acknowledgement((1, 0))
    assert acknowledgement_of(EntryId(1, 0, 65, 70)).ack_set == to_words(
        pending_all(70) & ~(1 << 65)
    )
    assert acknowledgement_up_to(EntryId(1, 0, 2, 3)) == Acknowledgement((1, 0))
    assert acknowledgement_up_to(EntryId(1, 0, 0, 3)) == Acknowledgement((1, 0), [0b110], 3)


def test_messages_a_transaction_held_of_a_batch_come_after_a_full_redelivery() -> None:
    tracker = AckTracker()
    tracker.commit_up_to(EntryId(1, 1, 0, 4))
    assert tracker.deliver_batch((1, 1), 4, 0b1000, 0b1111) == 0b1000
    tracker.forget_all()
    assert tracker.deliver_batch((1, 1), 4, 0b1110, 0b1111) == 0b1110
    tracker.forget_all()
    assert tracker.deliver_batch((1, 1), 4, 0b1111, 0b1111) == 0b1110
    assert tracker.take_group() == (None, [])


@pytest.mark.parametrize("size", [0, 2])
def test_an_id_without_the_size_of_its_batch_gets_it_or_is_refused(size: int) -> None:
    """Or its batch would be acknowledged whole, with what was not handed out."""
    tracker = AckTracker()
    lacking = EntryId(1, 1, 2, size)
    with pytest.raises(InvalidArgument, match="not known"):
        tracker.sized(lacking)
    tracker.deliver_batch((1, 1), 4, 0b1111, 0b1111)
    assert tracker.sized(lacking) == EntryId(1, 1, 2, 4)
    with pytest.raises(InvalidArgument):
        tracker.sized(EntryId(1, 1, 4, 0))
    for whole in (EntryId(1, 1), EntryId(2, 2, 0, 1), EntryId(2, 2, 1, 2)):
        assert tracker.sized(whole) == whole


class TestWhatIsShared:
    """Nothing is handed out twice, and nothing is lost."""

    def test_a_part_of_a_batch_that_an_abort_gave_back_comes_beside_what_is_in_hand(self) -> None:
        tracker = AckTracker(shared=True)
        tracker.deliver_batch((1, 0), 4, 0b1111, 0b1111)
        for index in (0, 1):
            held(tracker, EntryId(1, 0, index, 4))
        assert tracker.deliver_batch((1, 0), 4, 0b0001, 0b1111) == 0b0001
        assert tracker.deliver_batch((1, 0), 4, 0b0010, 0b1111) == 0b0010
        for index in range(4):
            tracker.acknowledge((1, 0), index, 4)
        assert tracker.take_group() == (None, [Acknowledgement((1, 0), [], 4)])
        assert tracker.known == 0

    def test_a_broker_that_sends_a_whole_batch_again_gives_only_what_an_abort_gave_back(
        self,
    ) -> None:
        tracker = AckTracker(shared=True)
        tracker.deliver_batch((1, 0), 4, 0b1111, 0b1111)
        tracker.acknowledge((1, 0), 3, 4)
        held(tracker, EntryId(1, 0, 0, 4))
        assert tracker.deliver_batch((1, 0), 4, 0b1111, 0b1111) == 0b0001

    def test_message_with_a_pending_transactional_ack_is_not_handed_out(self) -> None:
        tracker = AckTracker(shared=True)
        batched, single = EntryId(1, 0, 0, 2), EntryId(1, 1)
        tracker.deliver_batch((1, 0), 2, 0b11, 0b11)
        tracker.deliver((1, 1))
        tracker.hold(batched)
        tracker.hold(single)
        tracker.forget([(1, 0), (1, 1)])
        assert tracker.deliver_batch((1, 0), 2, 0b11, 0b11) == 0b10
        assert not tracker.deliver((1, 1))
        assert tracker.settle(batched)
        assert tracker.settle(single)
        assert tracker.deliver_batch((1, 0), 2, 0b01, 0b11) == 0b01
        assert tracker.deliver((1, 1))
        assert not tracker.settle(batched), "nothing came meanwhile"

    def test_delivered_messages_are_not_handed_out_again_after_a_reconnect(self) -> None:
        tracker = AckTracker(shared=True)
        tracker.deliver_batch((1, 0), 3, 0b111, 0b111)
        tracker.deliver((1, 1))
        tracker.deliver((1, 2))
        tracker.deliver_chunks(((1, 3), (1, 4)))
        held(tracker, EntryId(1, 0, 0, 3))
        tracker.give_back([((1, 0), 0b010), ((1, 2), -1)])
        tracker.start_attachment()
        assert tracker.deliver_batch((1, 0), 3, 0b111, 0b111) == 0b011
        assert not tracker.deliver((1, 1))
        assert tracker.deliver((1, 2))
        assert not tracker.deliver_chunks(((1, 3), (1, 4)))
        for message_id in (EntryId(1, 1), EntryId(1, 2), EntryId(1, 4, first_chunk=(1, 3))):
            acknowledge(tracker, message_id)
        for index in range(3):
            acknowledge(tracker, EntryId(1, 0, index, 3))
        acks = [*((1, entry) for entry in (1, 2, 3, 4)), (1, 0)]
        assert [(ack.key, ack.ack_set) for ack in tracker.take_group()[1]] == [
            (key, []) for key in acks
        ]
        assert tracker.known == 0

    def test_message_with_a_failed_transactional_ack_counts_as_delivered_again(self) -> None:
        tracker = AckTracker(shared=True)
        tracker.deliver_batch((1, 0), 2, 0b01, 0b11)
        tracker.deliver((1, 1))
        for message_id in (EntryId(1, 0, 0, 2), EntryId(1, 1)):
            assert tracker.is_in_hand(message_id)
            held = tracker.hold(message_id)
            tracker.settle(message_id)
            assert not tracker.is_in_hand(message_id)
            tracker.release(message_id, held)
            assert tracker.is_in_hand(message_id)
            acknowledge(tracker, message_id)
            assert not tracker.is_in_hand(message_id)
        acks = [Acknowledgement((1, 0), [0b10], 2), Acknowledgement((1, 1), [], 0)]
        assert tracker.take_group()[1] == acks
        assert tracker.known == 0

    def test_delivered_messages_are_known_over_several_attachments(self) -> None:
        """Nothing, or only a part, came again in between."""
        tracker = AckTracker(shared=True)
        tracker.deliver((1, 0))
        tracker.deliver_batch((1, 1), 3, 0b111, 0b111)
        tracker.deliver_chunks(((1, 2), (1, 3)))
        tracker.deliver((1, 4))
        tracker.start_attachment()
        assert not tracker.deliver((1, 4))
        tracker.give_back([((1, 1), 0b010)])
        tracker.start_attachment()
        for key in ((1, 0), (1, 4)):
            assert not tracker.deliver(key)
        assert tracker.deliver_batch((1, 1), 3, 0b111, 0b111) == 0b010
        assert not tracker.deliver_chunks(((1, 2), (1, 3)))
        for message_id in (EntryId(1, 0), EntryId(1, 3, first_chunk=(1, 2)), EntryId(1, 4)):
            acknowledge(tracker, message_id)
        for index in range(3):
            acknowledge(tracker, EntryId(1, 1, index, 3))
        assert sorted(ack.key for ack in tracker.take_group()[1]) == [
            (1, entry) for entry in range(5)
        ]
        assert tracker.known == 0

    def test_of_too_much_only_what_the_last_attachment_brought_is_known_on_the_next(
        self,
    ) -> None:
        """Else who never says anything of what he has would have it known for ever."""
        tracker = AckTracker(shared=True, max_known=3)
        tracker.deliver((1, 0))
        tracker.deliver_batch((1, 1), 2, 0b11, 0b11)
        tracker.start_attachment()
        tracker.deliver((1, 2))
        tracker.deliver_chunks(((1, 3), (1, 4)))
        tracker.start_attachment()
        assert tracker.deliver((1, 0))
        assert tracker.deliver_batch((1, 1), 2, 0b11, 0b11) == 0b11
        assert not tracker.deliver((1, 2))
        assert not tracker.deliver_chunks(((1, 3), (1, 4)))


def test_new_messages_of_a_redelivered_batch_are_handed_out() -> None:
    tracker = AckTracker()
    assert tracker.deliver_batch((1, 0), 3, 0b100, 0b111) == 0b100
    assert tracker.deliver_batch((1, 0), 3, 0b111, 0b111) == 0b111


def held(tracker: AckTracker, message_id: EntryId) -> None:
    """It is acknowledged in a transaction, and that is answered."""
    tracker.hold(message_id)
    assert not tracker.settle(message_id)
