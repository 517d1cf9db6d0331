"""The client as a whole: what it opens it closes, in order and in time."""

import asyncio
import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import magnetar
from magnetar.consume.settings import InitialPosition
from magnetar.errors import AlreadyClosed, InvalidArgument, MagnetarError, WrongLoop
from tests.client.conftest import NAMESPACE, MakeTopic, Service, rest
from tests.support.broker_process import running
from tests.support.child_process import HOST
from tests.support.waiting import until

EARLIEST = InitialPosition.EARLIEST


async def test_close_sends_what_producers_have(service: Service, topic: MakeTopic) -> None:
    made = await topic(2)
    async with magnetar.connect(service.url) as client:
        producer = await client.producer(made.name, schema=str)
        sent = [producer.send_nowait(str(number), key=str(number)) for number in range(100)]
    assert all(each.done() and each.exception() is None for each in sent)
    async with (
        magnetar.connect(service.url) as client,
        client.queue_consumer(made.name, "sub", schema=str, initial_position=EARLIEST) as consumer,
    ):
        values = set()
        for _ in range(100):
            message = await consumer.receive(20)
            values.add(message.value)
            await consumer.ack(message)
        assert values == {str(number) for number in range(100)}


UNCLOSED = """
import asyncio, sys, magnetar
async def main():
    client = await magnetar.connect(sys.argv[1])
    producer = await client.producer(sys.argv[2])
    producer.send_nowait(b"x")
asyncio.run(main())
"""


async def test_client_that_is_not_closed_warns(service: Service, topic: MakeTopic) -> None:
    made = await topic(1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "dev", "-c", UNCLOSED, service.url, made.name),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert f"ResourceWarning: The client of {service.url} was never closed" in errors.decode()


async def test_close_ends_whatever_lives(service: Service, topic: MakeTopic) -> None:
    made = await topic(2)
    client = await magnetar.connect(service.url)
    producer = await client.producer(made.name)
    queue = await client.queue_consumer(made.name, "queue")
    stream = await client.stream_consumer(made.name, "stream")
    reader = await client.checkpoint_consumer(made.name)
    waiting = asyncio.ensure_future(queue.receive())
    transaction = await client.transaction()
    await producer.send(b"never seen", transaction=transaction)
    await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task(), waiting} or waiting.done()
    with pytest.raises(AlreadyClosed):
        await waiting
    with pytest.raises(AlreadyClosed):
        await producer.send(b"")
    with pytest.raises(AlreadyClosed):
        await stream.receive()
    with pytest.raises(AlreadyClosed):
        await reader.receive()
    with pytest.raises(MagnetarError):
        await transaction.commit()
    with pytest.raises(AlreadyClosed):
        client.producer(made.name)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closed_parts_are_not_kept(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    for _ in range(3):
        async with client.producer(made.name):
            pass
    await until(lambda: gc.collect() >= 0 and not any(client._opened.values()))


async def test_opening_after_the_client_is_closed_fails(service: Service, topic: MakeTopic) -> None:
    made = await topic()
    async with magnetar.connect(service.url) as client:
        opening = client.producer(made.name)
    with pytest.raises(AlreadyClosed):
        await opening


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_a_cancelled_producer_is_no_half_one(
    service: Service, topic: MakeTopic, steps: int
) -> None:
    """An exclusive one would keep others out."""
    made = await topic()
    exclusive = magnetar.AccessMode.EXCLUSIVE
    async with magnetar.connect(service.url) as client:

        async def open_one() -> None:
            async with client.producer(made.name, access_mode=exclusive):
                await asyncio.Event().wait()

        opening = asyncio.ensure_future(open_one())
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait((opening,))
        async with client.producer(made.name, access_mode=exclusive) as producer:
            await producer.send(b"mine")


async def test_close_is_bounded_when_the_broker_has_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await magnetar.connect(f"pulsar://{HOST}:{broker.port}", close_timeout_s=0.2)
        producer = await client.producer("topic://public/default/x")
        await producer.send(b"stored")
        broker.pause()
        lost = producer.send_nowait(b"never receipted")
        await client.close()
        assert lost.done()
        with pytest.raises(MagnetarError):
            lost.result()
        broker.resume()


async def test_a_namespace_is_consumed_by_the_client(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(properties={"team": "test-client"})
    async with (
        client.producer(made.name, schema=str) as producer,
        client.queue_consumer(
            namespace="public/default",
            subscription="all",
            properties={"team": "test-client"},
            schema=str,
            initial_position=EARLIEST,
        ) as consumer,
    ):
        await producer.send("found")
        message = await consumer.receive(20)
        assert message.value == "found"
        await consumer.ack(message)


@pytest.mark.parametrize(
    "what",
    [
        {"subscription": "s"},
        {"topic": "t", "namespace": "a/b", "subscription": "s"},
        {"topic": "t"},
        {"topic": "t", "subscription": ""},
        {"topic": "t", "subscription": "s", "properties": {"a": "b"}},
        {"topic": "t", "subscription": "s", "receiver_queue_size": -1},
    ],
)
async def test_consumers_that_cannot_be(client: magnetar.Client, what: dict[str, str]) -> None:
    for make in (client.queue_consumer, client.stream_consumer):
        with pytest.raises(InvalidArgument):
            make(**what)  # type: ignore[call-overload]


@pytest.mark.magnetar_only("statistics of scalable topics do not name clients")
async def test_statistics_show_the_clients_description(service: Service, topic: MakeTopic) -> None:
    made = await topic()
    async with (
        magnetar.connect(service.url, description="night shift") as client,
        client.stream_consumer(made.name, "s"),
    ):
        status, told = await rest(service, "GET", f"/scalable/{NAMESPACE}/{made.local_name}/stats")
    assert (status, "-night shift" in str(told)) == (200, True), told


class Made(NamedTuple):
    """What belongs to one loop."""

    name: str
    client: magnetar.Client
    producer: magnetar.Producer[bytes]
    queue: magnetar.QueueConsumer[bytes]
    stream: magnetar.StreamConsumer[bytes]
    transaction: magnetar.Transaction


def test_another_loop_or_none_raises_and_changes_nothing(
    service: Service, topic: MakeTopic
) -> None:
    async def opened() -> Made:
        name = (await topic()).name
        client = await begun
        return Made(
            name,
            client,
            await client.producer(name),
            await client.queue_consumer(name, "queue"),
            await client.stream_consumer(name, "stream"),
            await client.transaction(),
        )

    async def elsewhere() -> None:
        for each in (
            producer.send(b"lost"),
            queue.receive(0.1),
            queue.receive_batch(1, 0.1),
            queue.unsubscribe(),
            queue.close(),
            stream.close(),
            producer.room(),
            producer.flush(),
            producer.close(),
            transaction.commit(),
            transaction.abort(),
            client.producer(name).__aenter__(),
            client.close(),
        ):
            with pytest.raises(WrongLoop, match="another event loop"):
                async with asyncio.timeout(20):
                    await each

    async def here() -> list[bytes]:
        await producer.send(b"kept")
        message = await queue.receive(20)
        for act in (
            partial(queue.ack, message),
            partial(queue.nack, message),
            partial(producer.send_nowait, b"lost"),
            stream.redeliver_unacknowledged,
        ):
            with pytest.raises(WrongLoop):
                await asyncio.to_thread(act)
        async with transaction:
            await queue.ack(message, transaction=transaction)
        await stream.close()
        await client.close()
        return [message.data]

    begun = magnetar.connect(service.url)  # nothing happens before it is awaited, on any loop
    with asyncio.Runner() as runner:
        name, client, producer, queue, stream, transaction = runner.run(opened())
        with asyncio.Runner() as other:
            other.run(elsewhere())
        assert runner.run(here()) == [b"kept"]


async def test_unopened_object_says_to_await_it(service: Service) -> None:
    async with magnetar.connect(service.url) as client:
        opening: object = client.producer("topic://public/default/never")
        with pytest.raises(AttributeError, match="await it first"):
            getattr(opening, "send")  # noqa: B009 - what a type checker refuses
        assert not hasattr(opening, "send")
        with pytest.raises(TypeError, match="async with"), opening:  # type: ignore[attr-defined]
            pass


async def test_the_message_of_another_consumer_is_not_taken_for_acknowledged(
    service: Service, topic: MakeTopic
) -> None:
    one, other = await topic(1), await topic(1)
    async with (
        magnetar.connect(service.url) as client,
        client.producer(other.name) as producer,
        client.queue_consumer(one.name, "queue") as queue,
        client.stream_consumer(one.name, "stream") as stream,
        client.queue_consumer(other.name, "queue") as of_other,
    ):
        await producer.send(b"")
        message = await of_other.receive(20)
        for act in (queue.ack, stream.ack, queue.nack):
            with pytest.raises(InvalidArgument, match="consumer that received it"):
                await (act(message) or asyncio.sleep(0))
        wrong: Any
        for wrong in (message.id, None, [message.id]):
            for consumer in (of_other, stream):
                with pytest.raises(InvalidArgument, match="that receive returned"):
                    await consumer.ack(wrong, wait=True)
        async with client.stream_consumer(other.name, "stream") as in_order:
            with pytest.raises(InvalidArgument, match="consumer that received it"):
                await in_order.ack(message, wait=True)  # a queue's: it says no position
        await of_other.ack(message, wait=True)


async def test_argument_of_a_wrong_type_is_named(service: Service) -> None:
    wrong: Any
    for wrong in (None, 5, b"pulsar://localhost"):
        with pytest.raises(InvalidArgument, match="no address of a Pulsar broker"):
            magnetar.connect(wrong)
    wrong = "5"
    with pytest.raises(InvalidArgument, match="operation_timeout_s is '5'; give it a number"):
        magnetar.connect(service.url, operation_timeout_s=wrong)
    async with magnetar.connect(service.url) as client:
        with pytest.raises(InvalidArgument, match="max_pending_messages is '5'"):
            client.producer("topic://public/default/never", max_pending_messages=wrong)
        wrong = None
        with pytest.raises(InvalidArgument, match="timeout_s is None"):
            await client.transaction(timeout_s=wrong)
        for wrong in (None, 5, b"topic://public/default/never"):
            for make in (client.producer, client.checkpoint_consumer):
                with pytest.raises(InvalidArgument, match=r"topic is .*; give its name as text"):
                    make(wrong)
        for wrong in (5, b"topic://public/default/never"):
            for subscribe in (client.queue_consumer, client.stream_consumer):
                with pytest.raises(InvalidArgument, match=r"topic is .*; give its name as text"):
                    subscribe(wrong, "sub")
        wrong = "5"
        with pytest.raises(InvalidArgument, match="ack_grouping_ms is '5'; give it a number"):
            client.queue_consumer("topic://public/default/never", "s", ack_grouping_ms=wrong)
        for wrong in ("earliest", b"kept"):
            with pytest.raises(InvalidArgument, match=r"Checkpoint\.from_bytes"):
                client.checkpoint_consumer("topic://public/default/never", start=wrong)
