"""A receipt is lost, and the segment is sealed before the producer is back: stored once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import magnetar
from magnetar.errors import OperationTimedOut
from tests.client.conftest import MakeTopic, Service, Topic, rest
from tests.client.test_produce import stored, values
from tests.support.broker_process import running
from tests.support.losing_relay import LosingRelay, losing

WAIT_S = 30
KEYS = ("a", "b", "c", "d")
pytestmark = pytest.mark.magnetar_only("it does not know what is sent again")


@asynccontextmanager
async def through_relay(url: str) -> AsyncIterator[tuple[LosingRelay, magnetar.Client]]:
    """A client that is cut off when a receipt is to be lost, until it is let in."""
    async with losing(url) as relay, magnetar.connect(relay.url) as client:
        try:
            yield relay, client
        finally:
            relay.let_in()


async def split(topic: Topic) -> None:
    for segment in await topic.active():
        await topic.split(segment)


async def merge(topic: Topic) -> None:
    await topic.merge(*await topic.active_by_range())


async def split_twice_and_merge(topic: Topic) -> None:
    await split(topic)
    await split(topic)
    first, second, *_ = await topic.active_by_range()
    await topic.merge(first, second)


async def lose_one(
    relay: LosingRelay, producer: magnetar.Producer[bytes], *, after: int
) -> list["asyncio.Future[magnetar.MessageId]"]:
    """Messages of all keys, two of each; after so many receipts one is lost, and the connection."""
    relay.lose_receipt(after=after)
    sent = [
        producer.send_nowait(b"%s%d" % (key.encode(), number), key=key)
        for number in range(2)
        for key in KEYS
    ]
    await asyncio.wait_for(relay.lost_receipt.wait(), WAIT_S)
    return sent


def assert_once_and_in_order(found: list[bytes]) -> None:
    assert sorted(found) == sorted(b"%s%d" % (k.encode(), n) for n in range(2) for k in KEYS)
    for key in KEYS:
        of_key = [each for each in found if each.startswith(key.encode())]
        assert of_key == [b"%s0" % key.encode(), b"%s1" % key.encode()]


@pytest.mark.parametrize("reshape", [split, merge, split_twice_and_merge])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_message_without_receipt_is_stored_once_though_its_segment_is_sealed(
    client: magnetar.Client,
    topic: MakeTopic,
    service: Service,
    reshape: Callable[[Topic], Awaitable[None]],
    after: int,
) -> None:
    made = await topic(segments=2)
    async with (
        through_relay(service.url) as (relay, away),
        away.producer(made.name, batching=False) as producer,
    ):
        sent = await lose_one(relay, producer, after=after)
        await reshape(made)
        relay.let_in()
        await asyncio.wait_for(asyncio.gather(*sent), WAIT_S)
    assert_once_and_in_order(values(await stored(client, made.name, 2 * len(KEYS))))


async def test_a_message_without_receipt_is_committed_though_its_segment_is_sealed(
    client: magnetar.Client, topic: MakeTopic, service: Service
) -> None:
    made = await topic()
    async with (
        through_relay(service.url) as (relay, away),
        away.producer(made.name, batching=False) as producer,
        away.transaction() as txn,
    ):
        await producer.send(b"before", transaction=txn)
        relay.lose_receipt()
        sent = [producer.send_nowait(b"%d" % n, key="k", transaction=txn) for n in range(3)]
        await asyncio.wait_for(relay.lost_receipt.wait(), WAIT_S)
        await split(made)
        relay.let_in()
        await asyncio.wait_for(asyncio.gather(*sent), WAIT_S)
    found = values(await stored(client, made.name, 4))
    assert sorted(found) == [b"0", b"1", b"2", b"before"]


async def test_a_later_program_of_the_name_learns_what_sealed_segments_have(
    client: magnetar.Client, topic: MakeTopic, service: Service
) -> None:
    path = "/namespaces/public/default/deduplication"
    status, answer = await rest(service, "POST", path, body=True)
    assert status == 204, answer
    try:
        made = await topic()
        async with (
            through_relay(service.url) as (relay, away),
            away.producer(made.name, name="robot", send_timeout_s=0.5) as producer,
        ):
            await producer.send(b"3", sequence_id=3)
            relay.lose_receipt()
            lost = producer.send_nowait(b"4", sequence_id=4)
            await asyncio.wait_for(relay.lost_receipt.wait(), WAIT_S)
            with pytest.raises(OperationTimedOut):
                await lost
        await split(made)
        async with client.producer(made.name, name="robot") as producer:
            assert producer.last_sequence_id == 4
            await producer.send(b"5", sequence_id=5)
        assert sorted(values(await stored(client, made.name, 3))) == [b"3", b"4", b"5"]
    finally:
        await rest(service, "POST", path, body=False)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_a_sealed_segment_knows_after_a_restart_what_it_has(
    tmp_path: Path, killed: bool
) -> None:
    name = "topic://public/default/t"
    async with (
        running(tmp_path) as broker,
        through_relay(f"pulsar://127.0.0.1:{broker.port}") as (relay, away),
        away.producer(name, batching=False) as producer,
    ):
        sent = await lose_one(relay, producer, after=3)
        status, answer = await broker.rest("POST", "/scalable/public/default/t/split/0")
        assert status in (200, 204), answer
        if killed:
            broker.kill()
        else:
            await broker.terminate()
        await broker.start()
        relay.let_in()
        await asyncio.wait_for(asyncio.gather(*sent), WAIT_S)
        async with magnetar.connect(f"pulsar://127.0.0.1:{broker.port}") as client:
            found = values(await stored(client, name, 2 * len(KEYS)))
            assert_once_and_in_order(found)
