"""The life of a transaction on the wire, and what clients get wrong."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId
from security.identity import Identity, Method, Principal, Role
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until
from tests.unit.broker.transactions.conftest import Connect, Kind, TransactionClient
from txn.records import TxnState

TOPIC = "persistent://public/default/t"


async def header_state(broker: Broker, txn: tuple[int, int]) -> TxnState | None:
    stored = await broker.transactions.store.read_header(TxnId(*txn))
    return None if stored is None else stored.header.state


async def test_the_handshake_says_that_coordinators_are_found_by_watch(connect: Connect) -> None:
    client = await connect()
    assert client.connected.feature_flags.supports_tc_metadata_discovery


async def test_whole_life_of_a_transaction(broker: Broker, txn_client: TransactionClient) -> None:
    snapshot = (await txn_client.watch(7).next()).watch_tc_assignments_update.snapshot
    assert snapshot.parallelism == 16
    assert [one.tc_id for one in snapshot.assignments] == list(range(16))
    assert {one.broker_service_url for one in snapshot.assignments} == {broker.placement.broker_url}
    await txn_client.attach(3)
    txn = await txn_client.begin(3)
    assert txn == (3, 0)
    assert await txn_client.begin(3) == (3, 1)
    await txn_client.add_partitions(txn, TOPIC)
    await txn_client.add_subscription(txn, TOPIC, "s")
    await txn_client.end(txn)
    assert await header_state(broker, txn) is TxnState.COMMITTED
    assert await header_state(broker, (3, 1)) is TxnState.OPEN
    await txn_client.end((3, 1), pb.ABORT)
    assert await header_state(broker, (3, 1)) is TxnState.ABORTED
    assert broker.transactions.coordinators.open_transactions() == []


async def test_end_doubled_is_fine_and_the_other_way_is_refused(
    txn_client: TransactionClient,
) -> None:
    txn = await txn_client.begin()
    await asyncio.gather(txn_client.end(txn), txn_client.end(txn), txn_client.end(txn))
    await txn_client.end(txn)
    with pytest.raises(BrokerError) as refused:
        await txn_client.end(txn, pb.ABORT)
    assert refused.value.code == pb.InvalidTxnStatus
    assert "COMMITTED already" in refused.value.message


async def test_commit_and_abort_at_once_end_it_once(
    broker: Broker, connect: Connect, txn_client: TransactionClient
) -> None:
    other = TransactionClient(await connect())
    for _ in range(20):
        txn = await txn_client.begin()
        outcomes = await asyncio.gather(
            txn_client.end(txn, pb.COMMIT), other.end(txn, pb.ABORT), return_exceptions=True
        )
        failed = [one for one in outcomes if isinstance(one, BrokerError)]
        assert [one.code for one in failed] == [pb.InvalidTxnStatus]
        won = TxnState.COMMITTED if outcomes[0] is None else TxnState.ABORTED
        assert await header_state(broker, txn) is won


async def test_end_before_add_refuses_the_add(txn_client: TransactionClient) -> None:
    txn = await txn_client.begin()
    await txn_client.end(txn)
    for late in (
        txn_client.add_partitions(txn, TOPIC),
        txn_client.add_subscription(txn, TOPIC, "s"),
    ):
        with pytest.raises(BrokerError) as refused:
            await late
        assert refused.value.code == pb.InvalidTxnStatus


async def test_end_from_another_connection_after_the_first_has_gone(
    broker: Broker, connect: Connect
) -> None:
    first = TransactionClient(await connect())
    txn = await first.begin(5)
    await first.raw.close()
    await TransactionClient(await connect()).end(txn)
    assert await header_state(broker, txn) is TxnState.COMMITTED


async def test_an_end_whose_client_goes_away_is_finished(broker: Broker, connect: Connect) -> None:
    client = TransactionClient(await connect())
    txn = await client.begin()
    client.raw.send(
        Kind.END_TXN,
        pb.CommandEndTxn(
            request_id=99, txnid_least_bits=txn[1], txn_action=pb.COMMIT, scalable=True
        ),
    )
    await client.raw.close()
    coordinators = broker.transactions.coordinators
    await until(lambda: not coordinators.open_transactions())
    assert await header_state(broker, txn) is TxnState.COMMITTED


async def test_end_without_an_action_is_refused_and_ends_nothing(
    broker: Broker, txn_client: TransactionClient
) -> None:
    txn = await txn_client.begin()
    end = pb.CommandEndTxn(txnid_most_bits=txn[0], txnid_least_bits=txn[1], scalable=True)
    with pytest.raises(BrokerError, match="neither commit nor abort") as refused:
        await txn_client.raw.request(Kind.END_TXN, end)
    assert refused.value.code == pb.NotAllowedError
    assert await header_state(broker, txn) is TxnState.OPEN


async def test_an_unknown_transaction_is_not_found_and_not_made(
    broker: Broker, txn_client: TransactionClient
) -> None:
    with pytest.raises(BrokerError) as refused:
        await txn_client.end((0, 4711))
    assert refused.value.code == pb.TransactionNotFound
    assert await header_state(broker, (0, 4711)) is None


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.NEW_TXN, pb.CommandNewTxn(request_id=1, tc_id=77, scalable=True)),
        (
            Kind.ADD_PARTITION_TO_TXN,
            pb.CommandAddPartitionToTxn(
                request_id=1, txnid_most_bits=77, partitions=[TOPIC], scalable=True
            ),
        ),
        (
            Kind.ADD_PARTITION_TO_TXN,
            pb.CommandAddPartitionToTxn(
                request_id=1, txnid_most_bits=77, partitions=["not a topic:/"], scalable=True
            ),
        ),
        (
            Kind.ADD_SUBSCRIPTION_TO_TXN,
            pb.CommandAddSubscriptionToTxn(request_id=1, txnid_most_bits=77, scalable=True),
        ),
        (
            Kind.END_TXN,
            pb.CommandEndTxn(request_id=1, txnid_most_bits=77, txn_action=pb.COMMIT, scalable=True),
        ),
        (Kind.END_TXN, pb.CommandEndTxn(request_id=1, txnid_most_bits=77, scalable=True)),
    ],
)
async def test_every_refusal_names_its_coordinator(
    txn_client: TransactionClient, kind: "pb.BaseCommand.Type", body: object
) -> None:
    answer = await txn_client.raw_answer(kind, body)
    field = {
        Kind.NEW_TXN: "new_txn_response",
        Kind.ADD_PARTITION_TO_TXN: "add_partition_to_txn_response",
        Kind.ADD_SUBSCRIPTION_TO_TXN: "add_subscription_to_txn_response",
        Kind.END_TXN: "end_txn_response",
    }[kind]
    response = getattr(answer, field)
    assert response.txnid_most_bits == 77
    assert response.HasField("error")
    assert response.request_id == 1


async def test_every_answer_names_its_transaction(txn_client: TransactionClient) -> None:
    """Errors too, which is not only that of a wrong coordinator."""
    least = (await txn_client.begin(7))[1]
    for kind, field, command in (
        (Kind.ADD_PARTITION_TO_TXN, "add_partition_to_txn", pb.CommandAddPartitionToTxn),
        (Kind.ADD_SUBSCRIPTION_TO_TXN, "add_subscription_to_txn", pb.CommandAddSubscriptionToTxn),
        (Kind.END_TXN, "end_txn", partial(pb.CommandEndTxn, txn_action=pb.COMMIT)),
    ):
        for request_id, (given, error) in enumerate(
            ((least, None), (4711, pb.TransactionNotFound)), 5
        ):
            request = command(
                request_id=request_id, txnid_most_bits=7, txnid_least_bits=given, scalable=True
            )
            answer = await txn_client.raw_answer(kind, request)
            response = getattr(answer, f"{field}_response")
            assert (response.request_id, response.txnid_most_bits) == (request_id, 7)
            assert response.txnid_least_bits == given
            assert (response.error if response.HasField("error") else None) == error


async def test_a_transaction_is_there_for_the_principal_that_began_it(
    broker: Broker, connect: Connect
) -> None:
    alice = TransactionClient(await connect())
    (connection,) = broker.connections
    connection.principal = Principal(Identity(Role("alice"), Method.TOKEN))
    txn = await alice.begin()
    stored = await broker.transactions.store.read_header(TxnId(*txn))
    assert stored is not None
    assert stored.header.owner == "alice"
    nobody = TransactionClient(await connect())
    for request in (
        nobody.add_partitions(txn, TOPIC),
        nobody.add_subscription(txn, TOPIC, "s"),
        nobody.end(txn),
    ):
        with pytest.raises(BrokerError) as refused:
            await request
        assert refused.value.code == pb.TransactionNotFound
    await alice.end(txn)


async def test_a_coordinator_that_is_not_led_here_is_not_found(
    broker: Broker, txn_client: TransactionClient
) -> None:
    for request in (txn_client.attach(16), txn_client.begin(16), txn_client.end((16, 0))):
        with pytest.raises(BrokerError) as refused:
            await request
        assert refused.value.code == pb.TransactionCoordinatorNotFound
        assert "numbered from 0" in refused.value.message


async def test_transactions_switched_off(tmp_path: Path) -> None:
    async with running(tmp_path, transactions_enabled=False) as broker:
        client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
        assert not client.raw.connected.feature_flags.supports_tc_metadata_discovery
        update = (await client.watch(1).next()).watch_tc_assignments_update
        assert update.error == pb.NotAllowedError
        assert not update.HasField("snapshot")
        with pytest.raises(BrokerError, match="switched off"):
            await client.begin()
        await client.raw.close()


async def test_open_transactions_of_a_coordinator_are_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, transaction_max_open_per_coordinator=3) as broker:
        client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
        begun = await asyncio.gather(*(client.begin() for _ in range(5)), return_exceptions=True)
        refused = [one for one in begun if isinstance(one, BrokerError)]
        assert [one.code for one in refused] == [pb.TooManyRequests] * 2
        assert "transaction_max_open_per_coordinator" in refused[0].message
        await client.begin(1)
        open_one = next(one for one in begun if not isinstance(one, BaseException))
        await client.end(open_one)
        await client.begin()
        await client.raw.close()


async def test_open_transactions_survive_a_restart_with_their_deadlines(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
        kept, short = await client.begin(2), await client.begin(2, ttl_ms=300)
        await client.raw.close()
    async with running(tmp_path) as broker:
        client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
        fresh = await client.begin(2)
        assert fresh not in (kept, short)
        led = broker.transactions.coordinators.led
        await until(lambda: sum(one.counters.timed_out for one in led()) == 1)
        assert await header_state(broker, short) is TxnState.ABORTED
        left = broker.transactions.coordinators.open_transactions()
        assert [stored.txn for stored in left] == [kept, fresh]
        await client.end(kept)
        await client.raw.close()


async def test_another_number_of_coordinators_is_refused_with_the_right_one(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, transaction_coordinators=4):
        pass
    with pytest.raises(Exception, match=r"with 4 .* is 8: set it to 4"):
        async with running(tmp_path, transaction_coordinators=8):
            pass


async def test_transaction_timeout_is_bounded(
    broker: Broker, txn_client: TransactionClient
) -> None:
    for asked_ms in (2_000, 0, 2**64 - 1):
        await txn_client.begin(ttl_ms=asked_ms)
    kept = broker.transactions.coordinators.open_transactions()
    assert [stored.header.timeout_ms for stored in kept] == [2_000, 60_000, 24 * 3600 * 1000]


async def test_watches_are_bounded_and_closed(
    broker: Broker, txn_client: TransactionClient
) -> None:
    sessions = [txn_client.watch(number) for number in range(101)]
    updates = [(await one.next()).watch_tc_assignments_update for one in sessions]
    assert [one.HasField("snapshot") for one in updates] == [True] * 100 + [False]
    assert updates[-1].error == pb.TooManyRequests
    txn_client.raw.send(
        Kind.WATCH_TC_ASSIGNMENTS_CLOSE, pb.CommandWatchTcAssignmentsClose(watch_id=0)
    )
    assert (await txn_client.watch(200).next()).watch_tc_assignments_update.HasField("snapshot")


async def test_lost_coordinator_leader_is_elected_again_and_watchers_are_notified(
    broker: Broker, txn_client: TransactionClient
) -> None:
    session = txn_client.watch(1)
    await session.next()
    txn = await txn_client.begin(4)
    await broker.metadata.delete("/txn/tc/leader/4")
    await until(lambda: not session.updates.empty())
    told = (await session.next()).watch_tc_assignments_update.snapshot
    assert len(told.assignments) == 16
    await until(lambda: broker.transactions.coordinators.leads(4))  # type: ignore[arg-type]
    open_ones = broker.transactions.coordinators.open_transactions
    await until(lambda: [stored.txn for stored in open_ones()] == [txn])
    await txn_client.end(txn)
