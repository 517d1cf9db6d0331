"""Subscriptions that Apache Pulsar and Magnetar move together: each writes the other's markers.

The other cluster is Apache Pulsar itself, so this runs with the peer (`make stock-peer`).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import pulsar
import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.two_clusters import beside_peer, register, rest, until

PULSAR: Final = "standalone"
PATIENCE_MS: Final = 30_000
HERE: Final = "beside"
NAMESPACE: Final = "beside/replicated"
COUNT: Final = 20


class Both(NamedTuple):
    """The peer and a Magnetar, which replicate a namespace to each other."""

    peer: BrokerUnderTest
    magnetar: BrokerUnderTest


@pytest.fixture(scope="module")
def beside(on_peer: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerUnderTest]:
    yield from beside_peer(on_peer, tmp_path_factory, HERE)


@pytest.fixture(scope="module")
def both(broker: BrokerUnderTest, beside: BrokerUnderTest) -> Both:
    names = [PULSAR, HERE]
    for one, other, name in ((broker, beside, HERE), (beside, broker, PULSAR)):
        register(one, name, other)
        rest(one, "PUT", "tenants/beside", {"allowedClusters": names})
        rest(one, "PUT", f"namespaces/{NAMESPACE}", {"replication_clusters": names})
    return Both(broker, beside)


def publish(broker: BrokerUnderTest, topic: str, prefix: bytes, count: int = COUNT) -> None:
    """Store messages."""
    client = pulsar.Client(broker.url)
    producer = client.create_producer(topic)
    for number in range(count):
        producer.send(prefix + b"%d" % number)
    client.close()


def subscribe(client: pulsar.Client, topic: str) -> pulsar.Consumer:
    """A consumer of the replicated subscription."""
    return client.subscribe(
        topic,
        "s",
        consumer_type=pulsar.ConsumerType.Shared,
        initial_position=pulsar.InitialPosition.Earliest,
        replicate_subscription_state_enabled=True,
    )


def has_moved(broker: BrokerUnderTest, topic: str) -> bool:
    """Whether the subscription has no message of before left; markers may be left."""
    path = f"persistent/{topic.removeprefix('persistent://')}"
    stats = rest(broker, "GET", f"{path}/stats")
    assert isinstance(stats, dict)
    found = stats["subscriptions"].get("s")
    return found is not None and found["isReplicated"] and found["msgBacklog"] < COUNT


@pytest.mark.parametrize("direction", ["from the peer", "to the peer"])
def test_consumer_goes_on_in_the_other_cluster(both: Both, direction: str) -> None:
    here, there = both if direction == "from the peer" else reversed(both)
    topic = f"persistent://{NAMESPACE}/{direction.replace(' ', '-')}"
    client = pulsar.Client(here.url)
    consumer = subscribe(client, topic)
    publish(here, topic, b"before-")
    publish(there, topic, b"there-")
    consumed: set[bytes] = set()
    while len(consumed) < 2 * COUNT:
        message = consumer.receive(PATIENCE_MS)
        consumed.add(message.data())
        consumer.acknowledge(message)
    until(lambda: has_moved(there, topic), "the subscription has not moved")
    client.close()
    client = pulsar.Client(there.url)
    consumer = subscribe(client, topic)
    publish(there, topic, b"after-", 1)
    assert consumer.receive(PATIENCE_MS).data() == b"after-0"
    client.close()
