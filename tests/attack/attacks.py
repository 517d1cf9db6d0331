"""What hostile or careless clients do to a broker; each attack runs in a process of its own.

    python -m tests.attack.attacks NAME PORT HTTP_PORT

An attack may fail to reach the broker: it is refused, closed or kept waiting, and goes on.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from struct import Struct
from types import MappingProxyType
from typing import Final

import aiohttp

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from tests.support.child_process import HOST
from tests.support.raw_client import BrokerError, RawClient, basecommand

Kind = pb.BaseCommand
SIZE: Final = Struct(">I")
CONNECT: Final = encode_command(
    basecommand(Kind.CONNECT, pb.CommandConnect(client_version="attack", protocol_version=21))
)
PARTIAL_CONNECTIONS: Final = 240
PARTIAL_BYTES: Final = 5 * 1024 * 1024
TOPICS: Final = 11_600
TOPIC_LISTS: Final = 2_000
STAYING: Final = 10
LISTENING_S: Final = 15.0
PARTITIONS: Final = 5_000
MANY_PARTITIONS: Final = 10_000
HALF_SENT: Final = 1_000
NESTED_BODIES: Final = 2_000
AT_ONCE: Final = 20
NESTING: Final = 2_000
MADE_TOPICS: Final = 2_000
METRIC_READS: Final = 20
WATCHING: Final = 50
WATCHES: Final = 320
UNION_TYPES: Final = 500
FIELDS: Final = 20_000
UNAUTHENTICATED_WAIT_S: Final = 1.0
MUST_NOT_END: Final = (OSError, BrokerError, TimeoutError, aiohttp.ClientError)


@dataclass(frozen=True)
class Target:
    """The ports of the broker on `HOST`."""

    port: int
    http_port: int

    def url(self, path: str) -> str:
        """Of its REST interface."""
        return f"http://{HOST}:{self.http_port}{path}"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        """A connection that has shaken hands."""
        client = await RawClient.open(HOST, self.port, timeout_s=300)
        try:
            yield client
        finally:
            await client.close()


Step = Callable[[Target], Coroutine[object, object, None]]


async def nothing(_: Target) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Attack:
    """`prepare` comes before memory is measured.  `requests`: how many hostile ones there are."""

    what: str
    requests: int
    run: Step
    prepare: Step = nothing
    settings: Mapping[str, object] = field(default_factory=dict)


async def send_partial_frames(target: Target) -> None:
    """Send all but the last byte of a frame before CONNECT, and leave."""
    for _ in range(PARTIAL_CONNECTIONS):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, target.port)
            writer.write(SIZE.pack(PARTIAL_BYTES) + SIZE.pack(100) + bytes(PARTIAL_BYTES - 10))
            await asyncio.wait_for(writer.drain(), UNAUTHENTICATED_WAIT_S)
            writer.close()


async def make_topics(target: Target) -> None:
    """Create many topics in one namespace."""
    async with target.client() as client:
        for first in range(0, TOPICS, 200):
            some = range(first, min(first + 200, TOPICS))
            await asyncio.gather(
                *(client.create_producer(f"persistent://public/default/many-{n}") for n in some)
            )


def listing(request_id: int) -> bytes:
    """A request for all names of the namespace."""
    command = pb.CommandGetTopicsOfNamespace(
        request_id=request_id,
        namespace="public/default",
        mode=pb.CommandGetTopicsOfNamespace.ALL,
    )
    return encode_command(basecommand(Kind.GET_TOPICS_OF_NAMESPACE, command))


async def list_and_leave(target: Target) -> None:
    """Ask for all names many times in one go, read nothing, and leave."""
    _, writer = await asyncio.open_connection(HOST, target.port)
    writer.write(CONNECT + b"".join(map(listing, range(TOPIC_LISTS))))
    await writer.drain()
    await asyncio.sleep(UNAUTHENTICATED_WAIT_S)
    writer.close()


async def list_and_stay(target: Target) -> None:
    """Ask for all names many times on several connections, and read the answers."""

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(HOST, target.port)
        writer.write(CONNECT + b"".join(map(listing, range(TOPIC_LISTS))))
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LISTENING_S):
                while await reader.read(1024 * 1024):
                    pass
        writer.close()

    await asyncio.gather(*(ask() for _ in range(STAYING)))


async def add_many_partitions(target: Target) -> None:
    """Add thousands of topics to a transaction at once."""
    async with target.client() as client:
        begun = await client.request(
            Kind.NEW_TXN, pb.CommandNewTxn(txn_ttl_millis=60_000, scalable=True)
        )
        command = pb.CommandAddPartitionToTxn(
            txnid_most_bits=begun.new_txn_response.txnid_most_bits,
            txnid_least_bits=begun.new_txn_response.txnid_least_bits,
            scalable=True,
            partitions=[f"persistent://public/default/part-{n}" for n in range(PARTITIONS)],
        )
        with suppress(*MUST_NOT_END):
            await client.request(Kind.ADD_PARTITION_TO_TXN, command)


async def create_many_partitions(target: Target) -> None:
    """Create a topic with as many partitions as are allowed, and delete it."""
    url = target.url("/admin/v2/persistent/public/default/wide/partitions")
    async with aiohttp.ClientSession() as session:
        with suppress(*MUST_NOT_END):
            await (await session.put(url, json=MANY_PARTITIONS)).read()
            await (await session.delete(url)).read()


async def send_half_requests(target: Target) -> None:
    """Begin requests over HTTP, and never end them."""
    opened: list[asyncio.StreamWriter] = []
    for _ in range(HALF_SENT):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, target.http_port)
            writer.write(b"POST /admin/v2/namespaces/public/x HTTP/1.1\r\nHost: x\r\nContent-Le")
            opened.append(writer)
    await asyncio.sleep(LISTENING_S)
    for writer in opened:
        writer.close()


async def post_nested_bodies(target: Target) -> None:
    """Send bodies that are thousands of brackets."""
    url = target.url("/admin/v2/persistent/public/default/t/partitions")
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:

        async def post() -> None:
            for _ in range(NESTED_BODIES // AT_ONCE):
                with suppress(*MUST_NOT_END):
                    await (await session.put(url, data=b"[" * NESTING)).read()

        await asyncio.gather(*(post() for _ in range(AT_ONCE)))


async def create_topics_by_use(target: Target) -> None:
    """Look up names that do not exist."""
    async with target.client() as client:
        for number in range(MADE_TOPICS):
            with suppress(*MUST_NOT_END):
                await client.create_producer(f"persistent://public/default/made-{number}")


async def read_metrics(target: Target) -> None:
    """Read the metrics of many topics several times at once."""
    async with aiohttp.ClientSession() as session:

        async def read() -> None:
            async with session.get(target.url("/metrics")) as answer:
                await answer.read()

        for _ in range(METRIC_READS // 4):
            await asyncio.gather(*(read() for _ in range(4)), return_exceptions=True)


async def watch_and_read_nothing(target: Target) -> None:
    """Watch the names of a namespace on many connections that read nothing."""
    watches = b"".join(
        encode_command(
            basecommand(
                Kind.WATCH_TOPIC_LIST,
                pb.CommandWatchTopicList(
                    request_id=number,
                    watcher_id=number,
                    namespace="public/default",
                    topics_pattern=".*",
                ),
            )
        )
        for number in range(WATCHES)
    )
    opened: list[asyncio.StreamWriter] = []
    for _ in range(WATCHING):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, target.port, limit=1024)
            writer.write(CONNECT + watches)
            opened.append(writer)
            del reader
    await asyncio.sleep(LISTENING_S)
    for writer in opened:
        writer.close()


def schema_of(kind: object) -> pb.Schema:
    """An Avro schema."""
    return pb.Schema(name="s", type=pb.Schema.Avro, schema_data=json.dumps(kind).encode())


async def check_schemas(target: Target) -> None:
    """Register schemas whose compatibility takes long to check."""
    records = [
        {"type": "record", "name": f"r{n}", "fields": [{"name": "x", "type": "int"}]}
        for n in range(UNION_TYPES)
    ]
    union = {"type": "record", "name": "u", "fields": [{"name": "f", "type": records}]}
    fields = [{"name": f"f{n}", "type": "int", "default": 0} for n in range(FIELDS)]
    large = {"type": "record", "name": "l", "fields": fields}
    async with target.client() as client:
        for name, first in (("union", union), ("large", large)):
            second = {**first, "doc": "another one"}
            for each in (first, second):
                with suppress(*MUST_NOT_END):
                    await client.create_producer(
                        f"persistent://public/default/schema-{name}",
                        pb.CommandProducer(schema=schema_of(each)),
                    )


ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType(
    {
        "partial-frames": Attack(
            "240 connections leave 5 MB of a frame each before CONNECT",
            PARTIAL_CONNECTIONS,
            send_partial_frames,
        ),
        "lists-and-leaves": Attack(
            "2,000 lists of 11,600 topics by a peer that leaves",
            TOPIC_LISTS,
            list_and_leave,
            make_topics,
        ),
        "lists-and-stays": Attack(
            "the same on ten connections that stay",
            STAYING * TOPIC_LISTS,
            list_and_stay,
            make_topics,
        ),
        "partitions-in-transaction": Attack(
            "5,000 topics added to a transaction at once", 1, add_many_partitions
        ),
        "many-partitions": Attack(
            "a topic of 10,000 partitions, made and deleted", 2, create_many_partitions
        ),
        "schemas": Attack(
            "Avro schemas of 500 types in a union, and of 20,000 fields", 4, check_schemas
        ),
        "half-sent-requests": Attack(
            "1,000 requests over HTTP that never end", HALF_SENT, send_half_requests
        ),
        "nested-bodies": Attack(
            "2,000 bodies of 2,000 brackets", NESTED_BODIES, post_nested_bodies
        ),
        "topics-by-use": Attack(
            "2,000 topics made by using their names", MADE_TOPICS, create_topics_by_use
        ),
        "metrics": Attack(
            "20 reads of the metrics of 11,600 topics", METRIC_READS, read_metrics, make_topics
        ),
        "watches": Attack(
            "50 connections with 320 watches each that read nothing",
            WATCHING * WATCHES,
            watch_and_read_nothing,
            make_topics,
        ),
    }
)


def main() -> None:
    name, port, http_port = sys.argv[1:]
    asyncio.run(ATTACKS[name].run(Target(int(port), int(http_port))))


if __name__ == "__main__":
    main()
