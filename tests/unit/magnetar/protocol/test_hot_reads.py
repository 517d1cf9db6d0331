"""READ_ENTRIES_RESPONSE by hand: the bytes of the protobuf encoder."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from magnetar.protocol.hot_reads import (
    ENTRY_OVERHEAD_BYTES,
    JOINED_BELOW_BYTES,
    encode_read_entries,
)

NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
DATA = st.one_of(
    st.binary(max_size=200), st.integers(JOINED_BELOW_BYTES - 2, JOINED_BELOW_BYTES + 2).map(bytes)
)
ENTRY = st.tuples(NUMBERS, NUMBERS, DATA, st.integers(0, 3))


@given(NUMBERS, NUMBERS, NUMBERS, st.lists(ENTRY, max_size=6), st.booleans())
def test_the_frame_is_that_of_the_protobuf_encoder(
    request_id: int,
    ledger_id: int,
    entry_id: int,
    entries: list[tuple[int, int, bytes, int]],
    at_end: bool,
) -> None:
    response = pb.CommandReadEntriesResponse(request_id=request_id)
    response.next.ledger_id, response.next.entry_id = ledger_id, entry_id
    for ledger, entry, data, visibility in entries:
        one = response.entries.add(ledger_id=ledger, entry_id=entry, data=data)
        if visibility:
            one.visibility = visibility  # type: ignore[assignment]
    if at_end:
        response.at_end = True
    expected = encode_command(
        pb.BaseCommand(type=pb.BaseCommand.READ_ENTRIES_RESPONSE, read_entries_response=response)
    )
    buffers = encode_read_entries(request_id, (ledger_id, entry_id), entries, at_end=at_end)
    assert b"".join(buffers) == expected
    large = [data for _, _, data, _ in entries if len(data) >= JOINED_BELOW_BYTES]
    assert all(any(data is buffer for buffer in buffers) for data in large)


@given(ENTRY)
def test_an_entry_takes_no_more_than_is_said(entry: tuple[int, int, bytes, int]) -> None:
    empty = encode_read_entries(1, (0, 0), [], at_end=False)
    one = encode_read_entries(1, (0, 0), [entry], at_end=False)
    lengths = 2 * 3  # the two lengths around the entries, which may grow
    assert sum(map(len, one)) - sum(map(len, empty)) <= (
        len(entry[2]) + ENTRY_OVERHEAD_BYTES + lengths
    )
