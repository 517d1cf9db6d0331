"""The face for threads against a broker: what it is for, and what ends it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import magnetar
import magnetar.sync
from magnetar.errors import AlreadyClosed, ClientError, OperationTimedOut
from magnetar.reads.messages import MessageColumns, take_apart
from tests.client.conftest import MakeTopic, Service

ROOT = Path(__file__).resolve().parents[2]
EARLIEST = magnetar.InitialPosition.EARLIEST
PATIENCE_S = 20


@pytest.fixture
def threaded(service: Service) -> Iterator[magnetar.sync.Client]:
    with magnetar.sync.connect(service.url) as client:
        yield client


@contextmanager
def outside_of_a_loop() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; in a coroutine it would cancel the main task."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def test_sync_message_is_sent_received_and_acknowledged(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic(segments=2))
    with (
        threaded.producer(name, schema=str) as producer,
        threaded.queue_consumer(name, "s", schema=str, initial_position=EARLIEST) as consumer,
    ):
        ids = [producer.send(f"value-{number}", key=f"k-{number}") for number in range(20)]
        came = [consumer.receive(PATIENCE_S) for _ in range(20)]
        assert {each.id for each in came} == set(ids)
        assert {(each.key, each.value) for each in came} == {
            (f"k-{number}", f"value-{number}") for number in range(20)
        }
        for message in came:
            consumer.ack(message)
        with pytest.raises(OperationTimedOut):
            consumer.receive(timeout_s=0.05)
    with threaded.queue_consumer(name, "s", schema=str) as again:
        assert again.receive_batch(10, timeout_s=0.2) == []


async def test_sync_message_not_acked_in_time_comes_again(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic(segments=1))
    with (
        threaded.producer(name, schema=str) as producer,
        threaded.queue_consumer(
            name, "s", schema=str, initial_position=EARLIEST, processing_timeout_s=0.1
        ) as consumer,
    ):
        where = producer.send("slow")
        came = [consumer.receive(PATIENCE_S) for _ in range(3)]
        assert [(each.id, each.redelivery_count) for each in came] == [
            (where, count) for count in range(3)
        ]


async def test_sync_messages_of_an_aborted_transaction_come_again(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic(segments=1))
    with (
        threaded.producer(name, schema=str) as producer,
        threaded.stream_consumer(name, "s", schema=str, initial_position=EARLIEST) as stream,
    ):
        producer.send("first")
        producer.send("second")
        message = stream.receive(PATIENCE_S)

        def acknowledge_and_fail() -> None:
            with threaded.transaction() as transaction:
                stream.ack(message, transaction=transaction)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            acknowledge_and_fail()
        assert stream.receive(PATIENCE_S).value == "first"
        with pytest.raises(ZeroDivisionError), threaded.transaction():
            raise ZeroDivisionError
        stream.redeliver_unacknowledged()
        assert stream.receive(PATIENCE_S).value == "first"
        last = stream.receive(PATIENCE_S)
        stream.ack(last, wait=True)
    with threaded.stream_consumer(name, "s", schema=str) as again:
        assert again.receive_batch(10, timeout_s=0.2) == []


async def test_a_subscription_is_ended(threaded: magnetar.sync.Client, topic: MakeTopic) -> None:
    name = str(await topic(segments=1))
    with threaded.producer(name, schema=str) as producer:
        consumer = threaded.queue_consumer(name, "s", schema=str)
        producer.send("before")
        consumer.unsubscribe()
        with threaded.queue_consumer(name, "s", schema=str) as anew:
            producer.send("after")
            assert anew.receive(PATIENCE_S).value == "after"
    of_all = threaded.queue_consumer(namespace="public/default", subscription="s-of-all")
    with of_all, pytest.raises(magnetar.errors.NotSupported):
        of_all.unsubscribe()


async def test_many_threads_send_and_each_keeps_its_order(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic(segments=2))
    with threaded.producer(name, schema=str) as producer:

        def send(thread: int) -> None:
            for number in range(200):
                while True:
                    try:
                        producer.send_nowait(f"{thread}/{number}", key=f"key-{thread}")
                        break
                    except magnetar.errors.ProducerQueueFull:
                        producer.room()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(send, range(4)))
    with threaded.stream_consumer(name, "s", schema=str, initial_position=EARLIEST) as consumer:
        values: list[str] = []
        for message in consumer:
            values.append(message.value)
            if len(values) == 800:
                consumer.ack(message)
                break
    for thread in range(4):
        mine = [value for value in values if value.startswith(f"{thread}/")]
        assert mine == [f"{thread}/{number}" for number in range(200)]


async def test_sync_sends_before_a_commit_are_in_it(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    orders, bills = str(await topic()), str(await topic())
    with (
        threaded.producer(orders, schema=str) as ordering,
        threaded.producer(bills, schema=str, max_pending_messages=60) as billing,
        threaded.queue_consumer(orders, "s", schema=str, initial_position=EARLIEST) as consumer,
        threaded.queue_consumer(bills, "s", schema=str, initial_position=EARLIEST) as audit,
    ):
        ordering.send("order")
        order = consumer.receive(PATIENCE_S)
        with suppress(LookupError), threaded.transaction() as aborted:
            billing.send_nowait("never", transaction=aborted)
            raise LookupError
        with threaded.transaction() as transaction:
            for number in range(50):
                billing.send_nowait(f"bill-{number}", transaction=transaction)
            consumer.ack(order, transaction=transaction)
        values: list[str] = []
        while len(values) < 50:
            values += [each.value for each in audit.receive_batch(50, PATIENCE_S)]
        assert values == [f"bill-{number}" for number in range(50)]


async def test_a_checkpoint_is_where_reading_goes_on(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic())
    with threaded.producer(name, schema=str) as producer:
        for number in range(10):
            producer.send(str(number))
    with threaded.checkpoint_consumer(name, schema=str) as reader:
        assert [reader.receive(PATIENCE_S).value for _ in range(4)] == ["0", "1", "2", "3"]
        kept = reader.checkpoint().to_bytes()
    start = magnetar.Checkpoint.from_bytes(kept)
    with threaded.checkpoint_consumer(name, schema=str, start=start) as reader:
        assert reader.receive(PATIENCE_S).value == "4"


async def test_an_interrupted_receive_takes_nothing_that_comes_later(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic())
    with (
        threaded.producer(name, schema=str) as producer,
        threaded.queue_consumer(name, "s", schema=str, initial_position=EARLIEST) as consumer,
        outside_of_a_loop(),
    ):
        for number in range(3):
            interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                consumer.receive()
            producer.send(str(number))
            message = consumer.receive(PATIENCE_S)
            assert message.value == str(number)
            consumer.ack(message)


async def test_closing_the_client_ends_all_waiting_calls(
    service: Service, topic: MakeTopic
) -> None:
    name = str(await topic())
    client = magnetar.sync.connect(service.url)
    consumer = client.queue_consumer(name, "s")
    with ThreadPoolExecutor(2) as threads:
        receiving = threads.submit(consumer.receive)
        iterating = threads.submit(lambda: list(consumer))
        client.close()
        with pytest.raises(AlreadyClosed):
            receiving.result(PATIENCE_S)
        assert iterating.result(PATIENCE_S) == []
    consumer.close()
    client.close()
    with pytest.raises(AlreadyClosed):
        client.producer(name)


SCRIPT = """
import sys, magnetar.sync
client = magnetar.sync.connect(sys.argv[1])
producer = client.producer(sys.argv[2], schema=str)
for number in range(500):
    producer.send_nowait(str(number))
"""


async def test_sync_sends_are_flushed_when_the_interpreter_ends(
    service: Service, threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, service.url, name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with threaded.checkpoint_consumer(name, schema=str) as reader:
        for number in range(500):
            assert reader.receive(PATIENCE_S).value == str(number)


async def test_a_forked_child_gets_an_error_and_the_parent_works_on(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    producer = threaded.producer(str(await topic()), schema=str)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        try:
            producer.send("x")
        except ClientError as error:
            os.write(sending, str(error).encode())
        finally:
            threaded.close()
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as told:
        assert "in each process" in told.read()
    assert os.waitpid(child, 0)[1] == 0
    producer.send("y")


@pytest.mark.magnetar_only("Apache Pulsar has no reads of segments")
async def test_segments_are_planned_and_read(
    threaded: magnetar.sync.Client, topic: MakeTopic
) -> None:
    name = str(await topic())
    with threaded.producer(name, batching=False) as producer:
        for number in range(20):
            producer.send(b"%d" % number)
    (segment,) = threaded.layout(name).active
    plan = threaded.plan_range(segment.topic, max_messages=15)
    assert plan.messages == 15
    columns = MessageColumns()
    reading = threaded.read_range(segment.topic, plan.start, plan.end, max_bytes=200)
    for entries in reading:
        for entry in entries:
            take_apart(entry, columns)
    assert columns.values == [b"%d" % number for number in range(15)]
    left = threaded.read_range(segment.topic, plan.start, plan.end, max_bytes=200)
    assert next(left)
    left.close()
    assert list(left) == []
