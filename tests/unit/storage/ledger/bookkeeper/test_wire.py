"""Frames to and from bookies: their bytes, wherever the network cuts them, and what is refused."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ledger.bookkeeper import bookie_protocol_pb2 as pb
from storage.ledger.bookkeeper import wire
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.wire import MalformedReply, Reply, ReplyDecoder
from storage.ledger.store import LedgerAssertion
from tests.unit.storage.ledger.bookkeeper.bookie_frames import (
    add_reply,
    auth_reply,
    batch_reply,
    frame,
    head,
    parse_request,
    read_reply,
    start_tls_reply,
)

KEY = bytes(range(20))
LIMIT = 5 * 1024 * 1024
LONG = st.integers(-(2**63), 2**63 - 1)
CODE = st.sampled_from([0, 1, 2, 100, 101, 102, 103, 104, 105, 106, 107])


def test_an_add() -> None:
    body = struct.pack(">qqqq", 3, 7, 6, 80) + b"SUM!" + b"data"
    sent = wire.encode_add_head(len(body), KEY, recovery=False) + body
    assert sent[:8].hex() == "00000040" + "02010000"
    assert len(sent) == wire.ADD_HEAD_BYTES + len(body) == 4 + 60 + 4
    asked = parse_request(sent[4:])
    assert (asked.flags, asked.ledger, asked.entry) == (0, 3, 7)
    assert (asked.master_key, asked.body) == (KEY, body)


def test_a_recovery_add_passes_a_fence_and_has_priority() -> None:
    assert wire.encode_add_head(40, KEY, recovery=True)[4:8].hex() == "02010006"


def test_a_read() -> None:
    sent = wire.encode_read(3, -1)
    assert sent.hex() == "00000014" + "02020000" + f"{3:016x}" + "f" * 16
    assert len(sent) == wire.READ_BYTES


def test_a_fencing_read_has_the_master_key_and_priority() -> None:
    sent = wire.encode_read(3, 5, KEY)
    assert sent.hex() == "00000028" + "02020005" + f"{3:016x}" + f"{5:016x}" + KEY.hex()
    assert len(sent) == wire.FENCING_READ_BYTES


def test_a_batch_read() -> None:
    sent = wire.encode_batch_read(3, 5, 77, 10, 2**40)
    assert len(sent) == wire.BATCH_READ_BYTES
    asked = parse_request(sent[4:])
    assert (asked.ledger, asked.entry, asked.request) == (3, 5, 77)
    assert (asked.max_entries, asked.max_bytes, asked.flags) == (10, 2**40, 0)
    assert parse_request(wire.encode_batch_read(3, 5, 77, 2**40, 1)[4:]).max_entries == 2**31 - 1


@pytest.mark.parametrize("key", [b"", KEY[:-1], KEY + b"x"])
def test_a_master_key_of_another_size_is_never_sent(key: bytes) -> None:
    with pytest.raises(LedgerAssertion):
        wire.encode_add_head(40, key, recovery=False)
    with pytest.raises(LedgerAssertion):
        wire.encode_read(1, 1, key)


def test_authentication() -> None:
    sent = wire.encode_auth("plugin", b"token")
    assert sent[4:8].hex() == "02030000"
    message = pb.AuthMessage.FromString(sent[8:])
    assert (message.authPluginName, message.payload) == ("plugin", b"token")
    (reply,) = ReplyDecoder(LIMIT).feed(auth_reply("plugin", b"answer"))
    assert reply.key == wire.AUTH_KEY
    assert wire.decode_auth(reply.payload[0]) == ("plugin", b"answer")
    with pytest.raises(MalformedReply):
        wire.decode_auth(b"\xff")


def test_start_tls_is_of_version_3() -> None:
    sent = wire.encode_start_tls(7)
    assert sent.hex() == "0000000b" + "0a06" + "080310091807" + "d20600"
    answer = start_tls_reply(7, 0)
    for end in range(len(answer)):
        assert wire.start_tls_status(answer[:end], 7) is None
    assert wire.start_tls_status(answer, 7) == 0
    assert wire.start_tls_status(start_tls_reply(7, 404), 7) == 404


@pytest.mark.parametrize(
    "received",
    [
        start_tls_reply(7, 0) + b"x",
        start_tls_reply(8, 0),
        frame(b"\xff\xff"),
        frame(b""),
        b"\x00\x10\x00\x00",
    ],
)
def test_other_answers_to_start_tls_are_refused(received: bytes) -> None:
    with pytest.raises(MalformedReply):
        wire.start_tls_status(received, 7)


# Answers


@st.composite
def replies(draw: st.DrawFn) -> tuple[bytes, Reply]:
    kind = draw(st.sampled_from([wire.ADD, wire.READ, wire.BATCH_READ, wire.AUTH]))
    code, ledger, entry = draw(CODE), draw(LONG), draw(LONG)
    if kind == wire.ADD:
        sent, payload = add_reply(code, ledger, entry), []
    elif kind == wire.READ:
        body = draw(st.binary(max_size=60))
        sent, payload = read_reply(code, ledger, entry, body), [body]
    elif kind == wire.BATCH_READ:
        payload = draw(st.lists(st.binary(max_size=30), max_size=4))
        sent = batch_reply(code, ledger, draw(LONG), entry, payload)
    else:
        body = draw(st.binary(max_size=5))
        message = pb.AuthMessage(authPluginName="p", payload=body).SerializeToString()
        return auth_reply("p", body), Reply(wire.AUTH_KEY, ReplyCode.OK, (message,))
    return sent, Reply((kind, ledger, entry), ReplyCode(code), payload)


@given(st.lists(replies(), max_size=6), st.data())
def test_replies_are_decoded_however_the_stream_is_split(
    made: list[tuple[bytes, Reply]], data: st.DataObject
) -> None:
    stream = b"".join(sent for sent, _ in made)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    decoder = ReplyDecoder(LIMIT)
    found: list[Reply] = []
    for start, end in pairwise(sorted([0, *cuts, len(stream)])):
        found.extend(decoder.feed(stream[start:end]))
    assert [(key, code, list(payload)) for key, code, payload in found] == [
        (reply.key, reply.code, list(reply.payload)) for _, reply in made
    ]


def test_answers_come_out_of_single_bytes() -> None:
    stream = add_reply(0, 1, 2) + read_reply(0, 1, 2, b"body") + batch_reply(0, 1, 2, 3, [b"a"])
    decoder = ReplyDecoder(LIMIT)
    found = [reply for byte in stream for reply in decoder.feed(bytes([byte]))]
    assert [reply.key for reply in found] == [(1, 1, 2), (2, 1, 2), (7, 1, 3)]


@pytest.mark.parametrize("code", [3, 50, 108, -1, -2, 2**31 - 1])
def test_an_unknown_code_is_never_taken_for_one_of_ours(code: int) -> None:
    for sent in (add_reply(code, 1, 2), read_reply(code, 1, 2), batch_reply(code, 1, 2, 3)):
        (reply,) = ReplyDecoder(LIMIT).feed(sent)
        assert reply.code is ReplyCode.OTHER


def test_every_known_code_comes_back() -> None:
    for code in ReplyCode:
        if code >= 0:
            (reply,) = ReplyDecoder(LIMIT).feed(add_reply(code, 1, 2))
            assert reply.code is code


def test_the_entry_is_the_one_that_was_asked_for() -> None:
    (reply,) = ReplyDecoder(LIMIT).feed(read_reply(0, 3, -1, b"body of entry 9"))
    assert reply.key == (wire.READ, 3, -1)


MALFORMED = [
    frame(b""),
    frame(b"abc"),
    b"\xff\xff\xff\xff" + bytes(4),
    (LIMIT - 3).to_bytes(4, "big") + bytes(4),
    frame(struct.pack(">Iiqq", head(1), 0, 1, 2) + b"more"),
    frame(struct.pack(">Iiq", head(1), 0, 1)),
    frame(struct.pack(">Iiq", head(2), 0, 1)),
    frame(struct.pack(">Iiqq", head(7), 0, 1, 2)),
    frame(struct.pack(">Iiqqq", head(7), 0, 1, 2, 3) + b"\x00\x00"),
    frame(struct.pack(">Iiqqq", head(7), 0, 1, 2, 3) + b"\x00\x00\x00\x05abcd"),
    frame(struct.pack(">Iiqqq", head(7), 0, 1, 2, 3) + b"\xff\xff\xff\xffabcd"),
    frame(struct.pack(">Iiqq", head(4), 0, 1, 2)),
    frame(struct.pack(">Iiqq", head(1, version=3), 0, 1, 2)),
    frame(struct.pack(">Iiqq", head(1, version=130), 0, 1, 2)),
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
]


@pytest.mark.parametrize("bad", MALFORMED)
def test_a_malformed_frame_ends_it_after_those_before(bad: bytes) -> None:
    decoder = ReplyDecoder(LIMIT)
    with pytest.raises(MalformedReply) as found:
        decoder.feed(add_reply(0, 1, 2) + bad)
    assert [reply.key for reply in found.value.replies_before] == [(1, 1, 2)]
    with pytest.raises(MalformedReply) as again:
        decoder.feed(add_reply(0, 1, 3))
    assert not again.value.replies_before


def test_an_answer_at_the_limit_is_read() -> None:
    body = bytes(LIMIT - 28)
    (reply,) = ReplyDecoder(LIMIT).feed(read_reply(0, 1, 2, body))
    assert reply.payload == (body,)
    with pytest.raises(MalformedReply):
        ReplyDecoder(LIMIT).feed(read_reply(0, 1, 2, body + b"x"))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        ReplyDecoder(LIMIT).feed(data)
    except MalformedReply:
        pass
