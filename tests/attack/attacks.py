"""What hostile or careless clients do to a broker; each attack runs in a process of its own.

    python -m tests.attack.attacks NAME TARGET FINDINGS

An attack may fail to reach the broker: it is refused, closed or kept waiting, and goes on.  It
writes what the broker should not have done, a line each, into the file FINDINGS.
"""

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import Final

import aiohttp

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from tests.attack.secured_attacks import SECURED_ATTACKS
from tests.attack.target import REFUSALS, Attack, Target
from tests.support.child_process import HOST
from tests.support.raw_client import RawClient, basecommand

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
IDLE_S: Final = 3
"""How long a topic without clients stays in memory: 300 s by default."""
METRIC_READS: Final = 20
WATCHING: Final = 50
WATCHES: Final = 320
UNION_TYPES: Final = 500
FIELDS: Final = 20_000
HALF_OPEN: Final = 2_500
GARBAGE: Final = 2_000
SLOW: Final = 500
SLOW_BYTES: Final = 100
SLOW_BYTES_MIN: Final = 10
SLOW_PAUSE_S: Final = 0.05
HANDSHAKES: Final = 2_000
UNAUTHENTICATED_WAIT_S: Final = 1.0


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
        with suppress(*REFUSALS):
            await client.request(Kind.ADD_PARTITION_TO_TXN, command)


async def create_many_partitions(target: Target) -> None:
    """Create a topic with as many partitions as are allowed, and delete it."""
    url = target.url("/admin/v2/persistent/public/default/wide/partitions")
    async with aiohttp.ClientSession() as session:
        with suppress(*REFUSALS):
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
                with suppress(*REFUSALS):
                    await (await session.put(url, data=b"[" * NESTING)).read()

        await asyncio.gather(*(post() for _ in range(AT_ONCE)))


async def create_topics_by_use(target: Target) -> None:
    """Look up names that do not exist."""
    async with target.client() as client:
        for number in range(MADE_TOPICS):
            name = f"persistent://public/default/made-{target.round}-{number}"
            with suppress(*REFUSALS):
                await client.create_producer(name)


async def read_metrics(target: Target) -> None:
    """Read the metrics of many topics several times at once."""
    async with aiohttp.ClientSession() as session:

        async def read() -> None:
            async with session.get(target.url("/metrics")) as answer:
                async for _ in answer.content.iter_any():
                    pass  # to join so much would hold the probe, which shares this process

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
                with suppress(*REFUSALS):
                    await client.create_producer(
                        f"persistent://public/default/schema-{name}",
                        pb.CommandProducer(schema=schema_of(each)),
                    )


async def open_many(target: Target, count: int, first: bytes) -> list[asyncio.StreamWriter]:
    """Connect to the port with TLS so often, and send these bytes on each connection."""
    opened: list[asyncio.StreamWriter] = []
    for number in range(count):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, target.port)
            writer.write(first)
            opened.append(writer)
        if number % 50 == 0:
            await asyncio.sleep(0)
    return opened


def client_hello(target: Target) -> bytes:
    """The first bytes of a handshake."""
    outgoing = ssl.MemoryBIO()
    assert target.tls is not None
    client = target.tls.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def leave_handshakes_half_open(target: Target) -> None:
    """Connect, some of it silently and some with the first bytes of a handshake, and wait."""
    opened = await open_many(target, target.count(HALF_OPEN), b"")
    opened += await open_many(target, target.count(HALF_OPEN), client_hello(target))
    await asyncio.sleep(UNAUTHENTICATED_WAIT_S)
    for writer in opened:
        writer.close()


async def send_no_tls(target: Target) -> None:
    """Send bytes that are no TLS to the port with TLS, at once and after a handshake."""
    for writer in await open_many(target, target.count(GARBAGE), CONNECT + bytes(500)):
        writer.close()
    for _ in range(target.count(GARBAGE // 10)):
        with suppress(*REFUSALS):
            async with target.client() as client:
                assert client.transport is not None
                socket = client.transport.get_extra_info("socket")
                os.write(socket.fileno(), b"\x17\x03\x03\x40\x00" + bytes(0x4000))


async def shake_hands_slowly(target: Target) -> None:
    """Send handshakes byte by byte on many connections at once."""
    hello = client_hello(target)
    opened = await open_many(target, target.count(SLOW), hello[:1])
    for at in range(1, min(len(hello) - 1, SLOW_BYTES_MIN + target.count(SLOW_BYTES))):
        for writer in opened:
            if not writer.is_closing():
                writer.write(hello[at : at + 1])
        await asyncio.sleep(SLOW_PAUSE_S)
    for writer in opened:
        writer.close()


async def shake_hands_often(target: Target) -> None:
    """Shake hands on new connections without an end, on several at once."""

    async def shake_hands() -> None:
        for _ in range(target.count(HANDSHAKES // AT_ONCE)):
            with suppress(*REFUSALS):
                client = await RawClient.open_socket(HOST, target.port, tls=target.tls)
                await client.close()

    await asyncio.gather(*(shake_hands() for _ in range(AT_ONCE)))


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
            "2,000 topics made by using their names, after 2,000 others",
            MADE_TOPICS,
            create_topics_by_use,
            settings={"idle_topic_unload_s": IDLE_S},
            twice=True,
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
        "half-open-tls": Attack(
            "5,000 TLS handshakes that are never finished, silent or after their first bytes",
            2 * HALF_OPEN,
            leave_handshakes_half_open,
            secured=True,
            # The first round leaves heap of OpenSSL that glibc keeps: docs/decisions/tls-layer.md.
            twice=True,
        ),
        "no-tls": Attack(
            "2,000 connections that send no TLS, and 200 that stop to after the handshake",
            GARBAGE,
            send_no_tls,
            secured=True,
        ),
        "slow-tls": Attack(
            "500 TLS handshakes sent byte by byte", SLOW, shake_hands_slowly, secured=True
        ),
        "many-handshakes": Attack(
            "2,000 TLS handshakes without a CONNECT", HANDSHAKES, shake_hands_often, secured=True
        ),
        **SECURED_ATTACKS,
    }
)


def attack_named(names: str) -> Attack:
    """An attack, or several one after the other on the same broker, with commas between them."""
    several = [ATTACKS[each] for each in names.split(",")]
    if len(several) == 1:
        return several[0]

    async def run(target: Target) -> Sequence[str]:
        return [found for each in several for found in await each.run(target) or ()]

    async def prepare(target: Target) -> None:
        for each in several:
            await each.prepare(target)

    return Attack(
        names,
        sum(each.requests for each in several),
        run,
        prepare,
        settings=dict(chain.from_iterable(each.settings.items() for each in several)),
        secured=any(each.secured for each in several),
    )


def main() -> None:
    names, words, findings = sys.argv[1:]
    found = asyncio.run(attack_named(names).run(Target(**json.loads(words))))
    Path(findings).write_text("".join(f"{each}\n" for each in found or ()))


if __name__ == "__main__":
    main()
