"""The publish path over a ledger that does what the test says."""

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.deduplication import ProducerSequence
from broker.producer import Producer, ProducerRequest, ProducerState
from broker.publish_limits import PublishLimits
from broker.publishing import MessageRefused, Publishing
from protocol import pulsar_pb2 as pb
from protocol.frames import FrameDecoder
from protocol.ids import Position
from protocol.server_error import MagnetarError
from storage.ledger.store import DiskFull
from storage.managed_ledger_types import AppendOutcomeUnknown, ManagedLedgerBusy, PublishCallback

ENTRY = b"\x0e\x01" + bytes(30)


class Ledger:
    """Holds appends until the test decides them, in order."""

    def __init__(self) -> None:
        self.waiting: deque[PublishCallback] = deque()
        self.refusal: MagnetarError | None = None
        self.stored = 0

    def append(self, data: bytes, done: PublishCallback) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.waiting.append(done)

    def succeed(self) -> None:
        self.waiting.popleft()(Position(1, self.stored), None)
        self.stored += 1

    def fail_all(self, error: MagnetarError) -> None:
        for done in list(self.waiting):
            self.waiting.popleft()
            done(None, error)


class Peer:
    """A connection that remembers what it was told."""

    def __init__(self) -> None:
        self.producers: dict[int, object] = {}
        self.closed_producers: dict[int, None] = {}
        self.inflight_bytes = 0
        self.remote = "127.0.0.1:1"
        self.answers: list[tuple[str, int]] = []
        self._decoder = FrameDecoder(10**6)

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def put(self, buffer: bytes) -> None:
        for frame in self._decoder.feed(buffer):
            self.answers.append(("receipt", frame.command.send_receipt.sequence_id))

    def send_encoded(self, buffer: bytes) -> None:
        self.put(buffer)

    def send(self, command: pb.BaseCommand) -> None:
        if command.HasField("send_error"):
            name = pb.ServerError.Name(command.send_error.error)
            self.answers.append((name, command.send_error.sequence_id))

    def pause_reading(self, why: str) -> None:
        """Nothing is read anyway."""

    def resume_reading(self, why: str) -> None:
        """Nothing is read anyway."""


class Bench:
    """One topic's publish path with producers on peers."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.limits = PublishLimits(connection_bytes=10**9, total_bytes=10**9)
        self.store = SimpleNamespace(durable=None, unsaved_entries=0, unsaved_bytes=0)
        self.lost: list[MagnetarError] = []
        self.gone: list[Producer] = []
        self.publishing = Publishing(
            self.ledger,  # type: ignore[arg-type]
            self.limits,
            self.store,  # type: ignore[arg-type]
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

    def send(self, producer: Producer, number: int, *, entry: bytes = ENTRY) -> None:
        """What the SEND handler does: nothing for a producer that has lost its id."""
        if cast("Peer", producer.connection).producers.get(1) is producer:
            command = pb.CommandSend(producer_id=1, sequence_id=number)
            self.publishing.publish(producer, command, entry)


def test_refusals_wait_for_their_turn() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.send(producer, 0)
    bench.publishing.refuse(
        producer, pb.CommandSend(producer_id=1, sequence_id=1), MessageRefused("No.")
    )
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
    bench.publishing.damaged(producer, pb.CommandSend(producer_id=1, sequence_id=0, is_chunk=True))
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
                bench.ledger.succeed()
        elif step == "fail":
            bench.ledger.fail_all(DiskFull("Full."))
        elif step == "close":
            producer.disconnected()
        elif step == "refuse":
            if peer.producers:
                command = pb.CommandSend(producer_id=1, sequence_id=numbers[which])
                bench.publishing.refuse(producer, command, MessageRefused("No."))
                numbers[which] += 1
        else:
            bench.ledger.refusal = ManagedLedgerBusy("Wait.") if step == "busy" else None
            bench.send(producer, numbers[which])
            bench.ledger.refusal = None
            numbers[which] += 1
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
    command = pb.CommandSend(producer_id=1, sequence_id=0, num_messages=size)
    bench.publishing.publish(producer, command, ENTRY)
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
