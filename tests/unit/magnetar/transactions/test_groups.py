"""Attempts and their groups, as a key asks for them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    CoordinatorNotFound,
    ExpiredTransaction,
    InvalidArgument,
    InvalidTransactionStatus,
    MagnetarError,
    NotAllowed,
    NotSupported,
    OperationTimedOut,
    PersistenceFailed,
    TransactionFailed,
    TransactionKeyFenced,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.attempt import Attempt
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.groups import CommittedGroup, GroupRecord, SegmentCount, Winner
from magnetar.transactions.keys import TransactionKey
from tests.unit.magnetar.transactions.fakes import FakeBroker, K

NUMBER = coordinator_of_key("job", 2)
GROUP = TxnId(NUMBER, 9)
ATTEMPT = TxnId(NUMBER, 3 << 44 | 9)
RECORD = pb.GroupRecord(
    query="q", batch=7, positions="{}", txnid_most_bits=NUMBER, txnid_least_bits=9
)


def begun(*, done: bool = False) -> pb.BaseCommand:
    told = pb.CommandBeginAttemptResponse(request_id=0)
    if done:
        told.done = True
    else:
        told.txnid_most_bits, told.txnid_least_bits = ATTEMPT
        told.group_least_bits = GROUP.least
    return pb.BaseCommand(type=K.BEGIN_ATTEMPT_RESPONSE, begin_attempt_response=told)


def committed(**fields: object) -> pb.BaseCommand:
    told = pb.CommandCommitGroupResponse(request_id=0, txnid_most_bits=NUMBER, **fields)  # type: ignore[arg-type]
    return pb.BaseCommand(type=K.COMMIT_GROUP_RESPONSE, commit_group_response=told)


def aborted(by_this: bool) -> pb.BaseCommand:
    told = pb.CommandAbortGroupResponse(request_id=0, aborted=by_this)
    return pb.BaseCommand(type=K.ABORT_GROUP_RESPONSE, abort_group_response=told)


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
async def key(broker: FakeBroker) -> AsyncIterator[TransactionKey]:
    broker.timeout_s = 1.0
    coordinators = Coordinators(broker.context)
    made = TransactionKey(broker.context, coordinators, "job")
    opened = pb.CommandOpenTransactionKeyResponse(request_id=0, epoch=4, last_group=RECORD)
    broker.answers[K.OPEN_TRANSACTION_KEY] = [
        pb.BaseCommand(type=K.OPEN_TRANSACTION_KEY_RESPONSE, open_transaction_key_response=opened)
    ]
    await made.open()
    yield made
    await made.close()
    await coordinators.close()


async def attempt_of(broker: FakeBroker, key: TransactionKey) -> Attempt:
    broker.answers[K.BEGIN_ATTEMPT] = [begun()]
    attempt = await key.begin_attempt("n")
    assert attempt is not None
    return attempt


def test_the_id_of_an_attempt_names_its_group() -> None:
    assert (ATTEMPT.group, ATTEMPT.attempt_index) == (GROUP, 3)
    assert (GROUP.group, GROUP.attempt_index) == (GROUP, 0)


async def test_the_opening_tells_the_last_group(key: TransactionKey) -> None:
    assert key.last_group == GroupRecord("q", 7, "{}", GROUP)


async def test_an_attempt_is_asked_for_under_key_and_epoch(
    broker: FakeBroker, key: TransactionKey
) -> None:
    broker.answers[K.BEGIN_ATTEMPT] = [begun()]
    attempt = await key.begin_attempt("n", timeout_s=1.5, query="q", batch=8)
    assert attempt is not None
    assert (attempt.id, attempt.group) == (ATTEMPT, GROUP)
    asked = broker.asked[-1][2].begin_attempt
    assert (asked.tc_id, asked.key, asked.epoch, asked.nonce) == (NUMBER, "job", 4, "n")
    assert (asked.timeout_ms, asked.query, asked.batch) == (1500, "q", 8)


async def test_a_batch_that_is_done_has_no_attempt(broker: FakeBroker, key: TransactionKey) -> None:
    broker.answers[K.BEGIN_ATTEMPT] = [begun(done=True)]
    assert await key.begin_attempt("n", query="q", batch=7) is None


@pytest.mark.parametrize(
    "error", [CoordinatorNotFound("moved."), ConnectionLost("lost."), PersistenceFailed("full.")]
)
async def test_unanswered_begin_is_repeated_with_the_same_nonce(
    broker: FakeBroker, key: TransactionKey, error: MagnetarError
) -> None:
    broker.answers[K.BEGIN_ATTEMPT] = [error, error, begun()]
    assert await key.begin_attempt("n") is not None
    asked = [each.begin_attempt for _, _, each in broker.asked if each.type == K.BEGIN_ATTEMPT]
    assert [(each.nonce, each.epoch) for each in asked] == [("n", 4)] * 3


async def test_a_commit_names_its_winners(broker: FakeBroker, key: TransactionKey) -> None:
    broker.answers[K.COMMIT_GROUP] = [committed(group_least_bits=GROUP.least)]
    winner = Winner(ATTEMPT, {"segment://s": SegmentCount(3, -1)})
    done = await key.commit_group("n", GROUP, [winner], query="q", batch=8, positions="p")
    assert done == CommittedGroup(False, GROUP)
    asked = broker.asked[-1][2].commit_group
    assert (asked.key, asked.epoch, asked.nonce, asked.tc_id) == ("job", 4, "n", NUMBER)
    assert (asked.group_least_bits, asked.query, asked.batch, asked.positions) == (9, "q", 8, "p")
    (told,) = asked.winners
    assert told.attempt_least_bits == ATTEMPT.least
    (count,) = told.counts
    assert (count.segment, count.messages, count.hash_sum) == ("segment://s", 3, 2**64 - 1)


async def test_a_commit_that_is_too_large_tells_totals_or_is_refused(
    broker: FakeBroker, key: TransactionKey
) -> None:
    broker.answers[K.COMMIT_GROUP] = [committed(group_least_bits=GROUP.least)] * 2
    attempts = [TxnId(NUMBER, index << 44 | 9) for index in range(1, 2001)]
    counts = {f"segment://{'s' * 240}/{n}": SegmentCount(2, 2**63) for n in range(3)}
    few = [Winner(attempt, counts) for attempt in attempts[:1200]]
    await key.commit_group("n", GROUP, few, query="q", batch=8)
    asked = broker.asked[-1][2].commit_group
    assert not asked.totals
    assert {len(each.counts) for each in asked.winners} == {3}

    many = [Winner(attempt, counts) for attempt in attempts]
    await key.commit_group("n", GROUP, many, query="q", batch=8)
    asked = broker.asked[-1][2].commit_group
    assert [each.attempt_least_bits for each in asked.winners] == [each.least for each in attempts]
    assert not any(each.counts for each in asked.winners)
    assert {each.segment: (each.messages, each.hash_sum) for each in asked.totals} == dict.fromkeys(
        counts, (4000, 0)
    )

    asked_before = len(broker.asked)
    with pytest.raises(InvalidArgument, match="fewer tasks"):
        await key.commit_group("n", GROUP, many, query="q", batch=8, positions="p" * 1024 * 1024)
    assert len(broker.asked) == asked_before


async def test_a_commit_of_nothing_and_one_that_was_done(
    broker: FakeBroker, key: TransactionKey
) -> None:
    broker.answers[K.COMMIT_GROUP] = [committed(done=True)]
    assert await key.commit_group("n", None, [], query="q", batch=8) == CommittedGroup(True, None)
    asked = broker.asked[-1][2].commit_group
    assert not asked.HasField("group_least_bits")
    assert not asked.HasField("positions")


async def test_a_commit_without_an_answer_is_never_taken_for_done(
    broker: FakeBroker, key: TransactionKey
) -> None:
    broker.answers[K.COMMIT_GROUP] = [ConnectionLost("lost.") for _ in range(1000)]
    with pytest.raises(OperationTimedOut, match="did not say"):
        await key.commit_group("n", GROUP, [], query="q", batch=8)


@pytest.mark.parametrize(
    ("told", "raised"),
    [
        (InvalidTransactionStatus("The group is aborted."), InvalidTransactionStatus),
        (InvalidTransactionStatus("ExpiredTransaction: an older epoch."), ExpiredTransaction),
        (NotAllowed("An older epoch."), TransactionKeyFenced),
    ],
)
async def test_refusals_are_told_as_elsewhere(
    broker: FakeBroker,
    key: TransactionKey,
    told: MagnetarError,
    raised: type[MagnetarError],
) -> None:
    for kind in (K.BEGIN_ATTEMPT, K.COMMIT_GROUP, K.EXTEND_GROUP):
        broker.answers[kind] = [told]
    broker.answers[K.ATTACH_TRANSACTION_KEY] = [NotAllowed("An older epoch.")]
    with pytest.raises(raised):
        await key.begin_attempt("n")
    with pytest.raises(raised):
        await key.commit_group("n", GROUP, [], query="q", batch=8)
    with pytest.raises(raised):
        await key.extend_group(GROUP, 3)
    assert key.is_fenced == (raised is TransactionKeyFenced)


async def test_not_allowed_answer_does_not_fence_the_key(
    broker: FakeBroker, key: TransactionKey
) -> None:
    broker.answers[K.COMMIT_GROUP] = [NotAllowed("No attempt of that index.")]
    with pytest.raises(NotAllowed, match="No attempt"):
        await key.commit_group("n", GROUP, [Winner(ATTEMPT, {})], query="q", batch=8)
    assert broker.names()[-1] == "ATTACH_TRANSACTION_KEY"
    assert not key.is_fenced


async def test_an_abort_of_what_is_not_there_is_fine(
    broker: FakeBroker, key: TransactionKey
) -> None:
    broker.answers[K.ABORT_GROUP] = [aborted(True), aborted(False), NotAllowed("An older epoch.")]
    broker.answers[K.ATTACH_TRANSACTION_KEY] = [NotAllowed("An older epoch.")]
    assert await key.abort_group()
    assert not await key.abort_group()
    assert not await key.abort_group()
    assert key.is_fenced
    assert not await key.abort_group()


async def test_an_extension_names_the_group(broker: FakeBroker, key: TransactionKey) -> None:
    await key.extend_group(ATTEMPT, 2.5)
    asked = broker.asked[-1][2].extend_group
    assert (asked.group_least_bits, asked.timeout_ms) == (GROUP.least, 2500)
    assert (asked.key, asked.epoch) == ("job", 4)


async def test_a_broker_without_groups(broker: FakeBroker, key: TransactionKey) -> None:
    for connection in broker.connections.values():
        connection.transaction_groups = False
    with pytest.raises(NotSupported):
        await key.begin_attempt("n")
    with pytest.raises(NotSupported):
        await key.abort_group()


async def test_invalid_group_arguments_are_refused(key: TransactionKey) -> None:
    with pytest.raises(InvalidArgument):
        await key.begin_attempt("")
    with pytest.raises(InvalidArgument):
        await key.begin_attempt("n", timeout_s=0)
    with pytest.raises(InvalidArgument, match="both"):
        await key.begin_attempt("n", query="q")
    with pytest.raises(InvalidArgument, match="batch"):
        await key.commit_group("n", GROUP, [], query="q", batch=-1)
    for wrong in (GROUP, TxnId(NUMBER, 3 << 44 | 8), TxnId(5, ATTEMPT.least)):
        with pytest.raises(InvalidArgument, match="no attempt"):
            await key.commit_group("n", GROUP, [Winner(wrong, {})], query="q", batch=1)


# Attempts


async def test_attempt_registers_its_segments_under_the_key(
    broker: FakeBroker, key: TransactionKey
) -> None:
    attempt = await attempt_of(broker, key)
    joined = attempt.writing_to("segment://s")
    assert joined is not None
    await joined
    assert attempt.writing_to("segment://s") is None
    asked = broker.asked[-1][2].add_partition_to_txn
    assert (asked.txnid_most_bits, asked.txnid_least_bits) == ATTEMPT
    assert (asked.transaction_key, asked.transaction_key_epoch) == ("job", 4)


async def test_settled_waits_for_everything(broker: FakeBroker, key: TransactionKey) -> None:
    attempt = await attempt_of(broker, key)
    await attempt.settled()  # nothing was sent
    outcomes = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for outcome in outcomes:
        attempt.track(outcome)
    waiting = [asyncio.ensure_future(attempt.settled()) for _ in range(2)]
    await asyncio.sleep(0)
    outcomes[0].set_result(None)
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    waiting.pop().cancel()
    outcomes[1].set_result(None)
    await waiting[0]


async def test_settled_raises_the_first_failure(broker: FakeBroker, key: TransactionKey) -> None:
    attempt = await attempt_of(broker, key)
    outcome = asyncio.get_running_loop().create_future()
    attempt.track(outcome)
    attempt.track(asyncio.get_running_loop().create_future())
    outcome.set_exception(PersistenceFailed("The disk is full."))
    with pytest.raises(PersistenceFailed, match="full"):
        await attempt.settled()
    with pytest.raises(TransactionFailed, match="cannot be used"):
        attempt.writing_to("segment://s")


async def test_a_closed_attempt_takes_nothing(broker: FakeBroker, key: TransactionKey) -> None:
    attempt = await attempt_of(broker, key)
    asked = len(broker.asked)
    async with attempt:
        pass
    assert len(broker.asked) == asked
    with pytest.raises(AlreadyClosed):
        attempt.track(asyncio.get_running_loop().create_future())
    with pytest.raises(AlreadyClosed):
        attempt.writing_to("segment://s")
