"""Ordinary topics under the client from PyPI."""

import threading
import time
from typing import Final

import pulsar

from bench.replication.topics import BATCH, DELAY_S, PAYLOAD_BYTES
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.two_clusters import rest

RECEIVE_MS: Final = 60_000


class OrdinaryTopics:
    """Topics that their first message makes."""

    def make(self, first: BrokerUnderTest, second: BrokerUnderTest, topic: str) -> None:
        """See `Topics`."""

    def stored(self, broker: BrokerUnderTest, topic: str) -> int:
        """See `Topics`."""
        try:
            return int(rest(broker, "GET", f"persistent/{topic}/stats")["msgInCounter"])
        except OSError:
            return 0  # The topic, or the broker, is not there yet.

    def publish(self, broker: BrokerUnderTest, topic: str, count: int, *, batched: bool) -> None:
        """See `Topics`."""
        client = quiet_client(broker.url)
        producer = client.create_producer(
            f"persistent://{topic}",
            batching_enabled=batched,
            batching_max_messages=BATCH,
            batching_max_publish_delay_ms=100,
            block_if_queue_full=True,
        )
        for _ in range(count):
            producer.send_async(b"x" * PAYLOAD_BYTES, lambda *_: None)
        producer.flush()
        client.close()

    def delays_ms(
        self, first: BrokerUnderTest, second: BrokerUnderTest, topic: str, rate: int
    ) -> list[float]:
        """See `Topics`."""
        source, target = quiet_client(first.url), quiet_client(second.url)
        consumer = target.subscribe(f"persistent://{topic}", "timing")
        producer = source.create_producer(f"persistent://{topic}", batching_enabled=False)
        count, taken = int(rate * DELAY_S), list[float]()

        def receive() -> None:
            while len(taken) < count:
                message = consumer.receive(RECEIVE_MS)
                sent_s = float(message.data().rstrip(b"x"))
                taken.append(1000 * (time.monotonic() - sent_s))
                consumer.acknowledge(message)

        receiving = threading.Thread(target=receive)
        receiving.start()
        began_s = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began_s + number / rate - time.monotonic()))
            stamp = b"%r" % time.monotonic()
            producer.send_async(stamp.ljust(PAYLOAD_BYTES, b"x"), lambda *_: None)
        receiving.join()
        source.close()
        target.close()
        return taken


def quiet_client(url: str) -> pulsar.Client:
    """A client that logs errors alone."""
    return pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))


def copy_for_ever(topic: str, first: str, second: str) -> None:
    """Consume from a topic at the first broker, and produce to that of its name at the second."""
    consumer = quiet_client(first).subscribe(f"persistent://{topic}", "copier")
    producer = quiet_client(second).create_producer(
        f"persistent://{topic}", batching_enabled=True, block_if_queue_full=True
    )
    while True:
        message = consumer.receive()
        producer.send_async(
            message.data(),
            lambda _, __, message=message: consumer.acknowledge(message),
        )
