"""Frames: golden bytes, every way to be wrong, chunking, mutation, memory."""

import contextlib
import gc
import tracemalloc
import weakref
from itertools import pairwise

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.checksum import crc32c, seal_entry, uses_compiled_checksum
from magnetar.protocol.frames import (
    MAX_COMMAND_SIZE,
    ChecksumMismatch,
    Frame,
    FrameDecoder,
    FrameError,
    FrameTooLarge,
    MalformedCommand,
    MalformedEntry,
    MalformedFrame,
    MissingPayload,
    Received,
    Send,
    UnexpectedPayload,
    encode_command,
    encode_message,
    encode_send,
)
from magnetar.protocol.server_error import ServerError
from tests.unit.magnetar.protocol import strategies

LIMIT = 64 * 1024
METADATA = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2).SerializeToString()
CHECKED = len(METADATA).to_bytes(4, "big") + METADATA + b"payload"
ENTRY = seal_entry(CHECKED)
SEND = pb.BaseCommand(type=pb.BaseCommand.SEND, send=pb.CommandSend(producer_id=3, sequence_id=7))
SENT = Send(3, 7, 0, 1, ENTRY)
MESSAGE = pb.BaseCommand(
    type=pb.BaseCommand.MESSAGE,
    message=pb.CommandMessage(consumer_id=1, message_id=pb.MessageIdData(ledger_id=4, entry_id=5)),
)


def raw_frame(command: bytes, rest: bytes = b"") -> bytes:
    size = len(command)
    return (4 + size + len(rest)).to_bytes(4, "big") + size.to_bytes(4, "big") + command + rest


def decode(data: bytes) -> list[Received]:
    decoder = FrameDecoder(LIMIT)
    frames = decoder.feed(data)
    assert decoder.buffered_size == 0
    return frames


def outcome(chunks: list[bytes]) -> tuple[list[Received], type[FrameError] | None, int]:
    """What comes out of a decoder fed with these chunks; an error ends it."""
    decoder = FrameDecoder(LIMIT)
    frames: list[Received] = []
    for chunk in chunks:
        try:
            frames += decoder.feed(chunk)
        except FrameError as error:
            return [*frames, *error.frames_before], type(error), 0
    return frames, None, decoder.buffered_size


def comparable(frames: list[Received]) -> list[tuple[object, ...]]:
    return [
        (*f._replace(error=None), str(f.error))
        if isinstance(f, Send)
        else (f.command.SerializeToString(), f.entry, str(f.error))
        for f in frames
    ]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def test_the_checksum_is_castagnoli_and_compiled() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert uses_compiled_checksum()


def test_golden_simple_frame() -> None:
    frame = bytes.fromhex("00000009000000050812920100")
    (decoded,) = decode(frame)
    assert isinstance(decoded, Frame)
    assert decoded.command.type == pb.BaseCommand.PING
    command = pb.BaseCommand(type=pb.BaseCommand.PING, ping=pb.CommandPing())
    assert encode_command(command) == frame


def test_golden_send_frame() -> None:
    command = bytes.fromhex("0806320408031007")
    frame = raw_frame(command, b"\x0e\x01" + crc32c(CHECKED).to_bytes(4, "big") + CHECKED)
    assert encode_send(SEND, ENTRY) == frame
    (decoded,) = decode(frame)
    assert decoded == SENT
    assert type(decoded) is Send
    assert type(decoded.entry) is bytes


def test_an_entry_without_magic_gets_its_checksum() -> None:
    (frame,) = decode(raw_frame(SEND.SerializeToString(), CHECKED))
    assert frame.entry == ENTRY


def test_broker_metadata_before_a_message_is_taken_off() -> None:
    broker = pb.BrokerEntryMetadata(broker_timestamp=1, index=9).SerializeToString()
    prefix = b"\x0e\x02" + len(broker).to_bytes(4, "big") + broker
    (frame,) = decode(raw_frame(MESSAGE.SerializeToString(), prefix + ENTRY))
    assert isinstance(frame, Frame)
    assert (frame.entry, frame.broker_metadata) == (ENTRY, broker)


def test_a_client_may_not_send_broker_metadata() -> None:
    with pytest.raises(MalformedEntry):
        decode(raw_frame(SEND.SerializeToString(), b"\x0e\x02\0\0\0\0" + ENTRY))


def test_a_wrong_checksum_is_reported_with_its_command_and_the_stream_goes_on() -> None:
    damaged = ENTRY[:-1] + b"X"
    bad, good = decode(encode_send(SEND, damaged) + encode_send(SEND, ENTRY))
    assert isinstance(bad, Send)
    assert (bad.sequence_id, bad.entry, bad.plain) == (7, None, False)
    assert isinstance(bad.error, ChecksumMismatch)
    assert bad.error.code is ServerError.CHECKSUM_ERROR
    assert good == SENT


LEAST_BITS = [b"\xb0\x01", b"\xb0\x81\x00", b"\xb0\x81\x80\x00", b"\xb0\x81\x80\x80\x00"]
"""The tag of `txnid_least_bits`, in all lengths that parsers take."""
FIELDS = [
    b"\x08\xb0\x01",  # an unknown field of the value that the tag has
    b"\x2a\x02\xb0\x01",  # text that has its bytes
    b"\xb1\x01" + bytes(8),  # the same number of another wire type
    b"\xb8\x01\x05",  # the most bits alone
    METADATA,
    *(tag + b"\x05" for tag in LEAST_BITS),
]


@pytest.mark.parametrize("tag", LEAST_BITS, ids=bytes.hex)
@pytest.mark.parametrize("rare", [False, True], ids=["usual", "rare"])
def test_a_send_whose_message_names_a_transaction_is_not_plain(tag: bytes, rare: bool) -> None:
    metadata = METADATA + tag + b"\x05"
    assert pb.MessageMetadata.FromString(metadata).HasField("txnid_least_bits")
    sequence_id = 2**60 if rare else 7
    command = pb.CommandSend(producer_id=3, sequence_id=sequence_id)
    send = pb.BaseCommand(type=pb.BaseCommand.SEND, send=command)
    entry = seal_entry(len(metadata).to_bytes(4, "big") + metadata + b"payload")
    sent = SENT._replace(sequence_id=sequence_id, entry=entry, plain=False)
    assert decode(encode_send(send, entry)) == [sent]


def test_a_message_without_magic_may_name_a_transaction_too() -> None:
    metadata = METADATA + LEAST_BITS[0] + b"\x05"
    (send,) = decode(
        raw_frame(SEND.SerializeToString(), len(metadata).to_bytes(4, "big") + metadata)
    )
    assert isinstance(send, Send)
    assert not send.plain


def test_a_payload_that_looks_like_a_transaction_is_plain() -> None:
    entry = seal_entry(CHECKED + LEAST_BITS[0] * 50)
    assert decode(encode_send(SEND, entry)) == [SENT._replace(entry=entry)]


@given(st.lists(st.one_of(st.sampled_from(FIELDS), st.binary(max_size=8)), max_size=6))
def test_no_encoding_hides_a_transaction(fields: list[bytes]) -> None:
    metadata = b"".join(fields)
    try:
        named = pb.MessageMetadata.FromString(metadata).HasField("txnid_least_bits")
    except DecodeError:
        return
    entry = seal_entry(len(metadata).to_bytes(4, "big") + metadata)
    (send,) = decode(encode_send(SEND, entry))
    assert isinstance(send, Send)
    assert not (named and send.plain)


def test_encoded_message_comes_back_as_it_went() -> None:
    head, entry = encode_message(MESSAGE, ENTRY)
    assert entry is ENTRY
    assert decode(head + entry) == [Frame(MESSAGE, ENTRY)]


LOOKUP = pb.BaseCommand(
    type=pb.BaseCommand.LOOKUP, lookup=pb.CommandLookupTopic(topic="abc", request_id=1)
).SerializeToString()
SEND_HEAD = SEND.SerializeToString()
BAD_FRAMES = {
    "announced above the limit": ((LIMIT + 1).to_bytes(4, "big"), FrameTooLarge),
    "no room for the command size": (b"\0\0\0\x03abc", MalformedFrame),
    "empty": (b"\0\0\0\0", MalformedFrame),
    "command longer than its frame": (b"\0\0\0\x06\0\0\0\x03\x08\x12", MalformedFrame),
    "command size of four billion": (b"\0\0\0\x06\xff\xff\xff\xff\x08\x12", MalformedFrame),
    "no command": (raw_frame(b""), MalformedCommand),
    "not protobuf": (raw_frame(b"GET / HTTP/1.1"), MalformedCommand),
    "unknown type": (raw_frame(b"\x08\x63"), MalformedCommand),
    "type without its field": (raw_frame(b"\x08\x17"), MalformedCommand),
    "SEND without its field": (raw_frame(b"\x08\x06", ENTRY), MalformedCommand),
    "AUTH_RESPONSE without its field": (raw_frame(b"\x08\x25"), MalformedCommand),
    "required field missing": (raw_frame(bytes.fromhex("080632020803"), ENTRY), MalformedCommand),
    "required field missing, deep": (
        raw_frame(bytes.fromhex("0806 3208 0803 1007 4a02 0801".replace(" ", "")), ENTRY),
        MalformedCommand,
    ),
    "text that is not UTF-8": (raw_frame(LOOKUP.replace(b"abc", b"a\xffc")), MalformedCommand),
    "payload after LOOKUP": (raw_frame(LOOKUP, ENTRY), UnexpectedPayload),
    "one byte after LOOKUP": (raw_frame(LOOKUP, b"\0"), UnexpectedPayload),
    "SEND without an entry": (raw_frame(SEND_HEAD), MissingPayload),
    "entry too short for a size": (raw_frame(SEND_HEAD, b"\0\0\0"), MalformedEntry),
    "only magic": (raw_frame(SEND_HEAD, b"\x0e\x01"), MalformedEntry),
    "magic and checksum only": (raw_frame(SEND_HEAD, ENTRY[:6]), MalformedEntry),
    "magic, checksum, half a size": (raw_frame(SEND_HEAD, ENTRY[:9]), MalformedEntry),
    "metadata beyond the entry": (raw_frame(SEND_HEAD, ENTRY[:12]), MalformedEntry),
    "metadata beyond the entry, no magic": (raw_frame(SEND_HEAD, CHECKED[:6]), MalformedEntry),
    "broker metadata beyond the entry": (
        raw_frame(MESSAGE.SerializeToString(), b"\x0e\x02\0\0\xff\xff" + ENTRY),
        MalformedEntry,
    ),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frames_have_errors_of_their_own(name: str) -> None:
    data, expected = BAD_FRAMES[name]
    decoder = FrameDecoder(LIMIT)
    with pytest.raises(FrameError) as caught:
        decoder.feed(encode_send(SEND, ENTRY) + data)
    assert type(caught.value) is expected
    assert caught.value.frames_before == (SENT,)
    assert str(caught.value).endswith(".")
    with pytest.raises(expected) as again:
        decoder.feed(b"")
    assert again.value.frames_before == ()


@pytest.mark.parametrize("field", ["properties", "metadata", "schema", "subscription"])
def test_broken_text_is_found_at_every_depth(field: str) -> None:
    command = pb.CommandSubscribe(
        topic="t",
        subscription="s",
        sub_type=pb.CommandSubscribe.Shared,
        consumer_id=1,
        request_id=2,
    )
    if field == "properties":
        command.subscription_properties.add(key="k", value="needle")
    elif field == "metadata":
        command.metadata.add(key="needle", value="v")
    elif field == "schema":
        command.schema.CopyFrom(pb.Schema(name="n", schema_data=b"\xff", type=pb.Schema.String))
        command.schema.properties.add(key="needle", value="v")
    else:
        command.subscription = "needle"
    raw = pb.BaseCommand(type=pb.BaseCommand.SUBSCRIBE, subscribe=command).SerializeToString()
    assert decode(raw_frame(raw))
    with pytest.raises(MalformedCommand):
        decode(raw_frame(raw.replace(b"needle", b"need\xc3\x28")))


def test_bytes_fields_may_hold_anything() -> None:
    schema = pb.Schema(name="ü", schema_data=b"\xff\xfe", type=pb.Schema.Json)
    command = pb.CommandGetOrCreateSchema(request_id=1, topic="t", schema=schema)
    kind = pb.BaseCommand.GET_OR_CREATE_SCHEMA
    raw = pb.BaseCommand(type=kind, get_or_create_schema=command).SerializeToString()
    (frame,) = decode(raw_frame(raw))
    assert isinstance(frame, Frame)
    assert frame.command.get_or_create_schema.schema.schema_data == b"\xff\xfe"


@given(st.lists(strategies.frames, max_size=6), st.lists(st.integers(0, 4000), max_size=12))
def test_any_chunking_gives_the_same_frames(frames: list[bytes], places: list[int]) -> None:
    data = b"".join(frames)
    whole = outcome([data])
    assert len(whole[0]) == len(frames)
    chunked = outcome(cut(data, places))
    assert comparable(chunked[0]) == comparable(whole[0])
    assert chunked[1:] == whole[1:] == (None, 0)


@given(
    st.lists(strategies.frames, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4),
    st.lists(st.integers(0, 4000), max_size=6),
)
def test_any_mutation_gives_frames_or_a_frame_error(
    frames: list[bytes], changes: list[tuple[int, int]], places: list[int]
) -> None:
    data = bytearray(b"".join(frames))
    for place, value in changes:
        data[place % len(data)] = value
    whole = outcome([bytes(data)])
    chunked = outcome(cut(bytes(data), places))
    assert comparable(chunked[0]) == comparable(whole[0])
    assert chunked[1:] == whole[1:]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=3))
def test_noise_gives_frames_or_a_frame_error(data: bytes, places: list[int]) -> None:
    assert outcome([data])[1:] == outcome(cut(data, places))[1:]


@given(strategies.frames)
def test_a_decoder_asks_for_no_byte_beyond_the_frame(frame: bytes) -> None:
    decoder = FrameDecoder(LIMIT)
    assert decoder.feed(frame[:-1]) == []
    assert len(decoder.feed(frame[-1:])) == 1


def test_an_announced_length_reserves_nothing() -> None:
    decoder = FrameDecoder(1 << 30)
    tracemalloc.start()
    try:
        decoder.feed((1 << 30).to_bytes(4, "big") + b"abc")
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_a_large_frame_in_small_chunks_is_held_once() -> None:
    entry = seal_entry(CHECKED + bytes(4 << 20))
    data = encode_send(SEND, entry)
    decoder = FrameDecoder(8 << 20)
    tracemalloc.start()
    try:
        for start in range(0, len(data) - 1000, 1000):
            assert decoder.feed(data[start : start + 1000]) == []
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    finally:
        tracemalloc.stop()
    (frame,) = decoder.feed(data[decoder.buffered_size :])
    assert frame.entry == entry
    assert decoder.buffered_size == 0


def ack_of(ids: bytes) -> bytes:
    """The ACK command whose message ids are these bytes."""
    body = b"\x08\x01\x10\x00" + ids
    command = pb.BaseCommand(type=pb.BaseCommand.ACK).SerializeToString()
    return command + b"\x52" + varint(len(body)) + body


def varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def test_a_command_has_a_limit_of_its_own() -> None:
    """However large a frame may be: the bytes of a command become objects many times their size."""
    tiny = b"\x1a\x04\x08\x00\x10\x00"
    largest = ack_of(tiny * ((MAX_COMMAND_SIZE - 12) // len(tiny)))
    assert MAX_COMMAND_SIZE - len(tiny) <= len(largest) <= MAX_COMMAND_SIZE
    (frame,) = FrameDecoder(8 << 20).feed(raw_frame(largest))
    assert isinstance(frame, Frame)
    assert len(frame.command.ack.message_id) > 170_000
    too_large = raw_frame(ack_of(tiny * (5_000_000 // len(tiny))))
    with pytest.raises(FrameTooLarge):
        FrameDecoder(8 << 20).feed(too_large)
    head_only = FrameDecoder(8 << 20)
    assert head_only.feed(too_large[:7]) == []
    with pytest.raises(FrameTooLarge):
        head_only.feed(too_large[7:8])


def test_the_peer_of_a_broker_may_allow_larger_commands() -> None:
    command = raw_frame(ack_of(b"\x1a\x04\x08\x00\x10\x00" * 300_000))
    assert FrameDecoder(8 << 20, 8 << 20).feed(command)


def test_a_million_missing_fields_make_one_short_sentence() -> None:
    with pytest.raises(MalformedCommand) as caught:
        FrameDecoder(8 << 20).feed(raw_frame(ack_of(b"\x1a\x00" * 500_000)))
    assert "ack.message_id.ledger_id is not set" in str(caught.value)
    assert len(str(caught.value)) < 200


def test_an_error_that_is_raised_again_gathers_no_traceback() -> None:
    decoder = FrameDecoder(LIMIT)
    errors: list[FrameError] = []
    for _ in range(3):
        with pytest.raises(FrameError) as raised:
            decoder.feed(bytes(64))
        errors.append(raised.value)
    assert errors[1] is not errors[2]
    assert str(errors[1]) == str(errors[2])


def test_a_decoder_and_its_error_are_freed_without_a_garbage_collection() -> None:
    class Watched(FrameDecoder):
        """Can be referred to weakly."""

        __slots__ = ("__weakref__",)

    gc.disable()
    try:
        decoder = Watched(LIMIT)
        freed = weakref.ref(decoder)
        for _ in range(2):
            with contextlib.suppress(FrameError):
                decoder.feed(bytes(64))
        del decoder
        assert freed() is None
    finally:
        gc.enable()


def test_the_limit_of_frames_can_be_raised_within_a_frame() -> None:
    frame = encode_send(SEND, ENTRY)
    with pytest.raises(FrameTooLarge, match="wait a little"):
        FrameDecoder(10, advice="wait a little.").feed(frame)
    decoder = FrameDecoder(10, advice="wait a little.")
    assert decoder.feed(frame[:3]) == []
    decoder.set_limit(LIMIT)
    assert decoder.feed(frame[3:]) == [SENT]
    assert decoder.feed(frame[:20]) == []
    decoder.discard()
    assert decoder.buffered_size == 0
