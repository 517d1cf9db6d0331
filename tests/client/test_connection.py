"""Connecting, losing the broker, and what is left afterwards, on a real broker."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import magnetar
from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed, ConnectionLost, InvalidArgument, MagnetarError
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection, PeerKind
from tests.client.conftest import MakeTopic, Service
from tests.support.broker_process import running
from tests.support.certificates import Certificate, make_certificate
from tests.support.child_process import HOST, free_port
from tests.support.waiting import until


class Watch(Attachment):
    """The least that lives on a connection: it follows a layout."""

    def __init__(self, context: ClientContext, topic: str) -> None:
        super().__init__(context)
        self.topic = topic
        self.session_id = context.ids.session_id()
        self.events: list[str] = []

    async def find(self) -> Connection:
        return await self.context.pool.of_topic(self.topic)

    async def attach(self, connection: Connection) -> None:
        connection.attach(PeerKind.LAYOUT, self.session_id, self)
        lookup = pb.CommandScalableTopicLookup(session_id=self.session_id, topic=self.topic)
        connection.send(
            pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_LOOKUP, scalable_topic_lookup=lookup)
        )

    def attached(self) -> None:
        self.events.append("attached")

    def detached(self, error: MagnetarError) -> None:
        self.events.append("detached")


def sockets() -> int:
    """Of this process."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket:") for link in links)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_client_connects(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(2)
    connection = await client.context.pool.of_topic(made.name)
    assert connection.features.supports_scalable_topics
    assert connection.max_message_size > 0


async def test_connect_to_a_closed_port_fails() -> None:
    port = free_port()
    with pytest.raises(ConnectionLost, match=str(port)):
        await magnetar.connect(f"pulsar://{HOST}:{port}", connect_timeout_s=5)


async def test_a_port_that_speaks_otherwise(service: Service) -> None:
    http = service.admin_url.removeprefix("http://")
    with pytest.raises(ConnectionLost):
        await magnetar.connect(f"pulsar://{http}", connect_timeout_s=5)


async def test_an_address_that_is_none() -> None:
    with pytest.raises(InvalidArgument):
        magnetar.connect("localhost:6650")


async def test_the_second_host_is_as_good(service: Service) -> None:
    good = service.url.removeprefix("pulsar://")
    for url in (f"{HOST}:{free_port()},{good}", f"{good},{HOST}:{free_port()}"):
        async with magnetar.connect(f"pulsar://{url}"):
            pass


async def test_close_leaves_no_task_and_no_socket(service: Service, topic: MakeTopic) -> None:
    made = await topic()
    before = sockets()
    async with magnetar.connect(service.url) as client:
        watch = Watch(client.context, made.name)
        await watch.open(20)
        await watch.close()
        assert sockets() > before
    assert sockets() == before
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(AlreadyClosed):
        await client.context.pool.any()
    await client.close()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6, 8, 12, 20])
async def test_a_cancelled_connect_leaves_nothing(service: Service, steps: int) -> None:
    before = sockets()
    connecting = asyncio.ensure_future(magnetar.connect(service.url)._open())
    await turns(steps)
    connecting.cancel()
    await asyncio.wait((connecting,))
    if not connecting.cancelled():
        await connecting.result().close()
    await until(lambda: sockets() == before)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("steps", [*range(10), 15, 25])
async def test_a_cancelled_attachment_leaves_the_connection_well(
    client: magnetar.Client, topic: MakeTopic, steps: int
) -> None:
    made = await topic()
    watch = Watch(client.context, made.name)
    opening = asyncio.ensure_future(watch.open(20))
    await turns(steps)
    opening.cancel()
    await asyncio.wait((opening,))
    if not opening.cancelled():
        await watch.close()
    assert watch.state in (AttachmentState.CLOSED, AttachmentState.NEW)
    again = Watch(client.context, made.name)
    await again.open(20)
    connection = again.connection
    assert connection is await client.context.pool.of_topic(made.name)
    await again.close()


async def test_attachments_come_back_to_a_broker_that_was_killed(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await broker.create_scalable("x", 1)
        async with magnetar.connect(f"pulsar://{HOST}:{broker.port}") as client:
            watches = [Watch(client.context, "topic://public/default/x") for _ in range(5)]
            await asyncio.gather(*(each.open(20) for each in watches))
            broker.kill()
            await until(lambda: all(each.events[-1] == "detached" for each in watches))
            await broker.start()
            await until(lambda: all(each.state is AttachmentState.ATTACHED for each in watches))
            assert len({id(each.connection) for each in watches}) == 1
            assert {tuple(each.events) for each in watches} == {
                ("attached", "detached", "attached")
            }
            await asyncio.gather(*(each.close() for each in watches))


# TLS


@asynccontextmanager
async def tls_in_front(
    service: Service, certificate: Certificate, trust: Path | None = None
) -> AsyncIterator[str]:
    """A server that takes TLS off and passes everything on; `trust`: clients must show theirs."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.chain, certificate.key)
    if trust is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(trust)
    host, _, port = service.url.removeprefix("pulsar://").partition(":")
    passing: set[asyncio.Task[None]] = set()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        for task in (copy(reader, far_writer), copy(far_reader, writer)):
            passing.add(asyncio.ensure_future(task))

    server = await asyncio.start_server(serve, HOST, 0, ssl=context)
    try:
        yield f"pulsar+ssl://{HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Certificate]:
    """Makes certificates, each in a directory of its own."""
    return lambda name: make_certificate(tmp_path_factory.mktemp(name), HOST)


async def test_tls(service: Service, certificate: Callable[[str], Certificate]) -> None:
    shown = certificate("server")
    async with tls_in_front(service, shown) as url:
        async with magnetar.connect(url, tls_trust_file=shown.chain) as client:
            connection = await client.context.pool.any()
            assert connection.address.tls
            assert connection.features.supports_scalable_topics
        with pytest.raises(ConnectionLost, match="CERTIFICATE_VERIFY_FAILED"):
            await magnetar.connect(url)
        async with magnetar.connect(url, tls_check_certificate=False):
            pass
        with pytest.raises(ConnectionLost, match="certificate"):
            await magnetar.connect(url.replace(HOST, "localhost"), tls_trust_file=shown.chain)
        async with magnetar.connect(
            url.replace(HOST, "localhost"), tls_trust_file=shown.chain, tls_check_hostname=False
        ):
            pass


async def test_both_sides_show_a_certificate(
    service: Service, certificate: Callable[[str], Certificate]
) -> None:
    shown, mine = certificate("server"), certificate("client")
    async with tls_in_front(service, shown, trust=mine.chain) as url:
        with pytest.raises(ConnectionLost):
            await magnetar.connect(url, tls_trust_file=shown.chain)
        async with magnetar.connect(
            url,
            tls_trust_file=shown.chain,
            tls_certificate_file=mine.chain,
            tls_key_file=mine.key,
        ) as client:
            assert (await client.context.pool.any()).address.tls
