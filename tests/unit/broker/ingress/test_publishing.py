"""The publish path over a ledger that does what the test says."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.deduplication import ProducerSequence
from broker.producer import Producer, ProducerRequest, ProducerState
from broker.publish_errors import MessageRefused
from broker.publish_limits import PublishLimits
from broker.publishing import Publishing
from config.bounds import MAX_MESSAGE_SIZE, TXN_HELD_SENDS
from protocol import pulsar_pb2 as pb
from protocol.frames import Frame, FrameDecoder, Send
from protocol.ids import Position
from protocol.message import build_entry
from protocol.server_error import MagnetarError
from storage.ledger.store import DiskFull
from storage.managed_ledger_types import (
    AppendOutcomeUnknown,
    ManagedLedgerBusy,
    ManagedLedgerTerminated,
)
from storage.managed_ledger_writer import GroupCallback
from storage.metadata.store import MetadataError
from txn.errors import TransactionEnded
from txn.txn_id import TxnId

ENTRY = b"\x0e\x01" + bytes(30)


class Ledger:
    """Holds appends until the test decides them, in order; takes `room` of them before `refusal`.

    `bite` is how many it takes of those that it is given at once.
    """

    def __init__(self) -> None:
        self.waiting: deque[GroupCallback] = deque()
        self.refusal: MagnetarError | None = None
        self.room = 0
        self.bite = 10**9
        self.stored = 0

    def append_all(self, entries: Sequence[bytes], done: GroupCallback) -> int:
        takes = min(len(entries), self.bite)
        if self.refusal is not None:
            if not self.room:
                raise self.refusal
            takes = min(takes, self.room)
            self.room -= takes
        self.waiting.extend([done] * takes)
        return takes

    def succeed(self, count: int = 1) -> None:
        """The next ones became durable together."""
        done = [self.waiting.popleft() for _ in range(count)]
        positions = [Position(1, self.stored + index) for index in range(count)]
        self.stored += count
        done[0](positions, None)

    def fail_all(self, error: MagnetarError) -> None:
        for done in list(self.waiting):
            self.waiting.popleft()
            done((), error)


class Buffer:
    """Admits transactions in `joined` at once; others wait until the test answers."""

    def __init__(self) -> None:
        self.joined: set[TxnId] = set()
        self.waiting: deque[tuple[TxnId, Callable[[MagnetarError | None], None]]] = deque()
        self.events: list[tuple[str, TxnId]] = []

    def admit(self, txn: TxnId, then: Callable[[MagnetarError | None], None]) -> bool:
        if txn in self.joined:
            return True
        self.waiting.append((txn, then))
        return False

    def answer(self, error: MagnetarError | None = None) -> None:
        """What waits longest is joined, or refused."""
        txn, then = self.waiting.popleft()
        if error is None:
            self.joined.add(txn)
        then(error)

    def issued(self, txn: TxnId) -> None:
        self.events.append(("issued", txn))

    def not_taken(self, txn: TxnId) -> None:
        self.events.append(("not taken", txn))

    def appended(self, txn: TxnId, position: Position | None, error: MagnetarError | None) -> None:
        self.events.append(("appended" if position is not None else "failed", txn))


class Peer:
    """A connection that remembers what it was told."""

    def __init__(self) -> None:
        self.producers: dict[int, object] = {}
        self.closed_producers: dict[int, None] = {}
        self.inflight_bytes = 0
        self.paused: set[str] = set()
        self.buffers = 0
        self.remote = "127.0.0.1:1"
        self.answers: list[tuple[str, int]] = []
        self._decoder = FrameDecoder(10**6)

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def put(self, buffer: bytes) -> None:
        self.buffers += 1
        for frame in self._decoder.feed(buffer):
            self.answers.append(("receipt", frame.command.send_receipt.sequence_id))

    def send_encoded(self, buffer: bytes) -> None:
        self.put(buffer)

    def send(self, command: pb.BaseCommand) -> None:
        if command.HasField("send_error"):
            name = pb.ServerError.Name(command.send_error.error)
            self.answers.append((name, command.send_error.sequence_id))

    def pause_reading(self, why: str) -> None:
        self.paused.add(why)

    def resume_reading(self, why: str) -> None:
        self.paused.discard(why)


class Bench:
    """One topic's publish path with producers on peers."""

    def __init__(self, connection_bytes: int = 10**9) -> None:
        self.ledger = Ledger()
        self.limits = PublishLimits(connection_bytes=connection_bytes, total_bytes=10**9)
        self.store = SimpleNamespace(durable=None, unsaved_entries=0, unsaved_bytes=0)
        self.lost: list[MagnetarError] = []
        self.buffer = Buffer()
        self.gone: list[Producer] = []
        self.publishing = Publishing(
            self.ledger,  # type: ignore[arg-type]
            self.limits,
            self.store,  # type: ignore[arg-type]
            self.buffer,  # type: ignore[arg-type]
            self.lost.append,
        )

    def producer_gone(self, producer: Producer) -> None:
        self.gone.append(producer)

    def producer(self, *, enforce: bool = False) -> tuple[Peer, Producer]:
        peer = Peer()
        request = ProducerRequest(connection=peer, producer_id=1)  # type: ignore[arg-type]
        producer = Producer(self, "p", request, 0)  # type: ignore[arg-type]
        producer.track(ProducerSequence(), enforce=enforce, resends=False)
        producer.move(ProducerState.OPEN)
        peer.producers[1] = producer
        return peer, producer

    def send_in(self, producer: Producer, number: int, txn: TxnId) -> None:
        """A SEND in a transaction."""
        send = Send(1, number, 0, 1, ENTRY, plain=False, txnid=(txn.most, txn.least))
        self.publishing.publish(producer, [send], 0)

    def send(
        self, producer: Producer, number: int, *, count: int = 1, entry: bytes = ENTRY
    ) -> None:
        """What the SEND handler does with `count` of them that came together.

        Nothing, for a producer that has lost its id.
        """
        sends = [sent(number + index, entry) for index in range(count)]
        at = 0
        while at < count and cast("Peer", producer.connection).producers.get(1) is producer:
            at = self.publishing.publish(producer, sends, at)


def sent(number: int, entry: bytes | None = ENTRY, *, messages: int = 1) -> Send:
    return Send(1, number, 0, messages, entry, plain=entry is not None)


def test_refusals_wait_for_their_turn() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send(producer, 0)
    bench.publishing.refuse(producer, sent(1), MessageRefused("No."))
    bench.send(producer, 2)
    assert peer.answers == []
    bench.ledger.succeed()
    assert peer.answers == [("receipt", 0), ("NotAllowedError", 1)]
    bench.ledger.succeed()
    assert peer.answers[2:] == [("receipt", 2)]
    assert (producer.pending, bench.limits.inflight_bytes) == (0, 0)


def test_an_append_that_is_not_taken_ends_the_producer_after_its_receipts() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send(producer, 0)
    bench.ledger.refusal = ManagedLedgerBusy("Wait.")
    bench.send(producer, 1)
    bench.ledger.refusal = None
    bench.send(producer, 2)
    bench.ledger.succeed()
    assert peer.answers == [("receipt", 0), ("TooManyRequests", 1)]
    assert producer.state is ProducerState.CLOSED
    assert bench.gone == [producer]
    assert not bench.lost


def test_a_failed_append_is_told_once_and_nothing_after_it() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    for number in range(3):
        bench.send(producer, number)
    bench.ledger.succeed()
    bench.ledger.fail_all(DiskFull("Full."))
    assert peer.answers == [("receipt", 0), ("PersistenceError", 1)]
    assert producer.sequence.last == 0
    assert bench.gone == [producer]
    assert not bench.lost


def test_a_ledger_without_a_known_end_is_given_up() -> None:
    bench = Bench()
    _, producer = bench.producer()
    bench.send(producer, 0)
    bench.ledger.fail_all(AppendOutcomeUnknown("Who knows."))
    assert len(bench.lost) == 1


def test_no_receipt_for_a_producer_that_is_gone_but_its_sequence_counts() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send(producer, 0)
    producer.disconnected()
    assert bench.gone == []
    bench.ledger.succeed()
    assert peer.answers == []
    assert producer.sequence.last == 0
    assert bench.gone == [producer]


def test_a_damaged_chunk_ends_the_producer() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.publishing.damaged(producer, Send(1, 0, 0, 1, None, plain=False, is_chunk=True))
    assert peer.answers == [("UnknownError", 0)]
    assert producer.state is ProducerState.CLOSED


def test_an_entry_that_cannot_be_read_where_it_must_be_is_refused() -> None:
    bench = Bench()
    peer, producer = bench.producer(enforce=True)
    bench.send(producer, 0, entry=b"\x0e\x01" + b"\xff" * 40)
    assert peer.answers == [("NotAllowedError", 0)]
    assert not bench.ledger.waiting


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["send", "send", "send", "succeed", "busy", "refuse", "fail", "close"]),
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_answers_come_in_order_whatever_happens(steps: list[str], rng: random.Random) -> None:
    bench = Bench()
    pairs = [bench.producer() for _ in range(2)]
    numbers = [0, 0]
    for step in steps:
        which = rng.randrange(2)
        peer, producer = pairs[which]
        if step == "succeed":
            if bench.ledger.waiting:
                bench.ledger.succeed(rng.randint(1, len(bench.ledger.waiting)))
        elif step == "fail":
            bench.ledger.fail_all(DiskFull("Full."))
        elif step == "close":
            producer.disconnected()
        elif step == "refuse":
            if peer.producers:
                bench.publishing.refuse(producer, sent(numbers[which]), MessageRefused("No."))
                numbers[which] += 1
        else:
            bench.ledger.refusal = ManagedLedgerBusy("Wait.") if step == "busy" else None
            bench.ledger.room, bench.ledger.bite = rng.randint(0, 2), rng.randint(1, 3)
            count = rng.randint(1, 4)
            bench.send(producer, numbers[which], count=count)
            bench.ledger.refusal = None
            numbers[which] += count
    while bench.ledger.waiting:
        bench.ledger.succeed()
    for peer, producer in pairs:
        answered = [number for _, number in peer.answers]
        assert answered == list(range(len(answered)))
        fatal = [kind for kind, _ in peer.answers if kind not in ("receipt", "NotAllowedError")]
        assert not fatal or peer.answers[-1][0] == fatal[0]
        assert len(fatal) <= 1
        assert producer.pending == 0
        assert peer.inflight_bytes == 0
    assert bench.publishing.in_flight == 0


@pytest.mark.parametrize("size", [1, 100])
def test_counters(size: int) -> None:
    bench = Bench()
    _, producer = bench.producer()
    bench.publishing.publish(producer, [sent(0, messages=size)], 0)
    bench.ledger.succeed()
    assert (producer.messages_in, producer.bytes_in) == (size, len(ENTRY))
    assert (bench.store.unsaved_entries, bench.store.unsaved_bytes) == (1, len(ENTRY))


def test_a_producer_that_stops_taking_answers_what_it_took() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send(producer, 0)
    producer.stop_taking()
    bench.send(producer, 1)
    bench.send(producer, 0)
    assert peer.producers == {1: producer}
    bench.ledger.succeed()
    assert peer.answers == [("receipt", 0)]
    assert bench.publishing.in_flight == 0


def test_what_came_together_is_answered_together() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send(producer, 0, count=5)
    assert len(bench.ledger.waiting) == producer.pending == 5
    bench.ledger.succeed(3)
    assert peer.answers == [("receipt", number) for number in range(3)]
    assert (peer.buffers, producer.pending, producer.sequence.last) == (1, 2, 2)
    assert producer.sequence.position == bench.store.durable == Position(1, 2)
    assert bench.limits.inflight_bytes == peer.inflight_bytes == 2 * len(ENTRY)


def test_a_group_of_two_producers_and_a_refusal_between_is_answered_in_order() -> None:
    bench = Bench()
    (one, first), (two, second) = bench.producer(), bench.producer()
    bench.send(first, 0, count=2)
    bench.publishing.refuse(first, sent(2), MessageRefused("No."))
    bench.send(first, 3)
    bench.send(second, 0, count=2)
    bench.ledger.succeed(5)
    kinds = ["receipt", "receipt", "NotAllowedError", "receipt"]
    assert one.answers == list(zip(kinds, range(4), strict=True))
    assert two.answers == [("receipt", 0), ("receipt", 1)]
    assert (first.sequence.last, second.sequence.last) == (3, 1)


def test_a_run_ends_where_the_ledger_takes_no_more() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.ledger.refusal, bench.ledger.room = ManagedLedgerBusy("Wait."), 2
    bench.send(producer, 0, count=5)
    assert bench.publishing.in_flight == 3
    bench.ledger.succeed(2)
    assert peer.answers == [("receipt", 0), ("receipt", 1), ("TooManyRequests", 2)]
    assert bench.gone == [producer]
    assert (producer.pending, peer.inflight_bytes) == (0, 0)


def test_a_run_ends_at_the_bound_of_its_connection() -> None:
    bench = Bench(connection_bytes=2 * len(ENTRY))
    peer, producer = bench.producer()
    sends = [sent(number) for number in range(6)]
    assert bench.publishing.publish(producer, sends, 1) == 4
    assert peer.paused
    bench.ledger.succeed(2)
    assert not peer.paused


@pytest.mark.parametrize(
    "other",
    [
        Frame(pb.BaseCommand(type=pb.BaseCommand.PING)),
        Send(2, 2, 0, 1, ENTRY),
        sent(2, None),
        Send(1, 2, 0, 1, ENTRY, plain=False, is_chunk=True),
        Send(1, 2, 0, 1, ENTRY, plain=False, txnid=(1, 0)),
        sent(2, bytes(MAX_MESSAGE_SIZE + 1)),
    ],
)
def test_a_run_ends_at_anything_else(other: Frame | Send) -> None:
    bench = Bench()
    _, producer = bench.producer()
    assert bench.publishing.publish(producer, [sent(0), sent(1), other, sent(3)], 0) == 2
    assert len(bench.ledger.waiting) == 2


async def test_a_receipt_that_fails_keeps_nobody_from_theirs() -> None:
    bench = Bench()
    (_, broken), (peer, producer) = bench.producer(), bench.producer()
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )
    broken.connection.put = lambda buffer: 1 // 0  # type: ignore[assignment, return-value]
    bench.send(broken, 0)
    bench.send(producer, 0, count=2)
    bench.ledger.succeed(3)
    assert [type(failure) for failure in failures] == [ZeroDivisionError]
    assert peer.answers == [("receipt", 0), ("receipt", 1)]
    assert bench.publishing.in_flight == 0


# In transactions

T1, T2 = TxnId(0, 0), TxnId(1, 7)
ENDED = TransactionEnded("It has ended.")


def receipts(*numbers: int) -> list[tuple[str, int]]:
    return [("receipt", number) for number in numbers]


def store_all(bench: Bench) -> None:
    """Groups as the ledger makes them: one after the other with the same callback."""
    while bench.ledger.waiting:
        first = bench.ledger.waiting[0]
        count = next(
            (at for at, done in enumerate(bench.ledger.waiting) if done is not first),
            len(bench.ledger.waiting),
        )
        bench.ledger.succeed(count)


def test_what_comes_behind_a_send_that_waits_for_its_transaction_waits_too() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    _, other = bench.producer()
    bench.send(producer, 0)
    bench.send_in(producer, 1, T1)
    bench.send(producer, 2, count=2)
    bench.send_in(producer, 4, T1)
    bench.send(other, 0)
    assert len(bench.ledger.waiting) == 2
    assert producer.pending == 5
    assert peer.inflight_bytes == 5 * len(ENTRY)
    bench.buffer.answer()
    assert len(bench.ledger.waiting) == 6
    assert not producer.examined
    bench.send(producer, 5)
    store_all(bench)
    assert peer.answers == receipts(0, 1, 2, 3, 4, 5)
    assert bench.buffer.events == [("issued", T1)] * 2 + [("appended", T1)] * 2
    assert (producer.pending, peer.inflight_bytes) == (0, 0)


def test_a_joined_transaction_is_appended_at_once() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.buffer.joined = {T1, T2}
    for number, txn in enumerate((T1, T2, T1)):
        bench.send_in(producer, number, txn)
    bench.send(producer, 3)
    store_all(bench)
    assert peer.answers == receipts(0, 1, 2, 3)
    assert [txn for what, txn in bench.buffer.events if what == "appended"] == [T1, T2, T1]


def test_a_second_transaction_behind_the_first_waits_for_its_own_answer() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send_in(producer, 0, T1)
    bench.send_in(producer, 1, T2)
    bench.send(producer, 2)
    assert [txn for txn, _ in bench.buffer.waiting] == [T1]
    bench.buffer.answer()
    assert [txn for txn, _ in bench.buffer.waiting] == [T2]
    assert len(bench.ledger.waiting) == 1
    bench.buffer.answer()
    store_all(bench)
    assert peer.answers == receipts(0, 1, 2)


def test_an_ended_transaction_is_refused_in_turn_and_the_producer_stays() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send(producer, 0)
    bench.send_in(producer, 1, T1)
    bench.send(producer, 2)
    bench.publishing.refuse(producer, sent(3), MessageRefused("No."))
    bench.publishing.damaged(producer, sent(4, None))
    bench.buffer.answer(ENDED)
    assert peer.answers == []
    store_all(bench)
    refused = [("NotAllowedError", 1), ("receipt", 2), ("NotAllowedError", 3)]
    assert peer.answers == [("receipt", 0), *refused, ("ChecksumError", 4)]
    assert producer.attached
    assert producer.pending == 0


def test_a_failure_of_the_store_puts_the_producer_out_and_nothing_behind_is_stored() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send_in(producer, 0, T1)
    bench.send(producer, 1)
    bench.send_in(producer, 2, T1)
    bench.buffer.answer(MetadataError("The store is gone."))
    bench.send(producer, 3)
    assert peer.answers == [("MetadataError", 0)]
    assert not bench.ledger.waiting
    assert bench.gone == [producer]
    assert peer.inflight_bytes == 0


def test_what_a_sealed_segment_held_is_refused_so_that_the_client_routes_it_anew() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send_in(producer, 0, T1)
    bench.send(producer, 1)
    bench.ledger.refusal = ManagedLedgerTerminated("Sealed.")
    bench.buffer.answer()
    assert peer.answers == [("TopicTerminatedError", 0)]
    assert bench.buffer.events == [("issued", T1), ("not taken", T1)]
    assert bench.gone == [producer]
    assert (producer.pending, peer.inflight_bytes) == (0, 0)


def test_held_sends_of_a_lost_connection_are_not_stored() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send_in(producer, 0, T1)
    bench.send(producer, 1)
    producer.disconnected()
    assert bench.gone == []
    bench.buffer.answer()
    assert not bench.ledger.waiting
    assert bench.gone == [producer]
    assert (producer.pending, peer.inflight_bytes) == (0, 0)


async def test_a_producer_that_closes_waits_for_what_is_held() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send_in(producer, 0, T1)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    bench.buffer.answer()
    await asyncio.sleep(0)
    assert not closing.done()
    store_all(bench)
    await closing
    assert peer.answers == receipts(0)


def test_many_held_sends_pause_reading_until_half_of_them_are_gone() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send_in(producer, 0, T1)
    bench.send(producer, 1, count=TXN_HELD_SENDS - 1)
    assert not peer.paused
    bench.send(producer, TXN_HELD_SENDS)
    assert peer.paused
    bench.buffer.answer()
    assert not peer.paused
    store_all(bench)
    assert peer.answers == receipts(*range(TXN_HELD_SENDS + 1))


def test_deduplication_holds_for_what_was_held() -> None:
    bench = Bench()
    peer, producer = bench.producer(enforce=True)
    entry = build_entry(pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1), b"x")
    bench.buffer.joined = {T1}

    def send(number: int, txn: TxnId) -> None:
        held = Send(1, number, 0, 1, entry, plain=False, txnid=(txn.most, txn.least))
        bench.publishing.publish(producer, [held], 0)

    send(0, T1)
    send(1, T2)
    send(1, T2)
    send(0, T2)
    assert len(bench.buffer.waiting) == 1
    bench.buffer.answer()
    assert len(bench.ledger.waiting) == 2
    assert not bench.buffer.waiting
    store_all(bench)
    assert peer.answers == receipts(0, 1, 1, 0)


def test_a_duplicate_of_an_ended_transaction_gets_its_receipt() -> None:
    bench = Bench()
    peer, producer = bench.producer(enforce=True)
    entry = build_entry(pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1), b"x")
    bench.buffer.joined = {T1}
    send = Send(1, 0, 0, 1, entry, plain=False, txnid=(0, 0))
    bench.publishing.publish(producer, [send], 0)
    bench.ledger.succeed()
    bench.buffer.joined.clear()
    bench.publishing.publish(producer, [send], 0)
    assert peer.answers == receipts(0, 0)
    assert not bench.buffer.waiting


def test_a_failed_append_in_a_transaction_is_told_to_its_buffer() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.buffer.joined = {T1}
    bench.send_in(producer, 0, T1)
    bench.ledger.fail_all(DiskFull("Full."))
    assert bench.buffer.events == [("issued", T1), ("failed", T1)]
    assert peer.answers == [("PersistenceError", 0)]
