"""The publish path over a ledger that does what the test says."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.topics.producer import ProducerState
from broker.topics.publish_errors import MessageRefused
from broker.topics.publish_limits import largest_message
from config.bounds import ENTRY_HEADROOM, MAX_FRAME_SIZE, MAX_MESSAGE_SIZE
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame, Send
from magnetar.protocol.hot_frames import encode_message_head
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.txn_id import TxnId
from storage.ledger.store import DiskFull
from storage.managed_ledger.types import (
    AppendOutcomeUnknown,
    ManagedLedgerBusy,
)
from storage.metadata.store import RecordTooLarge
from tests.unit.broker.topics.publishing_bench import ENTRY, Bench, entry_in, sent


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


def test_failed_append_is_answered_once_and_nothing_follows() -> None:
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


def test_a_failed_append_puts_the_producer_out_whatever_its_code_says() -> None:
    """The code may be one of refused messages, after which a client goes on with the next."""
    bench = Bench()
    peer, producer = bench.producer(enforce=True)
    bench.send(producer, 0, entry=entry_in(None))
    bench.ledger.fail_all(RecordTooLarge("The list of ledgers is too long."))
    assert peer.answers == [("NotAllowedError", 0), ("closed", 1)]
    assert bench.gone == [producer]


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
    producer.close_at_once()
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
            producer.close_at_once()
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


def test_sends_of_one_batch_are_answered_in_one_write() -> None:
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


async def test_a_failed_receipt_does_not_stop_the_others() -> None:
    bench = Bench()
    (_, broken), (peer, producer) = bench.producer(), bench.producer()
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )
    broken.put = lambda buffer: 1 // 0  # type: ignore[assignment]
    bench.send(broken, 0)
    bench.send(producer, 0, count=2)
    bench.ledger.succeed(3)
    assert [type(failure) for failure in failures] == [ZeroDivisionError]
    assert peer.answers == [("receipt", 0), ("receipt", 1)]
    assert bench.publishing.in_flight == 0


# In transactions


STORE_TAKES = 20_000
LARGEST = largest_message(STORE_TAKES)
ROOM = STORE_TAKES - LARGEST


def sized(metadata_bytes: int, payload_bytes: int, **more: object) -> bytes:
    """An entry of about so large metadata."""
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, **more)  # type: ignore[arg-type]
    metadata.ordering_key = bytes(metadata_bytes)
    return build_entry(metadata, bytes(payload_bytes))


T = TxnId(0, 0)
IN_T = {"txnid_most_bits": T.most, "txnid_least_bits": T.least}


@pytest.mark.parametrize("enforce", [False, True], ids=["as it comes", "deduplicated"])
@pytest.mark.parametrize(
    "large",
    [
        sent(1, sized(100, LARGEST + 1)),
        sent(1, sized(ROOM, LARGEST - 10)),
        sent(1, sized(100, LARGEST + 1, num_messages_in_batch=3), messages=3),
        Send(1, 1, 0, 1, sized(0, LARGEST + 1, marker_type=10), plain=False),
        Send(
            1,
            1,
            0,
            1,
            sized(0, LARGEST + 1, uuid="u", num_chunks_from_msg=2, chunk_id=0),
            plain=False,
            is_chunk=True,
        ),
        Send(1, 1, 0, 1, sized(0, LARGEST + 1, **IN_T), plain=False, txnid=(T.most, T.least)),
    ],
    ids=["payload", "metadata", "batch", "marker", "chunk", "in a transaction"],
)
def test_entry_too_large_for_the_store_is_refused_alone(large: Send, enforce: bool) -> None:
    bench = Bench(max_entry_bytes=STORE_TAKES)
    bench.buffer.joined = {T}
    (peer, producer), (others, other) = bench.producer(enforce=enforce), bench.producer()
    sends = [sent(0, sized(0, LARGEST)), large, sent(2, sized(ROOM - 100, LARGEST))]
    at = 0
    while at < len(sends):
        at = bench.publishing.publish(producer, sends, at)
    bench.send(other, 0)
    assert len(bench.ledger.waiting) == 3
    while bench.ledger.waiting:
        bench.ledger.succeed()
    assert peer.answers == [("receipt", 0), ("NotAllowedError", 1), ("receipt", 2)]
    assert others.answers == [("receipt", 0)]
    assert producer.state is ProducerState.OPEN


@pytest.mark.parametrize(
    ("store_takes", "largest"),
    [
        (64 * 2**20, MAX_MESSAGE_SIZE),
        # Bookies with Pulsar's settings, with the largest digest; bookies as they come.
        (MAX_FRAME_SIZE - 80, MAX_MESSAGE_SIZE),
        (MAX_MESSAGE_SIZE - 64, MAX_MESSAGE_SIZE - 64 - ENTRY_HEADROOM),
    ],
)
def test_the_largest_message_is_what_broker_and_store_take(store_takes: int, largest: int) -> None:
    assert largest_message(store_takes) == largest


def test_the_largest_entry_fits_into_the_frame_that_brings_it_to_a_consumer() -> None:
    """Clients end frames 10 KiB above what CONNECTED announces: MAX_FRAME_SIZE, for the most."""
    entry = MAX_MESSAGE_SIZE + ENTRY_HEADROOM
    head = encode_message_head(
        2**63, 2**63, 2**63, entry, redelivery_count=2**31, ack_set=[-1] * 70, consumer_epoch=2**63
    )
    assert len(head) + entry <= MAX_FRAME_SIZE
