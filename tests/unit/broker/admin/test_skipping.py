"""`POST .../subscription/{subscription}/skip/{count}`: the oldest messages are skipped."""

from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest

NAME = "persistent://public/default/t"
TOPIC = "/admin/v2/persistent/public/default/t"


async def backlog(rest: Rest) -> object:
    found = await rest.get(f"{TOPIC}/stats")
    assert isinstance(found, dict)
    return found["subscriptions"]["s"]["msgBacklog"]


async def test_the_oldest_messages_that_nobody_has_acknowledged_are_skipped(rest: Rest) -> None:
    await rest.done("PUT", TOPIC)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    consumer = await client.subscribe(NAME, "s", permits=1)
    producer = await client.create_producer(NAME)
    for number in range(6):
        await producer.send(f"{number}".encode())
    await consumer.ack_answered((await consumer.receive()).message_id)
    await rest.done("POST", f"{TOPIC}/subscription/s/skip/3")
    assert await backlog(rest) == 2
    consumer.flow(2)
    received = [(await consumer.receive()).payload for _ in range(2)]
    assert [bytes(each) for each in received] == [b"4", b"5"]
    await rest.done("POST", f"{TOPIC}/subscription/s/skip/0")
    assert await backlog(rest) == 2
    await rest.done("POST", f"{TOPIC}/subscription/s/skip/1000")
    assert await backlog(rest) == 0
    stats = await rest.get(f"{TOPIC}/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["s"]["totalMsgExpired"] == 0
    await client.close()


async def test_what_cannot_be_skipped_is_refused_in_a_sentence(rest: Rest) -> None:
    await rest.done("PUT", TOPIC)
    assert "no subscription 's'" in await rest.refused(
        404, "POST", f"{TOPIC}/subscription/s/skip/1"
    )
    await rest.done("PUT", f"{TOPIC}/subscription/s")
    assert "0 or more" in await rest.refused(412, "POST", f"{TOPIC}/subscription/s/skip/-1")
    await rest.done("PUT", "/admin/v2/persistent/public/default/p/partitions", 2)
    partitioned = "/admin/v2/persistent/public/default/p/subscription/s/skip/1"
    assert "name the partition" in await rest.refused(405, "POST", partitioned)
