"""The fast way to the fields of a SEND agrees with the generated parser, whatever the bytes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import parse_command
from magnetar.protocol.frame_error import MalformedCommand, ReplicatorOnly
from magnetar.protocol.frames import FrameDecoder, Send, encode_send
from magnetar.protocol.hot_frames import varint
from magnetar.protocol.send import may_name_transaction, parse_send
from tests.unit.magnetar.protocol.strategies import entries, u32, u64

i32 = st.integers(-(2**31), 2**31 - 1)
numbers = u64 | st.integers(0, 2**22)


@st.composite
def commands(draw: st.DrawFn) -> pb.BaseCommand:
    """Any SEND: the usual fields mostly, the rare ones sometimes."""
    send = pb.CommandSend(producer_id=draw(numbers), sequence_id=draw(numbers))
    for field, values in (
        ("num_messages", st.integers(0, 200) | i32),
        ("highest_sequence_id", numbers),
    ):
        if draw(st.booleans()):
            setattr(send, field, draw(values))
    if draw(st.integers(0, 3)) == 0:
        for field, values in (
            ("txnid_least_bits", u64),
            ("txnid_most_bits", u64),
            ("is_chunk", st.booleans()),
            ("marker", st.booleans()),
        ):
            if draw(st.booleans()):
                setattr(send, field, draw(values))
        if draw(st.booleans()):
            send.message_id.CopyFrom(pb.MessageIdData(ledger_id=draw(u64), entry_id=draw(u32)))
    return pb.BaseCommand(type=pb.BaseCommand.SEND, send=send)


def fields(send: pb.CommandSend) -> tuple[int, int, int, int]:
    return send.producer_id, send.sequence_id, send.highest_sequence_id, send.num_messages


def check(raw: bytes) -> None:
    """Where the fast parser has an answer, it is the generated parser's, and there is no more."""
    known = parse_send(raw, 0, len(raw))
    within = parse_send(b"\x08\x06" + raw + b"\x10\x01", 2, 2 + len(raw))
    assert within == known or (known is None and within is None)
    if known is None:
        return
    command = parse_command(raw)
    assert command.type == pb.BaseCommand.SEND
    assert known == fields(command.send)
    plain = pb.BaseCommand(type=pb.BaseCommand.SEND)
    for field, value in zip(
        ("producer_id", "sequence_id", "highest_sequence_id", "num_messages"), known, strict=True
    ):
        if command.send.HasField(field):
            setattr(plain.send, field, value)
    assert command == plain


@given(commands())
def test_agrees_on_every_command(command: pb.BaseCommand) -> None:
    check(command.SerializeToString())


@given(
    st.integers(0, 2**31 - 1), st.integers(0, 2**48), st.integers(0, 2**48), st.integers(1, 2**20)
)
def test_knows_the_usual_ones(producer: int, sequence: int, highest: int, messages: int) -> None:
    send = pb.CommandSend(producer_id=producer, sequence_id=sequence)
    if messages > 1:
        send.num_messages = messages
        send.highest_sequence_id = highest
    raw = pb.BaseCommand(type=pb.BaseCommand.SEND, send=send).SerializeToString()
    assert parse_send(raw, 0, len(raw)) == fields(send)


@given(commands(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3))
def test_agrees_on_mutations(command: pb.BaseCommand, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(command.SerializeToString())
    for place, value in changes:
        raw[place % len(raw)] = value
    check(bytes(raw))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0x08, 0x10, 0x18, 0x20, 0x28, 0x30, 0x38, 0x40, 0x4A, 0x09, 0x88]),
            st.integers(0, 2**64 - 1) | st.integers(0, 300),
            st.integers(0, 3),
        ),
        max_size=8,
    ),
    st.integers(-2, 2),
)
def test_agrees_on_fields_in_any_order(rows: list[tuple[int, int, int]], lie: int) -> None:
    """Repeated, missing and unknown fields, varints longer than they need be, wrong lengths."""
    body = b""
    for tag, value, padding in rows:
        number = bytearray(varint(value))
        if padding and len(number) < 9:
            number[-1] |= 128
            number += b"\x80" * (padding - 1) + b"\x00"
        body += bytes((tag,)) + number
    check(b"\x08\x06\x32" + varint(max(len(body) + lie, 0)) + body)


def test_every_truncation_is_left_to_the_generated_parser() -> None:
    send = pb.CommandSend(producer_id=300, sequence_id=70_000, highest_sequence_id=70_010)
    raw = pb.BaseCommand(type=pb.BaseCommand.SEND, send=send).SerializeToString()
    for end in range(len(raw)):
        assert parse_send(raw, 0, end) is None
        assert parse_send(raw[:end], 0, end) is None
        with pytest.raises(MalformedCommand):
            parse_command(raw[:end])


def test_noise_is_no_send() -> None:
    rng = random.Random(1)
    for _ in range(20_000):
        check(b"\x08\x06\x32" + bytes([rng.randrange(12)]) + rng.randbytes(rng.randrange(12)))


@given(commands(), entries())
def test_a_decoded_send_has_the_fields_of_its_command(
    command: pb.BaseCommand, entry: bytes
) -> None:
    (received,) = FrameDecoder(10_000).feed(encode_send(command, entry))
    send = command.send
    txnid = None
    if send.HasField("txnid_most_bits") or send.HasField("txnid_least_bits"):
        txnid = send.txnid_most_bits, send.txnid_least_bits
    metadata = entry[10 : 10 + int.from_bytes(entry[6:10], "big")]
    assert type(received) is Send
    refused = send.HasField("message_id")
    assert isinstance(received.error, ReplicatorOnly) is refused
    rare = send.is_chunk or txnid is not None or refused or send.marker
    assert received == Send(
        *fields(send),
        None if refused else entry,
        plain=not rare and not may_name_transaction(metadata),
        is_chunk=send.is_chunk,
        txnid=txnid,
        error=received.error,
        marker=send.marker,
    )
