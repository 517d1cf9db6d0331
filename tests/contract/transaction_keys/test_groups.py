"""Groups of attempts on a coordinator of their own, whatever metadata store that stands on."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from config.bounds import TXN_GROUP_HEADER_BYTES, TXN_GROUP_POSITIONS_BYTES
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import MetadataStore, VersionConflict
from tests.contract.transaction_keys.conftest import COORDINATOR
from txn import records
from txn.coordinator import Coordinator
from txn.counters import TransactionCounters
from txn.errors import InvalidTxnStatus, TransactionKeyFenced
from txn.group import Batch, GroupRecord, SegmentCount, bounded_commit, new_group
from txn.key_store import TransactionKeyStore
from txn.records import AckedPosition, AckRecord, Claim, Header, KeyEpoch, TxnState
from txn.store import TransactionStore
from txn.transaction_groups import CommittedGroup
from txn.transaction_key import NO_EPOCH, KeyName, OpenedKey

NAME = KeyName("", "k")
GROUP = TxnId(COORDINATOR, 7)
COMMIT, ABORT = TxnState.COMMITTED, TxnState.ABORTED
HEADER = Header(TxnState.OPEN, 60_000, 1, None, None, KeyEpoch("k", 0), new_group("n"))


@pytest.fixture
def transactions(store: MetadataStore) -> TransactionStore:
    return TransactionStore(store, TransactionCounters())


async def begin(led: Coordinator, epoch: int = 0, nonce: str = "n") -> TxnId:
    begun = await led.groups.begin_attempt(NAME, epoch, nonce, 60_000)
    assert begun is not None
    return begun.attempt


async def commit(
    led: Coordinator, winners: Sequence[TxnId], number: int = 0, epoch: int = 0, nonce: str = "n"
) -> CommittedGroup:
    whole = bounded_commit(Batch("q", number), "p", [(each, {}) for each in winners])
    return await led.groups.commit(NAME, epoch, nonce, winners[0].group, whole, winners)


async def test_two_leaders_give_attempts_of_one_group_and_commit_it_once(
    leaders: tuple[Coordinator, Coordinator], transactions: TransactionStore
) -> None:
    await leaders[0].keys.open(NAME, NO_EPOCH, "")
    found = await asyncio.gather(*(begin(leaders[n % 2]) for n in range(40)))
    assert len(set(found)) == 40
    (group,) = {each.group for each in found}
    answers = await asyncio.gather(*(commit(leaders[n % 2], found[:3]) for n in range(4)))
    assert set(answers) == {CommittedGroup(False, group)}
    states = [await transactions.read_header(each) for each in found]
    assert [each and each.header.state for each in states] == [COMMIT] * 3 + [ABORT] * 37
    record = GroupRecord(Batch("q", 0), "p", group)
    assert await leaders[1].keys.open(NAME, 0, "") == OpenedKey(1, group, COMMIT, record)
    for led in leaders:
        with pytest.raises(TransactionKeyFenced):
            await begin(led)
        with pytest.raises(InvalidTxnStatus):
            await begin(led, 1)
        assert (await commit(led, found, epoch=1)).done


async def test_a_commit_and_the_open_of_a_newer_epoch_decide_once(
    leaders: tuple[Coordinator, Coordinator], transactions: TransactionStore
) -> None:
    for number in range(10):
        await leaders[0].keys.open(NAME, NO_EPOCH, "")
        epoch, nonce = 2 * number, f"{number}"
        one = await begin(leaders[0], epoch, nonce)
        late, opened = await asyncio.gather(
            commit(leaders[0], [one], number, epoch, nonce),
            leaders[1].keys.open(NAME, NO_EPOCH, ""),
            return_exceptions=True,
        )
        assert isinstance(opened, OpenedKey)
        if isinstance(late, CommittedGroup):
            assert opened.ended is COMMIT
            assert opened.committed == GroupRecord(Batch("q", number), "p", one.group)
        else:
            assert isinstance(late, TransactionKeyFenced)
            assert opened.ended is ABORT


async def test_ended_group_records_its_commit(
    leaders: tuple[Coordinator, Coordinator],
    keys: TransactionKeyStore,
    transactions: TransactionStore,
) -> None:
    await leaders[0].keys.open(NAME, NO_EPOCH, "")
    one = await begin(leaders[0])
    await commit(leaders[0], [one])
    stored = await transactions.read_header(one.group)
    assert stored is not None
    for _ in range(2):
        await keys.note_end(one.group, stored.header)
        noted = await keys.read(NAME)
        assert noted is not None
        assert noted.record.committed == GroupRecord(Batch("q", 0), "p", one.group)
    assert await transactions.delete_header(stored)
    assert await commit(leaders[1], [one]) == CommittedGroup(False, one.group)
    assert await leaders[1].groups.begin_attempt(NAME, 0, "m", 1, Batch("q", 0)) is None


async def test_an_open_group_is_changed_on_the_version_read(
    transactions: TransactionStore,
) -> None:
    version = await transactions.create_header(GROUP, HEADER)
    longer = replace(HEADER, timeout_ms=90_000)
    changed = await transactions.change_header(GROUP, longer, version)
    for late in (
        transactions.change_header(GROUP, HEADER, version),
        transactions.end_header(GROUP, replace(HEADER, state=ABORT, finalized_ms=2), version),
    ):
        with pytest.raises(VersionConflict):
            await late
    due = [page async for page in transactions.open_headers(80_000)]
    assert due == [], "its place among deadlines has moved"
    ((stored,),) = [page async for page in transactions.open_headers(90_001)]
    assert (stored.header, stored.version) == (longer, changed)
    found = await transactions.read_header(GROUP.attempt_of(64))
    assert found is not None
    assert (found.txn, found.version) == (GROUP.attempt_of(64), changed)
    assert await transactions.read_header(GROUP.attempt_of(65)) is None


async def test_records_of_attempts_are_listed_with_their_group(
    transactions: TransactionStore,
) -> None:
    await transactions.create_header(GROUP, HEADER)
    attempts = [GROUP.attempt_of(index) for index in (1, 2, 2**19 - 1)]
    left: list[Claim | AckRecord] = []
    for attempt in attempts:
        claim = Claim(attempt, "a:b/c", 3, Position(1, 2))
        ack = AckRecord(
            attempt, "a:b/c", "sub", 3, 4, cumulative=False, acks=(AckedPosition(Position(1, 2)),)
        )
        await transactions.put_claim(claim)
        await transactions.put_ack(ack)
        left += [claim, ack]
        assert sorted(await transactions.operations_of(attempt), key=repr) == [ack, claim]
    assert await transactions.transactions_with_records(100) == {GROUP}
    assert sorted(await transactions.operations_of(GROUP), key=repr) == sorted(left, key=repr)
    assert {each.txn for each in await transactions.claims_on("a:b/c")} == set(attempts)
    assert {each.txn for each in await transactions.acks_on("a:b/c", "sub")} == set(attempts)
    for attempt in attempts:
        await transactions.delete_operation(attempt, records.claim_key(attempt, "a:b/c", 3))
    assert await transactions.operations_of(GROUP) == [
        each for each in sorted(left, key=repr) if isinstance(each, AckRecord)
    ]


async def test_the_largest_header_is_stored(
    leaders: tuple[Coordinator, Coordinator], transactions: TransactionStore
) -> None:
    led = leaders[0]
    await led.keys.open(NAME, NO_EPOCH, "")
    one = await begin(led)
    names = [f"segment://public/default/{'x' * 200}/{n:06}" for n in range(2600)]
    counts = {name: SegmentCount(10**9, 10**19) for name in names}
    positions = "x" * TXN_GROUP_POSITIONS_BYTES
    whole = bounded_commit(Batch("q", 0), positions, [(one, counts)])
    assert (await led.groups.commit(NAME, 0, "n", one.group, whole, [one])).group == one.group
    stored = await transactions.read_header(one.group)
    assert stored is not None
    assert stored.header.group is not None
    assert stored.header.group.commit == whole
    size = len(records.encode_header(stored.header))
    assert TXN_GROUP_HEADER_BYTES * 0.95 < size <= TXN_GROUP_HEADER_BYTES
    assert (await led.keys.open(NAME, 0, "")).committed == GroupRecord(
        Batch("q", 0), positions, one.group
    )
