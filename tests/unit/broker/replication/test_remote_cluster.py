"""Requests over REST to another cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest

from broker.policies.cluster_data import ClusterData
from broker.replication.access import Access, access_of
from broker.replication.errors import RemoteRefused
from broker.replication.remote_cluster import RemoteCluster
from config.settings import Settings
from magnetar.protocol.names import NamespaceName, TopicName, parse_topic_name
from tests.support.bounds import set_bound
from tests.unit.broker.replication.conftest import Cluster

Pair = tuple[Cluster, Cluster]


class SlowRest:
    """A REST interface that takes a moment, unless there are more requests than it wants."""

    def __init__(self, wanted: int) -> None:
        self.most = 0
        self._wanted = wanted
        self._waiting = 0
        self._too_many = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._waiting += 1
        self.most = max(self.most, self._waiting)
        if self._waiting > self._wanted:
            self._too_many.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._too_many.wait(), 0.3)
        self._waiting -= 1
        with suppress(ConnectionError):
            writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()


@asynccontextmanager
async def slow_rest() -> AsyncIterator[tuple[SlowRest, int]]:
    rest = SlowRest(wanted=3)
    server = await asyncio.start_server(rest.serve, "127.0.0.1", 0)
    async with server:
        yield rest, server.sockets[0].getsockname()[1]


async def test_few_topics_are_made_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "REMOTE_REQUESTS_AT_ONCE", 3)
    east, west = pair
    async with slow_rest() as (rest, port):
        record = west.record | {"serviceUrl": f"http://127.0.0.1:{port}"}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        remote = east.broker.replications.cluster("west")
        names = [parse_topic_name(f"persistent://public/default/o{each}") for each in range(8)]
        await asyncio.gather(*(remote.require_partitions(name, 0) for name in names))
    assert rest.most == 3


@asynccontextmanager
async def answering(
    head: bytes, body: bytes = b"", *, asked_with_body: bool = True
) -> AsyncIterator[tuple[list[bytes], int]]:
    """A REST interface with one answer, and what it is asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            if asked_with_body:
                await reader.readexactly(1)
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (head, len(body)) + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield asked, server.sockets[0].getsockname()[1]


async def ask_redirecting(pair: Pair, location: str) -> None:
    """Make a topic in a cluster whose REST interface redirects there."""
    east, west = pair
    async with answering(b"307 Moved\r\nLocation: " + location.encode()) as (_, port):
        record = west.record | {
            "serviceUrl": f"http://127.0.0.1:{port}",
            "authenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
            "authenticationParameters": "token:secret",
        }
        await east.ask("POST", "/admin/v2/clusters/west", record)
        remote = east.broker.replications.cluster("west")
        await remote.require_partitions(parse_topic_name("persistent://public/default/o"), 2)


async def test_credentials_go_to_the_broker_that_owns_a_topic_there(pair: Pair) -> None:
    async with answering(b"409 Conflict") as (asked, port):
        with pytest.raises(RemoteRefused, match="2 partitions here and 0"):
            await ask_redirecting(pair, f"http://127.0.0.1:{port}/there")
    (request,) = asked
    assert request.startswith(b"PUT /there HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in request


@pytest.mark.parametrize(
    "location", ["https://127.0.0.1:1/", "ftp://h/", "http://[", "", "http://a..b/", "http://h:-1/"]
)
async def test_other_redirects_are_not_followed(pair: Pair, location: str) -> None:
    with pytest.raises(RemoteRefused, match=r"redirects the request|too often|does not answer"):
        await ask_redirecting(pair, location)


NAMESPACE = NamespaceName("public", "default")
TOPIC = parse_topic_name("persistent://public/default/t")
LISTED = b"200 OK\r\nContent-Type: application/json"


def access_at(port: int) -> Access:
    """That of a cluster whose REST interface is at a port."""
    urls = f"http://127.0.0.1:{port}", f"pulsar://127.0.0.1:{port}"
    return access_of(ClusterData(service_url=urls[0], broker_service_url=urls[1]), Settings())


@pytest.mark.parametrize(
    ("holder", "head", "body", "names"),
    [
        (NAMESPACE, LISTED, b'["east","standalone"]', {"east", "standalone"}),
        (TOPIC, LISTED, b'["south","standalone"]', {"south", "standalone"}),
        (NAMESPACE, b"404 Not Found", b'{"reason":"Namespace does not exist"}', None),
        (TOPIC, b"404 Not Found", b'{"reason":"Topic persistent://public/default/t not f"}', None),
        (TOPIC, b"403 Forbidden", b'{"reason":"Unauthorized to validateTopicPolicyOper"}', None),
        (TOPIC, b"401 Unauthorized", b"<html>\n<head>\n<title>Error 401 Authentication", None),
        # Where a topic has no list, and none in force is asked for.
        (TOPIC, b"200 OK", b"", None),
    ],
)
async def test_lists_are_read_as_apache_pulsar_answers_them(
    holder: NamespaceName | TopicName, head: bytes, body: bytes, names: set[str] | None
) -> None:
    async with answering(head, body, asked_with_body=False) as (asked, port):
        remote = RemoteCluster("standalone", access_at(port), Random(1))
        assert await remote.replication_list(holder) == names
        await remote.close()
    (request,) = asked
    path = {
        NAMESPACE: b"namespaces/public/default/replication",
        TOPIC: b"persistent/public/default/t/replication?applied=true",
    }[holder]
    assert request.startswith(b"GET /admin/v2/%b HTTP/1.1\r\n" % path)


async def test_the_list_of_a_scalable_topic_is_found_in_the_other_cluster(pair: Pair) -> None:
    east, west = pair
    await west.ask("PUT", "/admin/v2/scalable/public/default/s", {})
    await west.ask("POST", "/admin/v2/persistent/public/default/s/replication", ["west"])
    remote = east.broker.replications.cluster("west")
    assert await remote.replication_list(parse_topic_name("topic://public/default/s")) == frozenset(
        {"west"}
    )
