"""The hand-written frames are byte for byte those of the protobuf encoder."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import (
    encode_command,
    encode_message,
    encode_message_head,
    encode_send_receipt,
)
from magnetar.protocol.hot_frames import encode_send_receipts
from magnetar.protocol.ids import LONG_MAX, from_wire, to_wire
from tests.unit.magnetar.protocol.strategies import i64, u32, u64

EDGES = st.sampled_from([(1 << bits) + off for bits in range(1, 64) for off in (-1, 0)])
numbers = u64 | EDGES


@given(numbers, numbers, numbers, numbers, numbers)
def test_send_receipt(producer: int, sequence: int, highest: int, ledger: int, entry: int) -> None:
    receipt = pb.CommandSendReceipt(
        producer_id=producer,
        sequence_id=sequence,
        highest_sequence_id=highest,
        message_id=pb.MessageIdData(ledger_id=ledger, entry_id=entry),
    )
    command = pb.BaseCommand(type=pb.BaseCommand.SEND_RECEIPT, send_receipt=receipt)
    assert encode_send_receipt(producer, sequence, highest, ledger, entry) == encode_command(
        command
    )


@given(numbers, numbers, st.lists(st.tuples(numbers, numbers, numbers), max_size=10))
def test_receipts_together_are_the_receipts_one_by_one(
    producer: int, ledger: int, receipts: list[tuple[int, int, int]]
) -> None:
    assert encode_send_receipts(producer, ledger, receipts) == b"".join(
        encode_send_receipt(producer, sequence, highest, ledger, entry)
        for sequence, highest, entry in receipts
    )


@given(
    numbers,
    numbers,
    numbers,
    st.integers(-1, 2**31 - 1) | st.integers(-(2**31), -2),
    u32,
    st.lists(i64, max_size=20),
    st.none() | numbers,
    st.binary(max_size=300),
)
def test_message_head(
    consumer: int,
    ledger: int,
    entry_id: int,
    partition: int,
    redelivery_count: int,
    ack_set: list[int],
    epoch: int | None,
    entry: bytes,
) -> None:
    message_id = pb.MessageIdData(ledger_id=ledger, entry_id=entry_id)
    if partition != -1:
        message_id.partition = partition
    message = pb.CommandMessage(consumer_id=consumer, message_id=message_id, ack_set=ack_set)
    if redelivery_count:
        message.redelivery_count = redelivery_count
    if epoch is not None:
        message.consumer_epoch = epoch
    command = pb.BaseCommand(type=pb.BaseCommand.MESSAGE, message=message)
    head = encode_message_head(
        consumer,
        ledger,
        entry_id,
        len(entry),
        partition=partition,
        redelivery_count=redelivery_count,
        ack_set=ack_set,
        consumer_epoch=epoch,
    )
    assert (head, entry) == encode_message(command, entry)


@given(i64)
def test_signed_numbers_survive_unsigned_fields(value: int) -> None:
    sent = pb.CommandCloseProducer(producer_id=to_wire(value), request_id=0)
    received = pb.CommandCloseProducer.FromString(sent.SerializeToString())
    assert from_wire(received.producer_id) == value


def test_edges_of_wire_numbers() -> None:
    assert to_wire(-1) == 2**64 - 1
    assert from_wire(2**64 - 1) == -1
    assert from_wire(LONG_MAX) == to_wire(LONG_MAX) == LONG_MAX
