"""SENDs in transactions: admitted before they are appended, held in order behind one that waits."""

import asyncio

import pytest

from broker.topics.publish_errors import MessageRefused
from config.bounds import MAX_MESSAGE_SIZE, TXN_HELD_SENDS
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Send
from magnetar.protocol.message import build_entry
from magnetar.protocol.txn_id import TxnId
from storage.ledger.store import DiskFull
from storage.managed_ledger.types import (
    ManagedLedgerTerminated,
)
from storage.metadata.store import MetadataError
from tests.unit.broker.topics.publishing_bench import ENTRY, Bench, entry_in, sent, sent_in
from txn.errors import TransactionEnded

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


def test_sends_behind_a_send_that_waits_for_its_transaction_wait() -> None:
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


def test_sends_in_joined_transactions_that_came_together_are_appended_together() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.buffer.joined = {T1, T2}
    other = TxnId(5, 5)
    sends = [sent_in(0, T1), sent_in(1, T2), sent_in(2, T1), sent(3), sent_in(4, T1)]
    sends += [sent_in(5, other), sent_in(6, T1)]
    ends = [0]
    while ends[-1] < len(sends):
        ends.append(bench.publishing.publish(producer, sends, ends[-1]))
    assert ends == [0, 3, 4, 5, 6, 7]
    assert len(bench.ledger.waiting) == 5
    bench.buffer.answer()
    store_all(bench)
    assert peer.answers == receipts(0, 1, 2, 3, 4, 5, 6)
    appended = [txn for what, txn in bench.buffer.events if what == "appended"]
    assert appended == [T1, T2, T1, T1, other, T1]
    assert (producer.pending, peer.inflight_bytes) == (0, 0)


@pytest.mark.parametrize(
    "odd",
    [
        sent_in(1, T1, named=T2),
        sent_in(1, T1)._replace(entry=b"\x0e\x01 no metadata"),
        sent_in(1, T1)._replace(entry=bytes(MAX_MESSAGE_SIZE + 1)),
        sent_in(1, T1)._replace(is_chunk=True),
        sent_in(1, T1)._replace(producer_id=2),
    ],
    ids=["another transaction", "unreadable", "too large", "chunk", "another producer"],
)
def test_irregular_send_ends_a_run_of_transactional_sends(odd: Send) -> None:
    bench = Bench()
    _, producer = bench.producer()
    bench.buffer.joined = {T1}
    assert bench.publishing.publish(producer, [sent_in(0, T1), odd, sent_in(2, T1)], 0) == 1


def test_entries_a_ledger_refuses_of_a_run_are_passed_to_the_buffer() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.buffer.joined = {T1, T2}
    bench.ledger.bite, bench.ledger.room = 1, 2
    bench.ledger.refusal = ManagedLedgerTerminated("Sealed.")
    sends = [sent_in(0, T1), sent_in(1, T1), sent_in(2, T2), sent_in(3, T1)]
    assert bench.publishing.publish(producer, sends, 0) == 4
    not_taken = [txn for what, txn in bench.buffer.events if what == "not taken"]
    assert not_taken == [T1, T2]
    store_all(bench)
    assert peer.answers == [*receipts(0, 1), ("TopicTerminatedError", 2)]
    assert [what for what, _ in bench.buffer.events].count("appended") == 2
    assert (producer.pending, peer.inflight_bytes) == (0, 0)


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


def test_sends_held_by_a_sealed_segment_are_refused_as_terminated() -> None:
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
    producer.close_at_once()
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
    bench.buffer.joined = {T1}

    def send(number: int, txn: TxnId) -> None:
        held = Send(1, number, 0, 1, entry_in(txn), plain=False, txnid=(txn.most, txn.least))
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
    bench.buffer.joined = {T1}
    send = Send(1, 0, 0, 1, entry_in(T1), plain=False, txnid=(0, 0))
    bench.publishing.publish(producer, [send], 0)
    bench.ledger.succeed()
    bench.buffer.joined.clear()
    bench.publishing.publish(producer, [send], 0)
    assert peer.answers == receipts(0, 0)
    assert not bench.buffer.waiting


def test_a_refused_send_has_not_used_its_sequence_id() -> None:
    """Its work is done again in another transaction, under the same id: that is no duplicate."""
    bench = Bench()
    peer, producer = bench.producer(enforce=True)
    bench.send_in(producer, 0, T1)
    bench.send_in(producer, 0, T2)
    bench.buffer.answer(ENDED)
    bench.buffer.answer()
    bench.send_in(producer, 0, T2)
    assert len(bench.ledger.waiting) == 1
    store_all(bench)
    assert peer.answers == [("NotAllowedError", 0), *receipts(0, 0)]
    assert producer.sequence.last == 0


def test_a_refused_chunk_has_not_used_its_place() -> None:
    bench = Bench()
    peer, producer = bench.producer(enforce=True)
    bench.buffer.joined = {T2}

    def send(chunk_id: int, txn: TxnId) -> None:
        metadata = pb.MessageMetadata(
            producer_name="p",
            sequence_id=0,
            publish_time=1,
            txnid_most_bits=txn.most,
            txnid_least_bits=txn.least,
            uuid="u",
            chunk_id=chunk_id,
            num_chunks_from_msg=2,
        )
        entry = build_entry(metadata, b"")
        chunk = Send(1, 0, 0, 1, entry, plain=False, txnid=(txn.most, txn.least), is_chunk=True)
        bench.publishing.publish(producer, [chunk], 0)

    for chunk_id in (0, 1):
        send(chunk_id, T1)
        bench.buffer.answer(ENDED)
    for chunk_id in (0, 1, 0, 1):
        send(chunk_id, T2)
    assert len(bench.ledger.waiting) == 2
    store_all(bench)
    assert peer.answers == [("NotAllowedError", 0)] * 2 + receipts(0) * 4
    assert producer.sequence.last == 0


def test_failed_append_in_a_transaction_is_passed_to_its_buffer() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    bench.buffer.joined = {T1}
    bench.send_in(producer, 0, T1)
    bench.ledger.fail_all(DiskFull("Full."))
    assert bench.buffer.events == [("issued", T1), ("failed", T1)]
    assert peer.answers == [("PersistenceError", 0)]
