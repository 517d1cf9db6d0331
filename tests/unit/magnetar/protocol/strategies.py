"""Hypothesis strategies for commands, entries and frames."""

from hypothesis import strategies as st

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.checksum import seal_entry
from magnetar.protocol.frames import encode_command, encode_send

u64 = st.integers(0, 2**64 - 1) | st.integers(0, 300)
i64 = st.integers(-(2**63), 2**63 - 1)
u32 = st.integers(0, 2**32 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """An entry as a producer makes it, checksum included."""
    metadata = pb.MessageMetadata(
        producer_name=draw(text), sequence_id=draw(u64), publish_time=draw(u64)
    ).SerializeToString()
    payload = draw(st.binary(max_size=200))
    return seal_entry(len(metadata).to_bytes(4, "big") + metadata + payload)


@st.composite
def sends(draw: st.DrawFn) -> bytes:
    command = pb.CommandSend(producer_id=draw(u64), sequence_id=draw(u64))
    return encode_send(pb.BaseCommand(type=pb.BaseCommand.SEND, send=command), draw(entries()))


@st.composite
def lookups(draw: st.DrawFn) -> bytes:
    command = pb.CommandLookupTopic(topic=draw(text), request_id=draw(u64))
    return encode_command(pb.BaseCommand(type=pb.BaseCommand.LOOKUP, lookup=command))


@st.composite
def acks(draw: st.DrawFn) -> bytes:
    ids = draw(st.lists(st.tuples(u64, u64, st.lists(i64, max_size=2)), max_size=4))
    command = pb.CommandAck(
        consumer_id=draw(u64),
        ack_type=pb.CommandAck.Individual,
        message_id=[pb.MessageIdData(ledger_id=a, entry_id=b, ack_set=c) for a, b, c in ids],
        properties=[pb.KeyLongValue(key=key, value=1) for key in draw(st.lists(text, max_size=1))],
    )
    return encode_command(pb.BaseCommand(type=pb.BaseCommand.ACK, ack=command))


pings = st.just(encode_command(pb.BaseCommand(type=pb.BaseCommand.PING, ping=pb.CommandPing())))
frames = sends() | lookups() | acks() | pings
