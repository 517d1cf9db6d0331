"""Transaction keys on the wire, over REST and in `magnetar txn keys`, the odd and the wrong too."""

import asyncio
from urllib.parse import quote

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.server_error import ServerError
from magnetar.protocol.txn_id import TxnId
from tests.support.embedded_broker import running
from tests.support.key_client import KeyClient
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError
from tests.support.waiting import until
from tests.unit.broker.transactions.conftest import Connect, Kind, TransactionClient
from tests.unit.broker.transactions.test_operations import Site, site
from txn.records import TxnState
from txn.transaction_key import KeyName

__all__ = ["site"]

KEY = "orders/eu 1"
TC = coordinator_of_key(KEY, 16)
TOPIC = "persistent://public/default/t"
BASE = "/admin/v2/transactions/transaction-keys"
ESCAPED = "orders%2Feu%201"
LONGEST = "\U0001f511" * 64
ODD = (
    *(".", "..", "../..", "a/../b", "/", "//", "a//b", "%", "%2F", "%2e%2e", "+", " ", "?x=1", "#"),
    *("\x00", "a\x00b", "\n", "\r\n", "\x1b[2J", "\x7f", "\ue000", "\uffff", "\U0010ffff"),
    *("\u202e", "ü", "u\u0308", "日本", "\U0001f511", "'\"\\;--", ":", "*", "~", LONGEST),
)
FURTHEST = 2**63 - 1
WRONG_EPOCHS = (-(2**63), -2, 1, 2**31, FURTHEST)
ROUNDS = 4


@pytest.fixture
async def first(connect: Connect) -> KeyClient:
    return KeyClient(await connect(), KEY)


@pytest.fixture
async def second(connect: Connect) -> KeyClient:
    return KeyClient(await connect(), KEY)


def refused(code: ServerError) -> "pytest.RaisesExc[BrokerError]":
    return pytest.raises(BrokerError, check=lambda error: error.code == int(code))


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
    zombie = KeyClient(await connect(), KEY, 0)
    await zombie.send(txn, TOPIC, b"while it is open")
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
        zombie.end((TC, 999)),
        zombie.attach(0),
        zombie.open(0),
    ):
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await late
    with pytest.raises(BrokerError):
        await zombie.send(txn, TOPIC, b"late")
    for expired in (second.add(txn, TOPIC), second.end(txn), second.end(txn, pb.ABORT)):
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


async def test_invalid_key_request_is_answered_with_its_own_response(first: KeyClient) -> None:
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
    keyed = await first.begin()
    elsewhere = KeyClient(first.raw, KEY, 0)
    elsewhere.coordinator = (TC + 1) % 16
    for wrong in (
        first.end(plain),
        unkeyed.end(keyed),
        unkeyed.add_partitions(keyed, TOPIC),
    ):
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await wrong
    with pytest.raises(BrokerError, match="is served by coordinator"):
        await elsewhere.begin()
    await unkeyed.end(plain)


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
    text = await metrics_text(broker)
    assert f"pulsar_txn_transaction_key_count{labels} 1.0" in text
    assert f"pulsar_txn_transaction_key_epoch{labels} 2.0" in text
    assert f"pulsar_txn_transaction_key_age{labels}" in text


# What may be tried


async def test_an_odd_name_is_a_key_like_any(site: Site) -> None:
    for key in ODD:
        client = KeyClient(site.client.raw, key)
        assert (await client.open()).epoch == 0, ascii(key)
        await client.begin()
    listed = await site.rest.get(BASE)
    assert isinstance(listed, dict)
    assert sorted(row["key"] for row in listed["keys"]) == sorted(ODD)
    status, printed = await site.txn("keys", "list")
    assert status == 0
    assert len(printed.splitlines()) == len(ODD) + 2, "one line each, whatever its name"
    assert printed.replace("\n", "").isprintable()
    raw = site.client.raw
    for key in ODD:
        path = f"{BASE}?key={quote(key, safe='')}"
        shown = await site.rest.get(path)
        assert isinstance(shown, dict)
        assert (shown["key"], shown["epoch"], shown["transactionState"]) == (key, 0, "OPEN")
        status, printed = await site.txn("keys", "delete", key)
        assert status == 0, printed
        assert printed.replace("\n", "").isprintable()
        assert "no transaction key" in await site.rest.refused(404, "GET", path), ascii(key)
    await raw.wait(raw.closed)


async def test_epochs_that_were_never_assigned_are_refused(connect: Connect) -> None:
    raw, other_raw = await connect(), await connect()
    for epoch in WRONG_EPOCHS:
        client, other = (KeyClient(each, f"at {epoch}") for each in (raw, other_raw))
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await client.open(epoch)
        assert (await client.open()).epoch == 0
        txn = await client.begin()
        for unopened in (other.open(epoch), other.attach(epoch), client.attach(epoch)):
            with refused(ServerError.NOT_ALLOWED_ERROR):
                await unopened
        other.epoch = epoch
        for wrong in (other.begin(), other.add(txn, TOPIC), other.end(txn)):
            with refused(ServerError.NOT_ALLOWED_ERROR):
                await wrong
        await client.end(txn)
        assert (await client.open(0)).last_committed


async def test_a_name_that_is_no_text_does_no_harm(broker: Broker, connect: Connect) -> None:
    """Protobuf lets any bytes through where proto2 says `string`."""
    raw = await connect()
    command = pb.BaseCommand(
        type=Kind.OPEN_TRANSACTION_KEY,
        open_transaction_key=pb.CommandOpenTransactionKey(
            request_id=7, tc_id=coordinator_of_key(KEY, 16), key="????", epoch=-1
        ),
    ).SerializeToString()
    frame = command.replace(b"????", b"\xff\xfe\x80a")
    raw.write((len(frame) + 4).to_bytes(4, "big") + len(frame).to_bytes(4, "big") + frame)
    await raw.wait(raw.closed)
    client = KeyClient(await connect(), KEY)
    assert (await client.open()).epoch == 0
    keys = broker.transactions.coordinators.led()[client.coordinator].keys
    assert len(keys.holders) == 1


async def test_of_many_that_open_and_attach_at_once_the_newest_holds_the_key(
    broker: Broker, connect: Connect
) -> None:
    """However they meet, and every older connection is closed."""
    for turn in range(ROUNDS):
        key = f"in turn {turn}"
        clients = [KeyClient(await connect(), key) for _ in range(8)]
        await clients[0].open()
        await clients[0].begin()
        keys = broker.transactions.coordinators.led()[clients[0].coordinator].keys
        asking = clients[turn:]
        done = await asyncio.gather(
            *(each.open() if n % 2 else each.attach(0) for n, each in enumerate(asking)),
            return_exceptions=True,
        )
        for answer in done:
            if isinstance(answer, BrokerError):
                assert answer.code == pb.NotAllowedError, done
            elif isinstance(answer, BaseException):
                assert isinstance(answer, ConnectionError), done
        newest = (await keys.get(KeyName("", key))).record.epoch
        assert newest == len(asking) // 2
        told = [
            each
            for each, answer in zip(asking, done, strict=True)
            if not isinstance(answer, BaseException)
        ]
        (holder,) = (each for each in told if each.epoch == newest)
        for each in told:
            if each is not holder:
                await each.raw.wait(each.raw.closed)
        await holder.attach(newest)
        assert keys.holders.count_of(KeyName("", key)) == 1


async def test_a_key_is_deleted_while_its_transaction_is_written_to(site: Site) -> None:
    client, broker = KeyClient(site.client.raw, KEY), site.broker
    await client.open()
    txn = await client.begin()
    await client.add(txn, TOPIC)
    writer = await client.raw.open("127.0.0.1", broker.port)
    producer = await writer.create_producer(TOPIC)
    most, least = txn

    async def send() -> None:
        sent = pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least)
        metadata = pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least)
        await producer.send(b"late", send=sent, metadata=metadata)

    await send()
    sending = [asyncio.ensure_future(send()) for _ in range(20)]
    await site.rest.done("DELETE", f"{BASE}?key={ESCAPED}")
    await asyncio.gather(*sending, return_exceptions=True)
    with pytest.raises(BrokerError):
        await send()
    await client.raw.wait(client.raw.closed)
    late = KeyClient(await client.raw.open("127.0.0.1", broker.port), KEY, 0)
    for request in (late.end(txn), late.add(txn, TOPIC), late.begin(), late.attach(0)):
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await request
    assert (await late.open()).epoch == 1
    await late.raw.close()
    await (await writer.create_producer(TOPIC)).send(b"after")
    earliest = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    consumer = await writer.subscribe(TOPIC, "s", earliest, permits=100)
    assert (await consumer.receive()).payload == b"after", "what was deleted is not read"
    await writer.close()


async def test_places_in_the_list_that_there_are_not(site: Site) -> None:
    await KeyClient(site.client.raw, KEY).open()
    for after in (
        "x",
        ":",
        "-1:",
        "3",
        "1:a:\n",
        "9999999:",
        "0:!",
        "0:\x00",
        "0:ü",
        "0:" + "x" * 2000,
    ):
        assert "no place" in await site.rest.refused(
            412, "GET", f"{BASE}?after={quote(after, safe='')}"
        )
    for after in ("0:", "0:%zz", "0:zz", "15:", "16:", "999999:x"):
        answer = await site.rest.get(f"{BASE}?after={quote(after, safe='')}")
        assert isinstance(answer, dict)
        assert answer["next"] is None
