"""Who coordinates, and what is asked again."""

import asyncio

import pytest

from magnetar.errors import (
    ConnectionLost,
    CoordinatorNotFound,
    ExpiredTransaction,
    InvalidArgument,
    InvalidTransactionStatus,
    NotAllowed,
    NotSupported,
    TransactionKeyFenced,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.coordinator_watch import leaders_in
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.keys import TransactionKey
from magnetar.wire.attachment import AttachmentState
from tests.support.waiting import until
from tests.unit.magnetar.transactions.fakes import FakeBroker, K


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


def test_coordinator_without_an_address_is_left_out() -> None:
    snapshot = pb.TcAssignmentsSnapshot(parallelism=3)
    snapshot.assignments.add(tc_id=2, broker_service_url="two", broker_service_url_tls="two-tls")
    snapshot.assignments.add(tc_id=0, broker_service_url="zero")
    snapshot.assignments.add(tc_id=1)
    assert list(leaders_in(snapshot, tls=False).items()) == [(0, "zero"), (2, "two")]
    assert list(leaders_in(snapshot, tls=True).items()) == [(2, "two-tls")]


async def test_transactions_begin_in_turn_from_coordinator_1(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    begun = [await coordinators.begin(1000) for _ in range(3)]
    assert [txn.most for txn in begun] == [1, 0, 1]
    assert broker.names() == [
        "TC_CLIENT_CONNECT_REQUEST",
        "NEW_TXN",
        "TC_CLIENT_CONNECT_REQUEST",
        "NEW_TXN",
        "NEW_TXN",
    ]
    assert broker.asked[0][0] == "pulsar://one"
    request = broker.asked[1][2].new_txn
    assert (request.txn_ttl_millis, request.tc_id, request.scalable) == (1000, 1, True)
    assert not request.HasField("transaction_key")
    await coordinators.close()


async def test_every_request_is_of_the_scalable_kind(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    txn = TxnId(1, 9)
    await coordinators.add_topic(txn, "segment")
    await coordinators.add_subscription(txn, "segment", "sub")
    await coordinators.end(txn, commit=False)
    connect, topic, subscription, end = (command for _, _, command in broker.asked)
    assert connect.tc_client_connect_request.scalable
    assert topic.add_partition_to_txn.scalable
    assert list(topic.add_partition_to_txn.partitions) == ["segment"]
    assert subscription.add_subscription_to_txn.scalable
    assert subscription.add_subscription_to_txn.subscription[0].subscription == "sub"
    assert end.end_txn.scalable
    assert end.end_txn.txn_action == pb.TxnAction.ABORT
    assert (end.end_txn.txnid_most_bits, end.end_txn.txnid_least_bits) == (1, 9)
    await coordinators.close()


async def test_a_beginning_goes_to_the_next_one(broker: FakeBroker) -> None:
    broker.answers[K.NEW_TXN] = [CoordinatorNotFound("moved.")]
    coordinators = Coordinators(broker.context)
    assert (await coordinators.begin(1000)).most == 0
    await coordinators.close()


@pytest.mark.parametrize("error", [CoordinatorNotFound("moved."), ConnectionLost("lost.")])
async def test_an_end_is_asked_for_again(
    broker: FakeBroker, error: CoordinatorNotFound | ConnectionLost
) -> None:
    broker.answers[K.END_TXN] = [error, error]
    coordinators = Coordinators(broker.context)
    await coordinators.end(TxnId(1, 9), commit=True)
    assert broker.names().count("END_TXN") == 3
    await coordinators.close()


async def test_a_coordinator_that_moves_is_followed(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    await coordinators.end(TxnId(1, 9), commit=True)
    broker.urls[1] = "pulsar://other"
    broker.tell_all()
    await coordinators.end(TxnId(1, 9), commit=True)
    assert broker.asked[-1][0] == "pulsar://other"
    await coordinators.close()


async def test_a_lost_watch_does_not_stop_anything(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    await coordinators.end(TxnId(1, 9), commit=True)
    broker.connections["pulsar://any"].lose()
    broker.features = pb.FeatureFlags()
    await coordinators.end(TxnId(1, 9), commit=True)
    await coordinators.close()


async def test_a_broker_without_discovery(broker: FakeBroker) -> None:
    broker.features = pb.FeatureFlags()
    coordinators = Coordinators(broker.context)
    for _ in range(2):
        with pytest.raises(NotSupported):
            await coordinators.begin(1000)
    # Switched on meanwhile.
    broker.features = pb.FeatureFlags(supports_tc_metadata_discovery=True)
    broker.connections.clear()
    await coordinators.begin(1000)
    await coordinators.close()


async def test_transactions_that_are_off(broker: FakeBroker) -> None:
    broker.answers[K.TC_CLIENT_CONNECT_REQUEST] = [NotAllowed("off.")]
    coordinators = Coordinators(broker.context)
    with pytest.raises(NotAllowed):
        await coordinators.end(TxnId(1, 9), commit=True)
    await coordinators.end(TxnId(1, 9), commit=True)
    await coordinators.close()


async def test_the_word_of_an_expired_transaction(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    broker.answers[K.END_TXN] = [
        InvalidTransactionStatus("ExpiredTransaction: opened anew."),
        InvalidTransactionStatus("aborted."),
    ]
    with pytest.raises(ExpiredTransaction):
        await coordinators.end(TxnId(1, 9), commit=True)
    with pytest.raises(InvalidTransactionStatus) as caught:
        await coordinators.end(TxnId(1, 9), commit=True)
    assert type(caught.value) is InvalidTransactionStatus
    await coordinators.close()


# Keys


async def test_a_key_is_opened_and_named_in_every_request(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing", 3)
    number = coordinator_of_key("billing", 2)
    await key.open()
    assert key.epoch == 4
    opened = broker.asked[-1][2].open_transaction_key
    assert (opened.tc_id, opened.key, opened.epoch) == (number, "billing", 3)
    assert len(opened.opener) == 32
    txn = await coordinators.begin(1000, key)
    assert txn.most == number
    await coordinators.add_topic(txn, "segment", key)
    await coordinators.add_subscription(txn, "segment", "sub", key)
    await coordinators.end(txn, commit=True, key=key)
    begin = broker.asked[-4][2].new_txn
    keyed = (
        begin,
        broker.asked[-3][2].add_partition_to_txn,
        broker.asked[-2][2].add_subscription_to_txn,
        broker.asked[-1][2].end_txn,
    )
    for request in keyed:
        assert (request.transaction_key, request.transaction_key_epoch) == ("billing", 4)
    assert len(begin.transaction_key_beginner) == 32
    await key.close()
    await coordinators.close()


async def test_a_beginning_under_a_key_keeps_its_name(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing")
    await key.open()
    broker.answers[K.NEW_TXN] = [ConnectionLost("lost.")]
    await coordinators.begin(1000, key)
    names = {
        command.new_txn.transaction_key_beginner
        for _, name, command in broker.asked
        if name == "NEW_TXN"
    }
    assert len(names) == 1
    await coordinators.begin(1000, key)
    assert broker.asked[-1][2].new_txn.transaction_key_beginner not in names
    await key.close()
    await coordinators.close()


async def test_a_beginning_that_was_given_up_is_undone_before_the_next(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing")
    await key.open()
    broker.gates[K.NEW_TXN] = asyncio.Event()
    given_up = asyncio.ensure_future(coordinators.begin(60_000, key))
    await until(lambda: broker.asked[-1][1] == "NEW_TXN")
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    del broker.asked[:-1]
    broker.gates.clear()
    txn = await coordinators.begin(1000, key)
    assert [name for _, name, _ in broker.asked] == ["NEW_TXN", "NEW_TXN", "END_TXN", "NEW_TXN"]
    first, again, end, last = (command for _, _, command in broker.asked)
    beginner = first.new_txn.transaction_key_beginner
    assert again.new_txn.transaction_key_beginner == beginner
    assert end.end_txn.txn_action == pb.TxnAction.ABORT
    assert end.end_txn.txnid_least_bits != txn.least
    assert last.new_txn.transaction_key_beginner != beginner
    await coordinators.begin(1000, key)
    assert broker.begun == 3
    await key.close()
    await coordinators.close()


async def test_a_beginning_that_was_refused_leaves_nothing_to_undo(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing")
    await key.open()
    broker.answers[K.NEW_TXN] = [InvalidTransactionStatus("Another one is open.")]
    with pytest.raises(InvalidTransactionStatus):
        await coordinators.begin(1000, key)
    assert key.unanswered is None
    await key.close()
    await coordinators.close()


async def test_an_opening_that_was_not_answered_is_the_same_again(broker: FakeBroker) -> None:
    broker.answers[K.OPEN_TRANSACTION_KEY] = [ConnectionLost("lost.")]
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing")
    await key.open()
    first, again = (
        command.open_transaction_key
        for _, name, command in broker.asked
        if name == "OPEN_TRANSACTION_KEY"
    )
    assert first.opener == again.opener
    assert first.epoch == again.epoch == -1
    await key.close()
    await coordinators.close()


async def test_after_a_reconnect_it_attaches_first(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing")
    await key.open()
    number = coordinator_of_key("billing", 2)
    broker.connections[broker.urls[number]].lose()
    del broker.asked[:]
    await coordinators.begin(1000, key)
    assert broker.names() == ["TC_CLIENT_CONNECT_REQUEST", "ATTACH_TRANSACTION_KEY", "NEW_TXN"]
    assert broker.asked[1][2].attach_transaction_key.epoch == 4
    await key.close()
    await coordinators.close()


async def test_closed_and_then_refused_is_fenced(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing")
    await key.open()
    broker.answers[K.ATTACH_TRANSACTION_KEY] = [NotAllowed("epoch 5 is the newest.")]
    number = coordinator_of_key("billing", 2)
    broker.connections[broker.urls[number]].lose()
    await until(lambda: key.is_fenced)
    for _ in range(2):
        with pytest.raises(TransactionKeyFenced, match="epoch 5"):
            await coordinators.begin(1000, key)
    assert key.state is AttachmentState.FAILED
    assert "NEW_TXN" not in broker.names()
    await key.close()
    await coordinators.close()


@pytest.mark.parametrize("kind", [K.NEW_TXN, K.END_TXN])
async def test_a_request_that_is_refused_fences(broker: FakeBroker, kind: int) -> None:
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing", 3, attach=True)
    await key.open()
    assert key.epoch == 3
    broker.answers[kind] = [NotAllowed("epoch 5 is the newest.")]
    work = (
        coordinators.begin(1000, key)
        if kind == K.NEW_TXN
        else coordinators.end(TxnId(1, 9), commit=True, key=key)
    )
    with pytest.raises(TransactionKeyFenced):
        await work
    assert key.is_fenced
    await key.close()
    await coordinators.close()


async def test_brokers_without_keys(broker: FakeBroker) -> None:
    broker.transaction_keys = False
    coordinators = Coordinators(broker.context)
    with pytest.raises(NotSupported):
        await TransactionKey(broker.context, coordinators, "billing").open()
    assert "OPEN_TRANSACTION_KEY" not in broker.names()
    await coordinators.close()


async def test_a_first_opening_that_is_not_allowed_is_not_fenced(broker: FakeBroker) -> None:
    broker.answers[K.OPEN_TRANSACTION_KEY] = [NotAllowed("too many.")]
    coordinators = Coordinators(broker.context)
    key = TransactionKey(broker.context, coordinators, "billing")
    with pytest.raises(NotAllowed):
        await key.open()
    assert not key.is_fenced
    await coordinators.close()


@pytest.mark.parametrize("name", ["", "a&b", "x" * 257])
def test_names_that_cannot_be(broker: FakeBroker, name: str) -> None:
    coordinators = Coordinators(broker.context)
    with pytest.raises(InvalidArgument):
        TransactionKey(broker.context, coordinators, name)


def test_epochs_that_cannot_be(broker: FakeBroker) -> None:
    coordinators = Coordinators(broker.context)
    with pytest.raises(InvalidArgument):
        TransactionKey(broker.context, coordinators, "billing", -2)
    with pytest.raises(InvalidArgument):
        TransactionKey(broker.context, coordinators, "billing", -1, attach=True)
