"""Connections and their pool, on sockets: sharing, ways there, cancellation, the end."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from magnetar.bounds import LOOKUP_REDIRECTS, WRITE_HIGH_WATER
from magnetar.errors import (
    AlreadyClosed,
    AuthenticationFailed,
    BrokerFailed,
    ConnectionLost,
    NotSupported,
    OperationTimedOut,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.identity import Identities
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.settings import ClientSettings
from magnetar.wire.attachment import is_retriable
from magnetar.wire.connection import PeerKind
from magnetar.wire.pool import ConnectionPool
from tests.support.authority import Authority
from tests.support.bounds import set_bound
from tests.support.certificates import make_certificate
from tests.support.child_process import free_port
from tests.support.waiting import until
from tests.unit.magnetar.wire.fake_broker import Peer, serving
from tests.unit.magnetar.wire.shells import Kind, RecordingHandler, command

Lookup = pb.CommandLookupTopicResponse


class Steady(random.Random):
    """Begins with the first host."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0


def pool_of(url: str, settings: ClientSettings | None = None) -> ConnectionPool:
    return ConnectionPool(url, settings or ClientSettings(), Identities(), Steady())


def schema_request() -> pb.BaseCommand:
    return command(Kind.GET_SCHEMA, topic="x")


def answered(peer: Peer, received: pb.BaseCommand) -> None:
    peer.say(Kind.GET_SCHEMA_RESPONSE, request_id=received.get_schema.request_id)


async def test_the_oldest_of_too_many_connections_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "KNOWN_BROKERS", 2)
    async with serving() as first, serving() as second, serving() as third:
        pool = pool_of(first.url)
        made = [await pool.at(each.url) for each in (first, second, third)]
        assert [each.is_lost for each in made] == [True, False, False]
        assert pool.connections == tuple(made[1:])
        assert not (await pool.any()).is_lost
        assert len(pool.connections) == 2
        await pool.close()


async def test_a_broker_that_asks_for_many_proofs_and_reads_none_gets_one() -> None:
    proofs: list[bytes] = []

    def greet(peer: Peer, received: pb.BaseCommand) -> None:
        if received.type == Kind.CONNECT:
            peer.welcome()
        else:
            proofs.append(received.auth_response.response.auth_data)

    async with serving(answered, greet) as broker:
        pool = pool_of(broker.url, ClientSettings(token="t"))
        connection = await pool.any()
        connection.pause_writing()
        for _ in range(20):
            challenge = command(Kind.AUTH_CHALLENGE)
            challenge.auth_challenge.challenge.auth_data = b"PulsarAuthRefresh"
            broker.peers[0].send(challenge)
            await connection.request(schema_request())
        connection.resume_writing()
        await until(lambda: bool(proofs))
        await connection.request(schema_request())
        assert proofs == [b"t"]
        await pool.close()


class TestSharing:
    async def test_concurrent_requests_share_one_connection(self) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            made = await asyncio.gather(*(pool.any() for _ in range(5)), pool.at(broker.url))
            assert len(set(map(id, made))) == 1
            assert await pool.any() is made[0]
            assert len(broker.peers) == 1
            await pool.close()

    async def test_cancelled_connect_does_not_disturb_the_others(self) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            first, second = (asyncio.ensure_future(pool.any()) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            assert not (await second).is_lost
            assert len(broker.peers) == 1
            await pool.close()

    async def test_lost_connection_is_opened_again(self) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            connection = await pool.any()
            handler = RecordingHandler()
            connection.attach(PeerKind.CONSUMER, 1, handler)
            assert broker.peers[0].transport is not None
            broker.peers[0].transport.abort()
            await until(lambda: bool(handler.losses))
            assert connection.is_lost
            with pytest.raises(ConnectionLost):
                connection.send(command(Kind.FLOW, consumer_id=1, message_permits=1))
            assert await pool.any() is not connection
            await pool.close()

    async def test_a_closed_pool_makes_nothing(self) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            waiting = asyncio.ensure_future(pool.any())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await pool.close()
            with pytest.raises(AlreadyClosed):
                await waiting
            with pytest.raises(AlreadyClosed):
                await pool.any()


class TestWaysThere:
    async def test_the_next_host_after_a_failure(self) -> None:
        async with serving() as broker:
            dead = free_port()
            pool = pool_of(f"pulsar://127.0.0.1:{dead},127.0.0.1:{broker.port}")
            connection = await pool.any()
            assert connection.address.physical.port == broker.port
            assert await pool.any() is connection
            await pool.close()

    async def test_no_host_at_all(self) -> None:
        pool = pool_of(f"pulsar://127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
        with pytest.raises(ConnectionLost, match="No connection to"):
            await pool.any()
        await pool.close()

    async def test_a_refusal_is_final_for_all_hosts(self) -> None:
        def refuse(peer: Peer, received: pb.BaseCommand) -> None:
            peer.say(Kind.ERROR, request_id=2**64 - 1, error=pb.AuthenticationError, message="no")

        async with serving(greet=refuse) as broker:
            pool = pool_of(f"{broker.url},127.0.0.1:{broker.port}")
            with pytest.raises(AuthenticationFailed):
                await pool.any()
            assert len(broker.peers) == 1
            await until(lambda: not broker.live)
            await pool.close()

    async def test_lookups_follow_redirects(self) -> None:
        async with serving() as owner:

            def redirect(peer: Peer, received: pb.BaseCommand) -> None:
                answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
                answer.lookup_response.response = Lookup.Redirect
                answer.lookup_response.broker_service_url = second.url
                answer.lookup_response.authoritative = True
                peer.send(answer)

            def tell(peer: Peer, received: pb.BaseCommand) -> None:
                assert received.lookup.authoritative
                answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
                answer.lookup_response.response = Lookup.Connect
                answer.lookup_response.broker_service_url = owner.url
                peer.send(answer)

            async with serving(redirect) as first, serving(tell) as second:
                pool = pool_of(first.url)
                connection = await pool.of_topic("topic://public/default/x")
                assert connection.address.physical.port == owner.port
                assert not first.peers[0].received[-1].lookup.authoritative
                await pool.close()

    async def test_redirects_have_an_end(self) -> None:
        def redirect(peer: Peer, received: pb.BaseCommand) -> None:
            answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
            answer.lookup_response.response = Lookup.Redirect
            answer.lookup_response.broker_service_url = broker.url
            peer.send(answer)

        async with serving(redirect) as broker:
            pool = pool_of(broker.url)
            with pytest.raises(BrokerFailed, match="times"):
                await pool.of_topic("x")
            assert len(broker.peers[0].received) == 1 + LOOKUP_REDIRECTS + 1
            await pool.close()

    @pytest.mark.parametrize("error", [None, pb.TopicNotFound])
    async def test_a_lookup_that_fails(self, error: pb.ServerError | None) -> None:
        def fail(peer: Peer, received: pb.BaseCommand) -> None:
            answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
            answer.lookup_response.response = Lookup.Failed
            if error is not None:
                answer.lookup_response.error = error
            peer.send(answer)

        async with serving(fail) as broker:
            pool = pool_of(broker.url)
            with pytest.raises(BrokerFailed if error is None else TopicNotFound):
                await pool.of_topic("x")
            await pool.close()

    async def test_a_host_that_is_not_ready_is_left(self) -> None:
        def not_ready(peer: Peer, received: pb.BaseCommand) -> None:
            answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
            answer.lookup_response.response = Lookup.Failed
            answer.lookup_response.error = pb.ServiceNotReady
            peer.send(answer)

        async with serving(not_ready) as first, serving() as second:
            pool = pool_of(f"{first.url},127.0.0.1:{second.port}")
            with pytest.raises(ServiceNotReady):
                await pool.of_topic("x")
            assert (await pool.any()).address.physical.port == second.port
            await pool.close()

    async def test_an_owner_without_address(self) -> None:
        def tell(peer: Peer, received: pb.BaseCommand) -> None:
            answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
            answer.lookup_response.response = Lookup.Connect
            answer.lookup_response.broker_service_url_tls = "pulsar+ssl://x:1"
            peer.send(answer)

        async with serving(tell) as broker:
            pool = pool_of(broker.url)
            with pytest.raises(NotSupported):
                await pool.of_topic("x")
            await pool.close()

    async def test_lookups_tell_which_two_addresses_are_of_one_broker(self) -> None:
        def tell(peer: Peer, received: pb.BaseCommand) -> None:
            answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
            answer.lookup_response.response = Lookup.Connect
            answer.lookup_response.broker_service_url = broker.url
            answer.lookup_response.broker_service_url_tls = "pulsar+ssl://x:1"
            peer.send(answer)

        async with serving(tell) as broker:
            pool = pool_of(broker.url)
            assert pool.tls_url_of(broker.url) is None
            await pool.of_topic("x")
            assert pool.tls_url_of(broker.url) == "pulsar+ssl://x:1"
            assert pool.tls_url_of("pulsar://other:1") is None
            await pool.close()

    async def test_brokers_behind_the_service_url(self) -> None:
        def tell(peer: Peer, received: pb.BaseCommand) -> None:
            answer = command(Kind.LOOKUP_RESPONSE, request_id=received.lookup.request_id)
            answer.lookup_response.response = Lookup.Connect
            answer.lookup_response.broker_service_url = "pulsar://hidden:6650"
            answer.lookup_response.proxy_through_service_url = True
            peer.send(answer)

        async with serving(tell) as proxy:
            pool = pool_of(proxy.url)
            connection = await pool.of_topic("x")
            plain, through = (peer.received[0].connect for peer in proxy.peers)
            assert not plain.HasField("proxy_to_broker_url")
            assert through.proxy_to_broker_url == "hidden:6650"
            assert await pool.at("pulsar://hidden:6650") is connection
            other = await pool.at("pulsar://other:6650")
            assert other.address.physical.port == proxy.port
            assert await pool.any() is not connection
            await pool.close()


class TestRequests:
    async def test_time_is_up(self) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            connection = await pool.any()
            with pytest.raises(OperationTimedOut, match="GET_SCHEMA"):
                await connection.request(schema_request(), 0.001)
            assert not connection.is_lost
            await pool.close()

    async def test_a_cancelled_request_disturbs_nobody(self) -> None:
        held: list[tuple[Peer, pb.BaseCommand]] = []

        async with serving(lambda peer, received: held.append((peer, received))) as broker:
            pool = pool_of(broker.url)
            connection = await pool.any()
            first, second = (
                asyncio.ensure_future(connection.request(schema_request())) for _ in range(2)
            )
            await until(lambda: len(held) == 2)
            first.cancel()
            await asyncio.wait((first,))
            for peer, received in held:
                answered(peer, received)
            answer = await second
            request_ids = [each.get_schema.request_id for _, each in held]
            assert answer.get_schema_response.request_id == request_ids[1]
            assert first.cancelled()
            await pool.close()

    async def test_waiting_requests_fail_when_the_connection_is_lost(self) -> None:
        def drop(peer: Peer, received: pb.BaseCommand) -> None:
            assert peer.transport is not None
            peer.transport.abort()

        async with serving(drop) as broker:
            pool = pool_of(broker.url)
            with pytest.raises(ConnectionLost):
                await (await pool.any()).request(schema_request())
            await pool.close()

    async def test_one_turn_is_one_write(self) -> None:
        async with serving(answered) as broker:
            pool = pool_of(broker.url)
            connection = await pool.any()
            chunks = broker.peers[0].chunks
            await asyncio.gather(*(connection.request(schema_request()) for _ in range(50)))
            assert broker.peers[0].chunks == chunks + 1
            await pool.close()

    async def test_a_peer_that_reads_nothing_makes_it_not_writable(self) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            connection = await pool.any()
            transport = broker.peers[0].transport
            assert transport is not None
            transport.pause_reading()
            assert connection.writable
            while connection.writable:
                connection.write(bytes(WRITE_HIGH_WATER))  # is never read
                await asyncio.sleep(0)
            drained = asyncio.ensure_future(connection.drained())
            await asyncio.sleep(0)
            assert not drained.done()
            transport.abort()
            with pytest.raises(ConnectionLost):
                await drained
            await pool.close()

    async def test_frames_written_before_close_are_delivered(self) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            connection = await pool.any()
            connection.send(command(Kind.CLOSE_PRODUCER, producer_id=1, request_id=1))
            await pool.close()
            await until(lambda: not broker.live)
            assert broker.peers[0].received[-1].type == Kind.CLOSE_PRODUCER


class TestAuthentication:
    async def test_fresh_proof_whenever_it_is_wanted(self) -> None:
        tokens = iter(["first", "second", "third"])
        proofs: list[bytes] = []

        async def token() -> str:
            return next(tokens)

        def greet(peer: Peer, received: pb.BaseCommand) -> None:
            if received.type == Kind.CONNECT:
                assert received.connect.auth_method_name == "token"
                proofs.append(received.connect.auth_data)
                peer.say(Kind.AUTH_CHALLENGE, server_version="fake")
                return
            proofs.append(received.auth_response.response.auth_data)
            if len(proofs) == 2:
                peer.welcome()

        async with serving(answered, greet) as broker:
            pool = pool_of(broker.url, ClientSettings(token=token))
            connection = await pool.any()
            challenge = command(Kind.AUTH_CHALLENGE)
            challenge.auth_challenge.challenge.auth_data = b"PulsarAuthRefresh"
            broker.peers[0].send(challenge)
            await connection.request(schema_request())
            await until(lambda: len(proofs) == 3)
            assert proofs == [b"first", b"second", b"third"]
            await pool.close()

    async def test_no_proof_no_connection(self) -> None:
        def token() -> str:
            raise OSError("no disk")

        async with serving() as broker:
            pool = pool_of(broker.url, ClientSettings(token=token))
            with pytest.raises(AuthenticationFailed, match="no disk"):
                await pool.any()
            assert not broker.peers
            await pool.close()

    @pytest.mark.parametrize("renewed", [True, False], ids=["from a function", "as text"])
    async def test_only_a_function_may_have_a_better_token_later(self, renewed: bool) -> None:
        believed = True

        def greet(peer: Peer, received: pb.BaseCommand) -> None:
            if believed:
                peer.welcome()
                return
            refusal = {"error": pb.AuthenticationError, "message": "expired"}
            peer.say(Kind.ERROR, request_id=1, **refusal)

        def token() -> str:
            return "mine"

        async with serving(greet=greet) as broker:
            pool = pool_of(broker.url, ClientSettings(token=token if renewed else "mine"))
            connection = await pool.any()
            believed = False
            connection.abort(ConnectionLost("on purpose"))
            with pytest.raises(AuthenticationFailed, match="expired") as refused:
                await pool.any()
            assert is_retriable(refused.value) is renewed
            await pool.close()

    async def test_a_token_that_never_was_believed_is_for_good(self) -> None:
        def greet(peer: Peer, received: pb.BaseCommand) -> None:
            peer.say(Kind.ERROR, request_id=1, error=pb.AuthenticationError, message="who?")

        async with serving(greet=greet) as broker:
            pool = pool_of(broker.url, ClientSettings(token=lambda: "mine"))
            with pytest.raises(AuthenticationFailed, match="who") as refused:
                await pool.any()
            assert not is_retriable(refused.value)
            await pool.close()


class TestTls:
    async def test_a_certificate_that_is_not_trusted_is_called_so(self, tmp_path: Path) -> None:
        shown = make_certificate(tmp_path, "127.0.0.1")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(shown.chain, shown.key)
        async with listening(context) as port:
            pool = pool_of(f"pulsar+ssl://127.0.0.1:{port}")
            with pytest.raises(ConnectionLost, match="name its authority in tls_trust_file"):
                await pool.any()
            await pool.close()

    @pytest.mark.parametrize("scheme", ["pulsar", "pulsar+ssl"])
    async def test_silent_end_of_a_handshake_suggests_a_tls_mismatch(self, scheme: str) -> None:
        async with listening() as port:
            pool = pool_of(f"{scheme}://127.0.0.1:{port}")
            with pytest.raises(ConnectionLost, match="expects TLS") as refused:
                await pool.any()
            assert "()" not in str(refused.value), "it says what happened"
            await pool.close()


async def test_cve_2022_33681_a_server_with_another_name_gets_no_credentials(
    tmp_path: Path,
) -> None:
    received: list[bytes] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))
        writer.close()

    authority = Authority(tmp_path)
    for name, address in (("other", "192.0.2.1"), ("right", "127.0.0.1")):
        shown = authority.issue(name, addresses=(address,))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(shown.chain, shown.key)
        server = await asyncio.start_server(keep, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        settings = ClientSettings(token="its-token", tls_trust_file=authority.chain)
        pool = pool_of(f"pulsar+ssl://127.0.0.1:{port}", settings)
        with pytest.raises(ConnectionLost):
            await pool.any()
        await pool.close()
        server.close()
        await server.wait_closed()
        sent = b"".join(received)
        assert (b"its-token" in sent) is (name == "right")
        assert bool(sent) is (name == "right"), "nothing at all is sent to another name"


@asynccontextmanager
async def listening(context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server that hangs up as soon as it is spoken to."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


class TestCancellation:
    @pytest.mark.parametrize("turns", range(0, 16))
    async def test_a_client_closed_while_it_connects_leaves_no_socket(self, turns: int) -> None:
        async with serving() as broker:
            pool = pool_of(broker.url)
            opening = asyncio.ensure_future(pool.any())
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await pool.close()
            await asyncio.wait((opening,))
            assert not pool.connections
            await until(lambda: not broker.live)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_a_handshake_that_takes_too_long(self) -> None:
        async with serving(greet=lambda peer, received: None) as broker:
            pool = pool_of(broker.url, ClientSettings(connect_timeout_s=0.05))
            with pytest.raises(ConnectionLost, match=r"within 0\.05 s"):
                await pool.any()
            await until(lambda: not broker.live)
            await pool.close()
