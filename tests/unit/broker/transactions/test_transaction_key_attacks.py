"""What clients and operators may try with transaction keys: odd names, wrong epochs, races."""

import asyncio
from urllib.parse import quote

import pytest

from broker.service import Broker
from protocol import pulsar_pb2 as pb
from protocol.key_hash import coordinator_of_key
from protocol.server_error import ServerError
from tests.support.key_client import KeyClient
from tests.support.raw_client import BrokerError
from tests.unit.broker.transactions.conftest import Connect, Kind
from tests.unit.broker.transactions.test_operations import Site, site
from txn.transaction_key import KeyName

__all__ = ["site"]

BASE = "/admin/v2/transactions/transaction-keys"
LONGEST = "\U0001f511" * 64
ODD = (
    *(".", "..", "../..", "a/../b", "/", "//", "a//b", "%", "%2F", "%2e%2e", "+", " ", "?x=1", "#"),
    *("\x00", "a\x00b", "\n", "\r\n", "\x1b[2J", "\x7f", "\ue000", "\uffff", "\U0010ffff"),
    *("\u202e", "ü", "u\u0308", "日本", "\U0001f511", "'\"\\;--", ":", "*", "~", LONGEST),
)


@pytest.mark.parametrize("key", ODD, ids=ascii)
async def test_an_odd_name_is_a_key_like_any(site: Site, key: str) -> None:
    client = KeyClient(site.client.raw, key)
    assert (await client.open()).epoch == 0
    txn = await client.begin()
    path = f"{BASE}?key={quote(key, safe='')}"
    shown = await site.rest.get(path)
    assert isinstance(shown, dict)
    assert (shown["key"], shown["epoch"], shown["transactionState"]) == (key, 0, "OPEN")
    listed = await site.rest.get(BASE)
    assert isinstance(listed, dict)
    assert [row["key"] for row in listed["keys"]] == [key]
    status, printed = await site.txn("keys", "list")
    assert status == 0
    assert len(printed.splitlines()) == 3, "one line each, whatever its name"
    assert printed.replace("\n", "").isprintable()
    status, printed = await site.txn("keys", "delete", key)
    assert status == 0, printed
    assert printed.replace("\n", "").isprintable()
    assert "no transaction key" in await site.rest.refused(404, "GET", path)
    assert txn


KEY = "k"
TOPIC = "persistent://public/default/t"
FURTHEST = 2**63 - 1


def refused(code: ServerError) -> "pytest.RaisesExc[BrokerError]":
    return pytest.raises(BrokerError, check=lambda error: error.code == code)


@pytest.mark.parametrize("epoch", [-(2**63), -2, 1, 2**31, FURTHEST])
async def test_epochs_that_nobody_was_given_are_refused(connect: Connect, epoch: int) -> None:
    client = KeyClient(await connect(), KEY)
    with refused(ServerError.NOT_ALLOWED_ERROR):
        await client.open(epoch)
    assert (await client.open()).epoch == 0
    txn = await client.begin()
    other = KeyClient(await connect(), KEY)
    for wrong in (other.open(epoch), other.attach(epoch)):
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await wrong
    other.epoch = epoch
    for wrong in (other.begin(), other.add(txn, TOPIC), other.end(txn)):
        with refused(ServerError.NOT_ALLOWED_ERROR):
            await wrong
    with refused(ServerError.NOT_ALLOWED_ERROR):
        await client.attach(epoch)
    client.epoch = 0
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


@pytest.mark.parametrize("turn", range(4))
async def test_many_that_open_and_attach_at_once(
    broker: Broker, connect: Connect, turn: int
) -> None:
    """However they meet, the newest holds it in the end, and every older connection is closed."""
    clients = [KeyClient(await connect(), KEY) for _ in range(8)]
    await clients[0].open()
    await clients[0].begin()
    keys = broker.transactions.coordinators.led()[clients[0].coordinator].keys
    done = await asyncio.gather(
        *(each.open() if n % 2 else each.attach(0) for n, each in enumerate(clients[turn:])),
        return_exceptions=True,
    )
    assert all(
        isinstance(each, ConnectionError) or each.code == ServerError.NOT_ALLOWED_ERROR
        for each in done
        if isinstance(each, BaseException) and isinstance(each, ConnectionError | BrokerError)
    ), done
    newest = (await keys.get(KeyName("", KEY))).record.epoch
    assert newest == len(clients[turn:]) // 2
    told = [
        each
        for each, answer in zip(clients[turn:], done, strict=True)
        if not isinstance(answer, BaseException)
    ]
    (holder,) = (each for each in told if each.epoch == newest)
    for each in told:
        if each is not holder:
            await each.raw.wait(each.raw.closed)
    await holder.attach(newest)
    assert keys.holders.count_of(KeyName("", KEY)) == 1


async def test_a_key_is_deleted_while_its_transaction_is_written_to(site: Site) -> None:
    client, broker = KeyClient(site.client.raw, KEY), site.broker
    await client.open()
    txn = await client.begin()
    await client.add(txn, TOPIC)
    writer = await client.raw.open("127.0.0.1", broker.port)
    producer = await writer.create_producer(TOPIC)
    named = {"txnid_most_bits": txn[0], "txnid_least_bits": txn[1]}

    async def send() -> None:
        await producer.send(
            b"late", send=pb.CommandSend(**named), metadata=pb.MessageMetadata(**named)
        )

    await send()
    sending = [asyncio.ensure_future(send()) for _ in range(20)]
    await site.rest.done("DELETE", f"{BASE}?key={KEY}")
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
