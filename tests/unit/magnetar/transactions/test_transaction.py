"""A transaction, with coordinators that do what the test says."""

import asyncio
from typing import cast

import pytest

from magnetar.context import ClientContext
from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    InvalidArgument,
    InvalidTransactionStatus,
    MagnetarError,
    OperationTimedOut,
    PersistenceFailed,
    TransactionConflict,
    TransactionFailed,
    TransactionNotFound,
    TransactionTimedOut,
)
from magnetar.opening import Opening
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.states import TransactionState as S
from magnetar.transactions.transaction import Transaction
from magnetar.wire.pool import ConnectionPool
from tests.support.bounds import set_bound

FAR_S = 60.0


class Fake:
    """Coordinators that note what they are asked, and answer when they are let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.errors: dict[str, MagnetarError] = {}
        self.gates: dict[str, asyncio.Event] = {}

    async def begin(self, ttl_ms: int, key: object = None) -> TxnId:
        await self._do(f"begin {ttl_ms}")
        return TxnId(1, 7)

    async def add_topic(self, txn: TxnId, topic: str, key: object = None) -> None:
        await self._do(f"topic {topic}")

    async def add_subscription(
        self, txn: TxnId, topic: str, subscription: str, key: object = None
    ) -> None:
        await self._do(f"subscription {topic} {subscription}")

    async def end(self, txn: TxnId, *, commit: bool, key: object = None) -> None:
        await self._do("commit" if commit else "abort")

    async def _do(self, what: str) -> None:
        self.asked.append(what)
        kind = what.split(maxsplit=1)[0]
        if kind in self.gates:
            await self.gates[kind].wait()
        if kind in self.errors:
            raise self.errors[kind]

    def transaction(self, timeout_s: float = FAR_S) -> Opening[Transaction]:
        context = ClientContext(cast("ConnectionPool", None))
        coordinators = cast("Coordinators", self)
        return Opening(lambda: Transaction(context, coordinators, timeout_s))


@pytest.fixture
def fake() -> Fake:
    return Fake()


def outcome() -> "asyncio.Future[object]":
    return asyncio.get_running_loop().create_future()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_leaving_the_block_commits(fake: Fake) -> None:
    async with fake.transaction() as txn:
        assert (txn.state, txn.id) == (S.OPEN, (1, 7))
        assert str(txn.id) == "1_7"
    assert txn.state is S.COMMITTED
    assert fake.asked == ["begin 60000", "commit"]


async def test_an_error_aborts_and_is_raised(fake: Fake) -> None:
    with pytest.raises(KeyError) as caught:
        async with fake.transaction() as txn:
            raise KeyError("mine")
    assert txn.state is S.ABORTED
    assert fake.asked[1:] == ["abort"]
    assert not hasattr(caught.value, "__notes__")


async def test_an_abort_that_fails_is_noted(fake: Fake) -> None:
    fake.errors["abort"] = TransactionNotFound("gone.")
    with pytest.raises(KeyError) as caught:
        async with fake.transaction() as txn:
            raise KeyError("mine")
    assert txn.state is S.FAILED
    assert "gone." in caught.value.__notes__[0]


async def test_commit_and_abort_by_hand(fake: Fake) -> None:
    async with fake.transaction() as txn:
        await txn.commit()
        await txn.commit()
    with pytest.raises(InvalidTransactionStatus):
        await txn.abort()
    async with fake.transaction() as other:
        await other.abort()
        await other.abort()
    with pytest.raises(InvalidTransactionStatus):
        await other.commit()
    assert fake.asked == ["begin 60000", "commit", "begin 60000", "abort"]


async def test_topics_and_subscriptions_are_registered_once(fake: Fake) -> None:
    fake.gates["topic"] = asyncio.Event()
    async with fake.transaction() as txn:
        told = txn.writing_to("a")
        assert told is not None
        assert txn.writing_to("a") is told
        acknowledging = txn.acknowledging_on("a", "sub")
        assert acknowledging is not None
        await acknowledging
        assert txn.acknowledging_on("a", "sub") is None
        assert not told.done()
        fake.gates["topic"].set()
        await told
        assert txn.writing_to("a") is None
        assert txn.writing_to("b") is not None
    assert fake.asked == ["begin 60000", "topic a", "subscription a sub", "topic b", "commit"]


async def test_commit_waits_for_what_is_in_it(fake: Fake) -> None:
    async with fake.transaction() as txn:
        sent, acknowledged = outcome(), outcome()
        txn.track(sent)
        txn.track(acknowledged)
        commit = asyncio.ensure_future(txn.commit())
        await turns()
        sent.set_result(1)
        await turns()
        assert txn.state is S.COMMITTING
        # A message that waits in a producer finds its segment only now.
        told = txn.writing_to("late")
        assert told is not None
        with pytest.raises(InvalidTransactionStatus):
            txn.track(outcome())
        acknowledged.set_result(None)
        await commit
        assert fake.asked[1:] == ["topic late", "commit"]
        with pytest.raises(InvalidTransactionStatus):
            txn.writing_to("a")


@pytest.mark.parametrize("when", ["before", "during"])
async def test_failed_operation_aborts_the_transaction(fake: Fake, when: str) -> None:
    failed = outcome()
    failure = PersistenceFailed("the disk is full.")
    with pytest.raises(TransactionFailed, match="disk is full") as caught:  # noqa: PT012
        async with fake.transaction() as txn:
            txn.track(failed)
            if when == "before":
                failed.set_exception(failure)
                await turns()
            else:
                asyncio.get_running_loop().call_soon(failed.set_exception, failure)
    assert caught.value.__cause__ is failure
    assert txn.state is S.ABORTED
    assert fake.asked[1:] == ["abort"]


async def test_cancelled_send_aborts_the_transaction(fake: Fake) -> None:
    with pytest.raises(TransactionFailed):  # noqa: PT012
        async with fake.transaction() as txn:
            sent = outcome()
            txn.track(sent)
            sent.cancel()
    assert txn.state is S.ABORTED


async def test_conflict_is_raised_unchanged(fake: Fake) -> None:
    with pytest.raises(TransactionConflict, match="twice"):  # noqa: PT012
        async with fake.transaction() as txn:
            acknowledged = outcome()
            txn.track(acknowledged)
            acknowledged.set_exception(TransactionConflict("twice."))
    assert txn.state is S.ABORTED


async def test_failed_topic_registration_aborts_the_transaction(fake: Fake) -> None:
    fake.errors["topic"] = TransactionNotFound("gone.")
    with pytest.raises(TransactionNotFound):  # noqa: PT012
        async with fake.transaction() as txn:
            told = txn.writing_to("a")
            assert told is not None
            with pytest.raises(TransactionNotFound):
                await told
            with pytest.raises(TransactionFailed):
                txn.writing_to("b")
    assert txn.state is S.ABORTED


async def test_the_deadline(fake: Fake) -> None:
    with pytest.raises(TransactionTimedOut):  # noqa: PT012
        async with fake.transaction(timeout_s=0.02) as txn:
            while txn.state is S.OPEN:
                await asyncio.sleep(0.005)
            assert txn.state is S.TIMED_OUT
            with pytest.raises(TransactionTimedOut):
                txn.writing_to("a")
            with pytest.raises(TransactionTimedOut):
                txn.track(outcome())
            await txn.abort()
    assert fake.asked == ["begin 20"]


async def test_the_deadline_while_commit_waits(fake: Fake) -> None:
    txn = await fake.transaction(timeout_s=0.02)
    txn.track(outcome())
    with pytest.raises(TransactionTimedOut):
        await txn.commit()
    assert txn.state is S.TIMED_OUT
    await txn.abort()
    await txn.close()
    assert fake.asked == ["begin 20"]


async def test_no_deadline_once_the_broker_is_asked(fake: Fake) -> None:
    fake.gates["commit"] = asyncio.Event()
    async with fake.transaction(timeout_s=0.01) as txn:
        commit = asyncio.ensure_future(txn.commit())
        await asyncio.sleep(0.03)
        before = txn.state
        fake.gates["commit"].set()
        await commit
    assert (before, txn.state) == (S.COMMITTING, S.COMMITTED)


async def test_a_cancelled_body_aborts_behind(fake: Fake) -> None:
    fake.gates["abort"] = asyncio.Event()
    made: list[Transaction] = []

    async def body() -> None:
        async with fake.transaction() as txn:
            made.append(txn)
            await asyncio.Event().wait()

    task = asyncio.ensure_future(body())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = made[0].state
    fake.gates["abort"].set()
    await made[0].close()
    assert (before, made[0].state) == (S.ABORTING, S.ABORTED)


async def test_a_cancelled_commit_goes_on(fake: Fake) -> None:
    fake.gates["commit"] = asyncio.Event()
    with pytest.raises(TimeoutError) as caught:
        async with fake.transaction() as txn:
            await asyncio.wait_for(txn.commit(), 0.01)
    before = txn.state
    assert "is committing" in caught.value.__notes__[0]
    fake.gates["commit"].set()
    await txn.commit()
    assert (before, txn.state) == (S.COMMITTING, S.COMMITTED)
    assert fake.asked[1:] == ["commit"]


@pytest.mark.parametrize("error", [ConnectionLost("lost."), OperationTimedOut("late.")])
async def test_an_end_of_unknown_outcome(fake: Fake, error: MagnetarError) -> None:
    fake.errors["commit"] = error
    with pytest.raises(OperationTimedOut, match="whether transaction 1_7 was committed") as caught:
        async with fake.transaction() as txn:
            pass
    assert caught.value.__cause__ is error
    assert txn.state is S.FAILED


async def test_a_commit_that_is_refused(fake: Fake) -> None:
    fake.errors["commit"] = InvalidTransactionStatus("it was aborted.")
    with pytest.raises(InvalidTransactionStatus, match="it was aborted"):
        async with fake.transaction() as txn:
            pass
    assert txn.state is S.FAILED
    with pytest.raises(InvalidTransactionStatus, match="it was aborted"):
        await txn.commit()


async def test_a_beginning_that_fails(fake: Fake) -> None:
    fake.errors["begin"] = ConnectionLost("lost.")
    with pytest.raises(ConnectionLost):
        await fake.transaction()
    assert fake.asked == ["begin 60000"]


async def test_a_cancelled_beginning_aborts_what_it_began(fake: Fake) -> None:
    fake.gates["begin"] = asyncio.Event()
    task = asyncio.ensure_future(_entered(fake.transaction()))
    await turns()
    task.cancel()
    await turns()
    fake.gates["begin"].set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.asked == ["begin 60000", "abort"]


async def _entered(opening: Opening[Transaction]) -> Transaction:
    return await opening


async def test_close_aborts_what_is_open(fake: Fake) -> None:
    txn = await fake.transaction()
    await txn.close()
    assert txn.state is S.ABORTED
    await txn.close()
    assert fake.asked[1:] == ["abort"]


async def test_before_it_has_begun(fake: Fake) -> None:
    context = ClientContext(cast("ConnectionPool", None))
    txn = Transaction(context, cast("Coordinators", fake))
    with pytest.raises(AlreadyClosed):
        txn.writing_to("a")
    with pytest.raises(AlreadyClosed):
        await txn.commit()
    with pytest.raises(AlreadyClosed):
        _ = txn.id
    with pytest.raises(InvalidArgument):
        Transaction(context, cast("Coordinators", fake), timeout_s=0)


async def test_follower_is_called_once_when_the_transaction_is_over(fake: Fake) -> None:
    told: list[bool] = []
    async with fake.transaction() as txn:
        txn.when_over(told.append)
        assert told == []
    assert told == [True]
    txn.when_over(told.append)
    await turns()
    assert told == [True, True]
    aborted = await fake.transaction()
    aborted.when_over(told.append)
    await aborted.abort()
    assert told == [True, True, False]


@pytest.mark.parametrize("followed", ["before", "after"])
async def test_timed_out_transaction_aborts_before_its_followers_are_called(
    fake: Fake, followed: str
) -> None:
    told: list[bool] = []
    fake.gates["abort"] = asyncio.Event()
    txn = await fake.transaction(timeout_s=0.01)
    if followed == "before":
        txn.when_over(told.append)
    txn.track(outcome())
    with pytest.raises(TransactionTimedOut):
        await txn.commit()
    if followed == "after":
        txn.when_over(told.append)
    await turns()
    assert fake.asked == ["begin 10", "abort"]
    assert told == []
    fake.gates["abort"].set()
    await turns()
    assert told == [False]


async def test_an_unknown_end_is_known_by_the_refusal_to_abort(fake: Fake) -> None:
    told: list[bool] = []
    fake.errors["commit"] = ConnectionLost("lost.")
    fake.errors["abort"] = InvalidTransactionStatus("It is committed.")
    txn = await fake.transaction()
    txn.when_over(told.append)
    with pytest.raises(OperationTimedOut):
        await txn.commit()
    await turns()
    assert told == [True]


async def test_close_aborts_what_waits_to_be_committed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "TXN_CLOSE_S", 0.05)
    txn = await fake.transaction()
    txn.track(outcome())
    commit = asyncio.ensure_future(txn.commit())
    await turns()
    await txn.close()
    assert fake.asked == ["begin 60000", "abort"]
    assert txn.state is S.ABORTED
    with pytest.raises(TransactionFailed):
        await commit
