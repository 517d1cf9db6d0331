"""Keys as BookKeeper has them, records that keep what they do not know, ids given once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ledger.local.ledger_records import (
    ALLOWED,
    ID_GENERATOR,
    LedgerRecord,
    LedgerRecords,
    LedgerState,
    decode_record,
    encode_record,
    ledger_id_of,
    ledger_path,
    summarize_record,
)
from storage.ledger.store import LedgerAssertion, LedgerError
from storage.metadata.store import VersionConflict
from tests.unit.storage.ledger.local.support import new_metadata


@pytest.mark.parametrize(
    ("ledger_id", "path"),
    [
        (0, "/ledgers/00/0000/L0000"),
        (1200030004, "/ledgers/12/0003/L0004"),
        (2**31 - 2, "/ledgers/21/4748/L3646"),
        (2**31 - 1, "/ledgers/000/0000/0021/4748/L3647"),
        (2**63 - 1, "/ledgers/922/3372/0368/5477/L5807"),
    ],
)
def test_paths(ledger_id: int, path: str) -> None:
    assert ledger_path(ledger_id) == path
    assert ledger_id_of(path) == ledger_id


@given(st.integers(0, 2**63 - 1))
def test_every_id_comes_back(ledger_id: int) -> None:
    assert ledger_id_of(ledger_path(ledger_id)) == ledger_id


@pytest.mark.parametrize(
    "path",
    [
        "/ledgers/idgen",
        "/ledgers/00",
        "/ledgers/00/0000",
        "/ledgers/L0001",
        "/ledgers/a/L1",
        "/ledgers/21/4748/L3647",
        "/ledgers/000/0000/0021/4748/L3646",
    ],
)
def test_other_keys_are_no_ledgers(path: str) -> None:
    assert ledger_id_of(path) is None


RECORDS = st.builds(
    LedgerRecord,
    state=st.sampled_from(LedgerState),
    created_ms=st.integers(0, 2**53),
    last_entry_id=st.integers(-1, 2**53),
    length=st.integers(0, 2**53),
    custom=st.dictionaries(st.text(), st.binary()),
    unknown=st.dictionaries(st.sampled_from(["a", "futureField"]), st.integers() | st.text()),
)


@given(RECORDS)
def test_records_come_back(record: LedgerRecord) -> None:
    assert decode_record(encode_record(record), 1) == record


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"{}{}",
        b"\xff",
        b'{"state":"ODD","lastEntryId":0,"length":0,"ctime":0}',
    ],
)
def test_a_record_that_cannot_be_understood(value: bytes) -> None:
    with pytest.raises(LedgerError, match="record of ledger 7"):
        decode_record(value, 7)
    with pytest.raises(LedgerError, match="record of ledger 7"):
        summarize_record(value, 7)


@given(RECORDS)
def test_summary_has_state_and_end_of_the_record(record: LedgerRecord) -> None:
    found = summarize_record(encode_record(record), 1)
    assert found.is_closed == (record.state is LedgerState.CLOSED)
    assert found.last_entry_id == record.last_entry_id


@pytest.mark.parametrize(
    ("custom", "stream"),
    [
        ({"pulsar/managed-ledger": b"public/default/persistent/t"}, "public/default/persistent/t"),
        ({}, ""),
        ({"component": b"health"}, None),
    ],
)
def test_summary_names_the_topic_of_a_ledger_that_is_read(
    custom: dict[str, bytes], stream: str | None
) -> None:
    record = LedgerRecord(LedgerState.OPEN, 1, custom=custom)
    assert summarize_record(encode_record(record), 1).stream == stream


def test_states_move_only_forward() -> None:
    for before in LedgerState:
        for after in LedgerState:
            record = LedgerRecord(before, 0)
            if after in ALLOWED[before]:
                assert record.moved(after, 4, 9).last_entry_id == 4
            else:
                with pytest.raises(LedgerAssertion):
                    record.moved(after)
    assert ALLOWED[LedgerState.CLOSED] == frozenset()


async def test_ids_are_not_given_from_a_record_that_does_not_say_which_are_left_out() -> None:
    metadata = new_metadata()
    await LedgerRecords(metadata).leave_out(5)
    await metadata.put(ID_GENERATOR, b"five")
    with pytest.raises(LedgerError, match="restore it"):
        await LedgerRecords(metadata).take_id(above=0)


async def test_life_of_a_record() -> None:
    metadata = new_metadata()
    records = LedgerRecords(metadata)
    assert await records.last_id() is None
    first = await records.take_id(above=0)
    second = await LedgerRecords(metadata).take_id(above=0)
    far = await records.take_id(above=20)
    assert (first, second, far) == (1, 2, 21)
    assert await records.last_id() == 21
    await records.leave_out(1000)
    assert await LedgerRecords(metadata).take_id(above=0) > 1021
    record = LedgerRecord(LedgerState.OPEN, 5, custom={"component": b"managed-ledger"})
    stored = await records.create(far, record)
    with pytest.raises(VersionConflict):
        await records.create(far, record)
    await records.create(2**31 + 5, record)
    for parent in ("/ledgers", "/ledgers/00", "/ledgers/00/0000", "/ledgers/000/0000/0021"):
        found = await metadata.get(parent)
        assert found is not None
        assert found.value == b""
    assert await records.list_ids() == [21, 2**31 + 5]
    closed = await records.update(far, record.moved(LedgerState.CLOSED, 3, 9), stored.version)
    with pytest.raises(VersionConflict):
        await records.update(far, record, stored.version)
    assert await records.get(far) == closed
    await records.delete(far)
    await records.delete(far)
    assert await records.get(far) is None
    assert await metadata.get(ID_GENERATOR) is not None
