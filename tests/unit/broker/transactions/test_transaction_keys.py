"""Transaction keys on the wire, over REST and in `magnetar txn keys`."""

from urllib.parse import quote

import pytest

from broker.metrics import make_registry, metrics_text
from broker.service import Broker
from protocol import pulsar_pb2 as pb
from protocol.key_hash import coordinator_of_key
from protocol.server_error import ServerError
from tests.support.key_client import KeyClient
from tests.support.raw_client import BrokerError
from tests.support.waiting import until
from tests.unit.broker.transactions.conftest import Connect, Kind, TransactionClient, running
from tests.unit.broker.transactions.test_operations import Site, site
from txn.records import TxnState
from txn.txn_id import TxnId

__all__ = ["site"]

KEY = "orders/eu 1"
TC = coordinator_of_key(KEY, 16)
TOPIC = "persistent://public/default/t"
BASE = "/admin/v2/transactions/transaction-keys"
ESCAPED = "orders%2Feu%201"


@pytest.fixture
async def first(connect: Connect) -> KeyClient:
    return KeyClient(await connect(), KEY)


@pytest.fixture
async def second(connect: Connect) -> KeyClient:
    return KeyClient(await connect(), KEY)


def refused(code: ServerError) -> "pytest.RaisesExc[BrokerError]":
    return pytest.raises(BrokerError, check=lambda error: error.code == code)


async def test_keys_are_offered_while_transactions_are_on(
    first: KeyClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert first.raw.connected.transaction_keys
    directory = tmp_path_factory.mktemp("off")
    async with running(directory, transactions_enabled=False) as broker:
        client = KeyClient(await first.raw.open("127.0.0.1", broker.port), KEY)
        assert not client.raw.connected.transaction_keys
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await client.open()
        await client.raw.close()


async def test_a_key_fences_who_held_it_before(
    broker: Broker, first: KeyClient, second: KeyClient, connect: Connect
) -> None:
    opened = await first.open()
    assert (opened.txnid_most_bits, opened.epoch) == (TC, 0)
    assert not opened.HasField("last_txnid_least_bits")
    txn = await first.begin()
    await first.add(txn, TOPIC)
    await first.add_subscription(txn, TOPIC, "s")
    zombie = KeyClient(await connect(), KEY)
    zombie.epoch = 0
    opened = await second.open()
    assert opened.epoch == 1
    assert (opened.last_txnid_most_bits, opened.last_txnid_least_bits) == txn
    assert opened.HasField("last_committed")
    assert not opened.last_committed
    await first.raw.wait(first.raw.closed)
    for late in (
        zombie.begin(),
        zombie.add(txn, TOPIC),
        zombie.add_subscription(txn, TOPIC, "s"),
        zombie.end(txn),
        zombie.attach(0),
        zombie.open(0),
    ):
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await late
    for expired in (second.add(txn, TOPIC), second.end(txn)):
        with pytest.raises(BrokerError, match="ExpiredTransaction") as error:
            await expired
        assert error.value.code == pb.InvalidTxnStatus
    new = await second.begin()
    await second.add(new, TOPIC)
    await second.end(new)
    opened = await second.open(1)
    assert (opened.epoch, opened.last_committed) == (2, True)
    stored = await broker.transactions.store.read_header(TxnId(*txn))
    assert stored is not None
    assert stored.header.state is TxnState.ABORTED


async def test_attached_connections_share_the_epoch(
    broker: Broker, first: KeyClient, second: KeyClient, connect: Connect
) -> None:
    await first.open()
    await second.attach(0)
    txn = await first.begin("b")
    await second.add(txn, TOPIC)
    assert await second.begin("b") == txn
    with refused(ServerError.INVALID_TXN_STATUS):
        await second.begin()
    await second.end(txn)
    await KeyClient(await connect(), KEY).open()
    await first.raw.wait(first.raw.closed)
    await second.raw.wait(second.raw.closed)
    keys = broker.transactions.coordinators.led()[TC].keys
    await until(lambda: len(keys.holders) == 1)


async def test_what_is_wrong_is_answered_in_its_own_response(first: KeyClient) -> None:
    for key in ("a&b", "", "x" * 257):
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await KeyClient(first.raw, key).open()
    with refused(ServerError.NOT_ALLOWED_ERROR):
        await first.open(tc=(TC + 1) % 16)
    with refused(ServerError.TRANSACTION_COORDINATOR_NOT_FOUND):
        await first.open(tc=99)
    with refused(ServerError.NOT_ALLOWED_ERROR):
        await first.open(opener="x" * 1000)
    with refused(ServerError.NOT_ALLOWED_ERROR):
        await first.begin()
    answer = await TransactionClient(first.raw).raw_answer(
        Kind.OPEN_TRANSACTION_KEY,
        pb.CommandOpenTransactionKey(request_id=7, tc_id=TC, key=KEY, epoch=3),
    )
    body = answer.open_transaction_key_response
    assert (body.request_id, body.txnid_most_bits, body.error) == (7, TC, pb.NotAllowedError)
    assert not body.HasField("epoch")
    unkeyed = TransactionClient(first.raw)
    plain = await unkeyed.begin(TC)
    await first.open()
    with refused(ServerError.NOT_ALLOWED_ERROR):
        await first.end(plain)
    keyed = await first.begin()
    with refused(ServerError.NOT_ALLOWED_ERROR):
        await unkeyed.end(keyed)


async def test_sends_of_a_fenced_transaction_are_refused(
    first: KeyClient, second: KeyClient, connect: Connect
) -> None:
    await first.open()
    txn = await first.begin()
    await first.add(txn, TOPIC)
    zombie = await connect()
    producer = await zombie.create_producer(TOPIC)
    named = {"txnid_most_bits": txn[0], "txnid_least_bits": txn[1]}

    async def send() -> None:
        sent = pb.CommandSend(**named)
        await producer.send(b"x", send=sent, metadata=pb.MessageMetadata(**named))

    await send()
    await second.open()
    with pytest.raises(BrokerError):
        await send()


async def test_rest_and_command_line(site: Site) -> None:
    client = KeyClient(site.client.raw, KEY)
    await client.open()
    txn = await client.begin()
    for key in ("a", "b", "c"):
        await KeyClient(site.client.raw, key).open()
    found, after = [], ""
    while after is not None:
        page = await site.rest.get(f"{BASE}?limit=3&after={quote(after, safe='')}")
        assert isinstance(page, dict)
        found += page["keys"]
        after = page["next"]
    assert {row["key"] for row in found} == {KEY, "a", "b", "c"}
    assert len(found) == 4
    shown = await site.rest.get(f"{BASE}/{ESCAPED}")
    assert isinstance(shown, dict)
    assert (shown["epoch"], shown["transactionId"], shown["transactionState"]) == (
        0,
        f"{TC}_{txn[1]}",
        "OPEN",
    )
    assert (shown["owner"], shown["connections"]) == ("", 1)
    assert "out of bounds" in await site.rest.refused(412, "GET", f"{BASE}?limit=0")
    assert "no place" in await site.rest.refused(412, "GET", f"{BASE}?after=x")
    assert "no transaction key" in await site.rest.refused(404, "GET", f"{BASE}/{ESCAPED}?owner=x")
    status, printed = await site.txn("keys", "list", "--limit", "3")
    assert status == 0
    assert "3 shown; more with --after" in printed
    status, printed = await site.txn("keys", "get", KEY)
    assert status == 0
    assert f"{TC}_{txn[1]}" in printed
    status, printed = await site.txn("keys", "delete", KEY)
    assert status == 0
    assert f"Transaction key {KEY} is deleted." in printed
    await site.client.raw.wait(site.client.raw.closed)
    assert "no transaction key" in await site.rest.refused(404, "DELETE", f"{BASE}/{ESCAPED}")
    status, printed = await site.txn("keys", "get", KEY)
    assert status == 1
    stored = await site.broker.transactions.store.read_header(TxnId(*txn))
    assert stored is not None
    assert stored.header.state is TxnState.ABORTED


async def test_an_operator_ends_a_keyed_transaction(site: Site) -> None:
    client = KeyClient(site.client.raw, KEY)
    await client.open()
    txn = await client.begin()
    status, _ = await site.txn("end", f"{txn[0]}_{txn[1]}", "commit")
    assert status == 0
    assert (await client.open(0)).last_committed


async def test_metrics_of_keys(broker: Broker, first: KeyClient) -> None:
    led = broker.transactions.coordinators.led()
    await until(lambda: all(one.keys.tally is not None for one in led))
    for _ in range(3):
        await first.open()
    labels = f'{{cluster="standalone",coordinator_id="{TC}"}}'
    text = metrics_text(make_registry(broker)).decode()
    assert f"pulsar_txn_transaction_key_count{labels} 1.0" in text
    assert f"pulsar_txn_transaction_key_epoch{labels} 2.0" in text
    assert f"pulsar_txn_transaction_key_age{labels}" in text
