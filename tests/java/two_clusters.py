"""Two clusters that replicate to each other, Apache Pulsar and Magnetar: what tests ask of both."""

import asyncio
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.fixtures import serving
from tests.support.raw_client import RawClient
from tests.support.raw_handles import Delivery

PATIENCE_S: Final = 60.0
POSITION: Final = "__MSG_PROP_REPL_SOURCE_POSITION"
FROM_THE_BEGINNING: Final = pb.CommandSubscribe(
    sub_type=pb.CommandSubscribe.Exclusive,
    initial_position=pb.CommandSubscribe.Earliest,
    durable=False,
)


def beside_peer(
    on_peer: bool, tmp_path_factory: pytest.TempPathFactory, cluster: str
) -> Iterator[BrokerUnderTest]:
    """A Magnetar of this cluster beside the peer, without which the test is skipped."""
    if not on_peer:
        pytest.skip("the peer is one of the clusters: add --peer")
    directory = tmp_path_factory.mktemp("magnetar")
    yield from serving(MagnetarProcess(directory, {"cluster_name": cluster}))


def rest(
    broker: BrokerUnderTest,
    method: str,
    path: str,
    body: object = None,
    **headers: str,
) -> Any:  # noqa: ANN401 - JSON
    """One REST request that succeeds; its JSON."""
    request = urllib.request.Request(
        f"{broker.admin_url}/admin/v2/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def register(broker: BrokerUnderTest, name: str, other: BrokerUnderTest) -> None:
    """Register another cluster."""
    urls = {"serviceUrl": other.admin_url, "brokerServiceUrl": other.url}
    rest(broker, "PUT", f"clusters/{name}", urls)


def until(is_so: Callable[[], bool], what: str = "") -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def replication(broker: BrokerUnderTest, topic: str, cluster: str) -> dict[str, Any]:
    """The statistics of a topic, `tenant/namespace/name`, about another cluster, or {}."""
    try:
        stats = rest(broker, "GET", f"persistent/{topic}/stats")
    except urllib.error.HTTPError:
        return {}  # It is not there, or not yet again.
    found: dict[str, Any] = stats["replication"].get(cluster, {})
    return found


def number_of_entries(broker: BrokerUnderTest, topic: str) -> int:
    """The number of stored entries of a topic; 0 while it is missing."""
    try:
        stats = rest(broker, "GET", f"persistent/{topic}/internalStats")
    except urllib.error.HTTPError:
        return 0  # It is not there, or not yet again.
    return int(stats["numberOfEntries"])


def stored(broker: BrokerUnderTest, topic: str, count: int) -> list[Delivery]:
    """The first entries of a topic, as they are stored."""
    return asyncio.run(_stored(broker, topic, count))


async def _stored(broker: BrokerUnderTest, topic: str, count: int) -> list[Delivery]:
    url = urlsplit(broker.url)
    assert url.hostname is not None
    assert url.port is not None
    client = await RawClient.open(url.hostname, url.port)
    try:
        await client.lookup(f"persistent://{topic}")
        name = f"reader-{uuid.uuid4().hex[:8]}"
        consumer = await client.subscribe(
            f"persistent://{topic}", name, FROM_THE_BEGINNING, permits=1000
        )
        return [await consumer.receive(PATIENCE_S) for _ in range(count)]
    finally:
        await client.close()
