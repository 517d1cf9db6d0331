"""The key store: what K1, K3, K7 and K8 need of whatever metadata store it is on."""

import asyncio

import pytest

from config.bounds import TXN_KEY_BYTES, TXN_PAGE
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.store import ABSENT, MetadataStore, VersionConflict
from tests.contract.transaction_keys.conftest import COORDINATOR
from txn import key_records
from txn.key_store import TransactionKeyStore
from txn.records import Header, KeyEpoch, TxnState
from txn.transaction_key import (
    NO_EPOCH,
    KeyName,
    KeyRecord,
    KeyTransaction,
    mark_used,
    name_transaction,
    new_key_record,
    raise_epoch,
)

NAME = KeyName("", "k")
TXN = TxnId(COORDINATOR, 7)
LONGEST = "\U0001f511" * (TXN_KEY_BYTES // 4)
ODD = (
    *(".", "..", "...", "a/b", "/", "a//b", "-", "*", "%", "%2F", "+", " ", "a b", "~", "!"),
    *("\x00", "a\x00b", "\n", "\x7f", "\x9f", "\ue000", "\uffff", "\U0010ffff", "\u202e", "ü"),
    *("Ü", "u\u0308", "日本", "\U0001f511", "'\"\\;--", LONGEST),
)

ODD_OWNERS = ("", "bob", "a&b/../ü", LONGEST)


def holding(epoch: int = 0) -> KeyRecord:
    """Of a key that somebody opened."""
    return raise_epoch(new_key_record(1), epoch - 1, "me", 2)


async def names_in_pages(
    keys: TransactionKeyStore, limit: int, owner: str | None = None
) -> list[KeyName]:
    """Every key, or every one of an owner, by asking for one page after the other."""
    found: list[KeyName] = []
    after = ""
    while True:
        page, after = await keys.page(after, limit, owner=owner)
        assert len(page) <= limit
        found += [each.name for each in page]
        if not after:
            return found


async def test_a_key_is_what_was_put(keys: TransactionKeyStore) -> None:
    assert await keys.read(NAME) is None
    record = name_transaction(holding(5), TXN, "beginner", 3)
    made = await keys.create(NAME, record)
    assert (made.name, made.record) == (NAME, record)
    assert await keys.read(NAME) == made
    again = raise_epoch(made.record, NO_EPOCH, "you", 4)
    assert again.before == KeyTransaction(TXN)
    changed = await keys.change(made, again)
    assert await keys.read(NAME) == changed
    assert changed.record == again


async def test_a_key_is_changed_on_the_version_read_only(keys: TransactionKeyStore) -> None:
    first = await keys.create(NAME, new_key_record(1))
    with pytest.raises(VersionConflict):
        await keys.create(NAME, new_key_record(1))
    second = await keys.change(first, holding())
    for late in (keys.change(first, first.record), keys.delete(first)):
        with pytest.raises(VersionConflict):
            await late
    assert await keys.read(NAME) == second
    await keys.delete(second)
    for late in (keys.change(second, second.record), keys.delete(second)):
        with pytest.raises(VersionConflict):
            await late
    assert await keys.read(NAME) is None


async def test_a_write_of_the_same_record_is_another_version(keys: TransactionKeyStore) -> None:
    """Else a key that was deleted and made again in between would look as it was (K7)."""
    first = await keys.create(NAME, new_key_record(1))
    same = await keys.change(first, first.record)
    with pytest.raises(VersionConflict):
        await keys.change(first, holding())
    await keys.delete(same)
    made_again = await keys.create(NAME, new_key_record(1))
    assert made_again.record == first.record
    for earlier in (first, same):
        with pytest.raises(VersionConflict):
            await keys.change(earlier, holding())
        with pytest.raises(VersionConflict):
            await keys.delete(earlier)
    await keys.change(made_again, holding())


async def test_of_many_that_change_a_key_at_once_one_does(keys: TransactionKeyStore) -> None:
    made = await asyncio.gather(
        *(keys.create(NAME, new_key_record(n)) for n in range(8)), return_exceptions=True
    )
    (stored,) = (each for each in made if not isinstance(each, BaseException))
    assert all(isinstance(each, VersionConflict) for each in made if each is not stored)
    changed = await asyncio.gather(
        *(keys.change(stored, raise_epoch(stored.record, NO_EPOCH, f"{n}", n)) for n in range(8)),
        keys.delete(stored),
        return_exceptions=True,
    )
    assert sum(not isinstance(each, VersionConflict) for each in changed) == 1


async def test_floor_read_after_a_put_includes_earlier_deletions(
    keys: TransactionKeyStore, store: MetadataStore
) -> None:
    """K7: both are in one partition, so the read is not behind the put."""
    other = TransactionKeyStore(store, COORDINATOR)
    for epoch in range(20):
        held = await other.create(NAME, holding(epoch))

        async def delete(epoch: int = epoch, held: object = held) -> None:
            await other.raise_floor(epoch)
            await other.delete(held)  # type: ignore[arg-type]

        async def make() -> int:
            while True:
                try:
                    await keys.create(NAME, new_key_record(1))
                except VersionConflict:
                    await asyncio.sleep(0)
                    continue
                return await keys.read_floor()

        _, floor = await asyncio.gather(delete(), make())
        assert floor == epoch
        now = await keys.read(NAME)
        assert now is not None
        await keys.delete(now)


async def test_a_floor_only_rises(keys: TransactionKeyStore, store: MetadataStore) -> None:
    assert await keys.read_floor() == NO_EPOCH
    await asyncio.gather(*(keys.raise_floor(epoch) for epoch in (4, 7, 5, 0)))
    assert await keys.read_floor() == 7
    await keys.raise_floor(2)
    assert await keys.read_floor() == 7
    assert await TransactionKeyStore(store, CoordinatorId(2)).read_floor() == NO_EPOCH


async def test_odd_names_are_kept_apart(keys: TransactionKeyStore) -> None:
    """Whatever a client may choose, up to the longest path that there is."""
    names = [KeyName(owner, key) for owner in ODD_OWNERS for key in ODD]
    for number, name in enumerate(names):
        await keys.create(name, new_key_record(number))
    for number, name in enumerate(names):
        stored = await keys.read(name)
        assert stored is not None
        assert stored.record.created_ms == number, repr(name)
        assert await keys.read(KeyName("another", name.key)) is None
    found = await names_in_pages(keys, 7)
    assert len(found) == len(names)
    assert set(found) == set(names)


async def test_keys_are_listed_in_pages_by_coordinator(
    keys: TransactionKeyStore, store: MetadataStore
) -> None:
    others = {n: TransactionKeyStore(store, CoordinatorId(n)) for n in (0, 2, 30, 4)}
    names = [KeyName(owner, key) for owner in ("", "bob") for key in ("a", "a%", "a b", "ab", "b")]
    for name in names:
        await keys.create(name, new_key_record(1))
    for number, other in others.items():
        await other.create(KeyName("", f"of {number}"), new_key_record(1))
    for limit in (1, 2, 3, len(names), len(names) + 1):
        found = await names_in_pages(keys, limit)
        assert found == sorted(found, key=key_records.encoded_name)
        assert len(found) == len(names)
    assert set(found) == set(names)
    for owner in ("", "bo", "bob", "bob&a", "bobs"):
        of_owner = [name for name in found if name.owner == owner]
        for limit in (1, 3, len(names)):
            assert await names_in_pages(keys, limit, owner) == of_owner
        for after in (key_records.encoded_name(name) for name in names if name.owner != owner):
            page, _ = await keys.page(after, len(names), owner=owner)
            assert {each.name for each in page} <= set(of_owner), "another owner's place"
    assert await names_in_pages(others[0], 3) == [KeyName("", "of 0")]
    assert await TransactionKeyStore(store, CoordinatorId(5)).page("", 3) == ([], "")


async def test_key_present_throughout_is_listed_once_while_others_change(
    keys: TransactionKeyStore,
) -> None:
    """What was there all the time is listed once, wherever the list had come to."""
    stored = [await keys.create(KeyName("", f"{n}"), new_key_record(1)) for n in range(6)]
    first, after = await keys.page("", 3)
    assert [each.name.key for each in first] == ["0", "1", "2"]
    await keys.delete(stored[2])  # where the next page begins
    await keys.delete(stored[4])
    await keys.change(stored[5], holding())
    await keys.create(KeyName("", "21"), new_key_record(1))
    await keys.create(KeyName("", "00"), new_key_record(1))
    second, after = await keys.page(after, 3)
    assert [each.name.key for each in second] == ["21", "3", "5"]
    assert await keys.page(after, 3) == ([], "")


async def test_more_keys_than_a_page(keys: TransactionKeyStore) -> None:
    names = [KeyName("", f"{n:05}") for n in range(TXN_PAGE + 5)]
    for begin in range(0, len(names), 200):
        await asyncio.gather(
            *(keys.create(name, new_key_record(1)) for name in names[begin : begin + 200])
        )
    pages = [page async for page in keys.pages()]
    assert [len(page) for page in pages] == [TXN_PAGE, 5]
    assert [each.name for page in pages for each in page] == names


async def test_a_page_ends_with_so_many_bytes_of_keys(
    store: MetadataStore,
) -> None:
    page_bytes = 5 * len(key_records.encode_key(new_key_record(1)))
    keys = TransactionKeyStore(store, COORDINATOR, page_bytes=page_bytes)
    names = [KeyName("", f"{n:02}") for n in range(12)]
    for name in names:
        await keys.create(name, new_key_record(1))
    pages = [page async for page in keys.pages()]
    assert [len(page) for page in pages] == [5, 5, 2]
    assert [each.name for page in pages for each in page] == names


async def test_listed_key_can_be_changed_with_its_version(keys: TransactionKeyStore) -> None:
    """Rounds decide on what they listed: its versions are those that writes name."""
    await keys.create(NAME, holding())
    await keys.create(KeyName("", "l"), holding())
    (listed, idle), _ = await keys.page("", 2)
    changed = await keys.change(listed, mark_used(listed.record, 9))
    await keys.delete(idle)
    ((again,), _) = await keys.page("", 2)
    assert again == changed
    with pytest.raises(VersionConflict):
        await keys.delete(listed)


async def test_one_that_cannot_be_read_is_left_out(
    keys: TransactionKeyStore, store: MetadataStore
) -> None:
    for key in ("a", "z"):
        await keys.create(KeyName("", key), new_key_record(1))
    damaged = KeyName("", "damaged")
    await store.put(
        key_records.key_path(damaged),
        b"{",
        partition=key_records.partition_of(COORDINATOR),
        expect=ABSENT,
        indexes=key_records.key_indexes(COORDINATOR, damaged),
    )
    for limit in (1, 2, 3):
        assert [name.key for name in await names_in_pages(keys, limit)] == ["a", "z"]


async def test_the_end_of_the_last_transaction_is_noted_once(keys: TransactionKeyStore) -> None:
    """K8; of one that the key does not name (any more) nothing is written."""
    header = Header(TxnState.COMMITTED, 1, 1, 2, None, KeyEpoch(NAME.key, 0))
    await keys.note_end(TXN, header)
    assert await keys.read(NAME) is None
    made = await keys.create(NAME, name_transaction(holding(), TXN, "", 3))
    await keys.note_end(TxnId(COORDINATOR, 6), header)
    assert await keys.read(NAME) == made
    await keys.note_end(TXN, header)
    noted = await keys.read(NAME)
    assert noted is not None
    assert noted.record.transaction == KeyTransaction(TXN, TxnState.COMMITTED)
    await keys.note_end(TXN, header)
    assert await keys.read(NAME) == noted
    later = await keys.change(noted, raise_epoch(noted.record, NO_EPOCH, "you", 4))
    assert later.record.before == KeyTransaction(TXN, TxnState.COMMITTED)
