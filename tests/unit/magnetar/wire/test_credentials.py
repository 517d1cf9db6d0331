"""Credentials on their way to a broker: when they are sent, renewed, kept back, and logged."""

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from magnetar.context import ClientContext
from magnetar.credentials.exposure import is_loopback
from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.credentials.oauth2 import OAuth2Tokens
from magnetar.errors import (
    AuthenticationFailed,
    ConnectionLost,
    InvalidArgument,
    MagnetarError,
    TokenNotRenewed,
)
from magnetar.identity import Identities
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.settings import ClientSettings
from magnetar.wire import pool as pool_module
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.authentication import OAuth2Authentication, authentication_of
from magnetar.wire.connection import Connection
from magnetar.wire.pool import ConnectionPool
from tests.support.certificates import make_certificate
from tests.support.oauth2_issuer import CLIENT_ID, SECRET, Issuer, issuing
from tests.support.waiting import until
from tests.unit.magnetar.wire.fake_broker import FakeBroker, Peer, serving
from tests.unit.magnetar.wire.shells import Kind
from tests.unit.magnetar.wire.test_pool import pool_of

BASIC = BasicCredentials("ann", "marked-password")


def of_issuer(issuer: Issuer) -> ClientSettings:
    return ClientSettings(
        oauth2=OAuth2Credentials(issuer.url, CLIENT_ID, SECRET, require_https=False)
    )


def at_clock(issuer: Issuer, clock: Callable[[], float]) -> OAuth2Authentication:
    credentials = of_issuer(issuer).oauth2
    assert credentials is not None
    return OAuth2Authentication(credentials, OAuth2Tokens(credentials, clock=clock))


def authenticating(url: str, authentication: OAuth2Authentication) -> ConnectionPool:
    return ConnectionPool(url, ClientSettings(), Identities(), random.Random(1), authentication)


def shown(peer: Peer) -> tuple[str, bytes]:
    """The method and the credentials of its CONNECT."""
    connect = peer.received[0].connect
    return connect.auth_method_name, connect.auth_data


def renewals(peer: Peer) -> list[bytes]:
    return [
        each.auth_response.response.auth_data
        for each in peer.received
        if each.type == Kind.AUTH_RESPONSE
    ]


def challenge(peer: Peer, method: str = "token") -> None:
    asked = pb.AuthData(auth_method_name=method, auth_data=b"PulsarAuthRefresh")
    peer.send(
        pb.BaseCommand(
            type=Kind.AUTH_CHALLENGE, auth_challenge=pb.CommandAuthChallenge(challenge=asked)
        )
    )


def refuse(peer: Peer, received: pb.BaseCommand) -> None:
    peer.say(
        Kind.ERROR,
        request_id=2**64 - 1,
        error=pb.AuthenticationError,
        message="Failed to authenticate",
    )
    assert peer.transport is not None
    peer.transport.close()


class TestConnect:
    @pytest.mark.parametrize("file", [False, True])
    async def test_basic_sends_user_and_password(self, tmp_path: Path, file: bool) -> None:
        given = BASIC
        if file:
            (tmp_path / "password").write_text("marked-password\n")
            given = BasicCredentials("ann", password_file=tmp_path / "password")
        async with serving() as broker:
            pool = pool_of(broker.url, ClientSettings(basic=given))
            connection = await pool.any()
            assert shown(broker.peers[0]) == ("basic", b"ann:marked-password")
            assert "marked-password" not in repr(vars(connection))
            await pool.close()

    async def test_password_function_may_be_async(self) -> None:
        async def password() -> str:
            return "later"

        async with serving() as broker:
            pool = pool_of(broker.url, ClientSettings(basic=BasicCredentials("ann", password)))
            await pool.any()
            assert shown(broker.peers[0]) == ("basic", b"ann:later")
            await pool.close()

    async def test_token_is_read_from_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("e.y.J\n")
        async with serving() as broker:
            pool = pool_of(broker.url, ClientSettings(token=file.as_uri()))
            await pool.any()
            assert shown(broker.peers[0]) == ("token", b"e.y.J")
            await pool.close()
        file.unlink()
        with pytest.raises(AuthenticationFailed, match="/token"):
            await pool_of(broker.url, ClientSettings(token=file.as_uri())).any()

    async def test_connections_share_one_token_of_the_issuer(self) -> None:
        with issuing() as issuer:
            async with serving() as one, serving() as two:
                pool = pool_of(one.url, of_issuer(issuer))
                await asyncio.gather(pool.any(), pool.at(two.url))
                for broker in (one, two):
                    assert shown(broker.peers[0]) == ("token", b"token-1")
                await pool.close()
            assert issuer.issued == 1

    async def test_loop_runs_while_the_issuer_is_slow(self) -> None:
        with issuing() as issuer:
            issuer.held.clear()
            async with serving() as broker:
                pool = pool_of(broker.url, of_issuer(issuer))
                connecting = asyncio.ensure_future(pool.any())
                await until(lambda: issuer.issued == 1)
                assert not broker.peers
                issuer.held.set()
                await connecting
                await pool.close()

    async def test_closing_does_not_wait_for_the_issuer(self) -> None:
        with issuing() as issuer:
            issuer.held.clear()
            pool = pool_of("pulsar://127.0.0.1:1", of_issuer(issuer))
            connecting = asyncio.ensure_future(pool.any())
            await until(lambda: issuer.issued == 1)
            async with asyncio.timeout(1):
                await pool.close()
            with pytest.raises(MagnetarError):
                await connecting
            assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_issuer_that_is_late_is_named_and_not_the_broker(self) -> None:
        async def token() -> str:
            await asyncio.Event().wait()
            return ""

        pool = pool_of("pulsar://127.0.0.1:1", ClientSettings(token=token, connect_timeout_s=0.05))
        with pytest.raises(ConnectionLost, match=r"token credentials .* were not there within"):
            await pool.any()

    async def test_refused_credentials_fail_a_connect_at_once(self) -> None:
        async with serving(greet=refuse) as broker:
            for settings, said in (
                (ClientSettings(basic=BASIC), "does not accept this client's basic credentials"),
                (ClientSettings(token=lambda: "x"), "this client's token credentials"),
                (ClientSettings(), "wants credentials, and this client has none"),
            ):
                with pytest.raises(AuthenticationFailed, match=said) as caught:
                    await pool_of(broker.url, settings).any()
                assert "(Failed to authenticate)" in str(caught.value)
                assert not caught.value.retriable
            assert len(broker.peers) == 3


class TestRenewal:
    async def test_broker_gets_a_new_token_of_the_issuer(self) -> None:
        now = 0.0
        with issuing() as issuer:
            authentication = at_clock(issuer, lambda: now)
            async with serving() as broker:
                pool = authenticating(broker.url, authentication)
                connection = await pool.any()
                now = 100.0  # The token is valid for an hour, but the broker wants another one.
                challenge(broker.peers[0])
                await until(lambda: renewals(broker.peers[0]) == [b"token-2"])
                assert not connection.is_lost
                await pool.close()

    async def test_broker_gets_the_token_that_the_file_has_now(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("first")
        async with serving() as broker:
            pool = pool_of(broker.url, ClientSettings(token=f"file://{file}"))
            await pool.any()
            file.write_text("second")
            challenge(broker.peers[0])
            await until(lambda: renewals(broker.peers[0]) == [b"second"])
            await pool.close()

    async def test_connection_goes_on_while_there_is_no_new_token(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("first")
        async with serving() as broker:
            pool = pool_of(broker.url, ClientSettings(token=file.as_uri()))
            connection = await pool.any()
            file.unlink()
            challenge(broker.peers[0])
            await asyncio.sleep(0.15)
            assert not connection.is_lost
            file.write_text("second")
            await until(lambda: renewals(broker.peers[0]) == [b"second"])
            await pool.close()

    async def test_connection_that_waits_for_a_token_can_be_closed(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("first")
        async with serving() as broker:
            pool = pool_of(broker.url, ClientSettings(token=file.as_uri()))
            await pool.any()
            file.unlink()
            challenge(broker.peers[0])
            await asyncio.sleep(0.05)
            async with asyncio.timeout(1):
                await pool.close()

    async def test_refused_token_of_the_issuer_is_replaced(self) -> None:
        now = 0.0

        def greet(peer: Peer, received: pb.BaseCommand) -> None:
            if received.connect.auth_data == b"token-1" and now:
                refuse(peer, received)
            else:
                peer.welcome()

        with issuing() as issuer:
            authentication = at_clock(issuer, lambda: now)
            async with serving(greet=greet) as broker:
                pool = authenticating(broker.url, authentication)
                await lose(await pool.any(), broker)
                now = 100.0
                with pytest.raises(TokenNotRenewed):
                    await pool.any()
                await pool.any()
                assert [shown(each)[1] for each in broker.peers] == [
                    b"token-1",
                    b"token-1",
                    b"token-2",
                ]
                await pool.close()


async def lose(connection: Connection, broker: FakeBroker) -> None:
    for peer in broker.live:
        assert peer.transport is not None
        peer.transport.abort()
    await until(lambda: connection.is_lost)


def has_tried(broker: FakeBroker, times: int) -> bool:
    return len(broker.peers) >= times


class Anywhere(Attachment):
    """An attachment to any broker, without a command."""

    async def find(self) -> Connection:
        return await self.context.pool.any()

    async def attach(self, connection: Connection) -> None:
        self.found = connection


class TestReconnect:
    async def test_live_attachment_comes_back_when_credentials_are_good_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        good = True

        def greet(peer: Peer, received: pb.BaseCommand) -> None:
            if good:
                peer.welcome()
            else:
                refuse(peer, received)

        async with serving(greet=greet) as broker:
            settings = ClientSettings(token=lambda: "marked-token")
            pool = pool_of(broker.url, settings)
            attachment = Anywhere(ClientContext(pool, settings))
            await attachment.open(5)
            for _ in range(2):  # It is logged once for each time that it begins.
                good = False
                await lose(attachment.found, broker)
                attachment.connection_lost(ConnectionLost("gone"))
                await until(partial(has_tried, broker, len(broker.peers) + 3))
                assert attachment.state is AttachmentState.WAITING
                good = True
                attachment.hurry()
                await until(lambda: attachment.state is AttachmentState.ATTACHED)
            await attachment.close()
            await pool.close()
        logged = [each.getMessage() for each in caplog.records]
        (first, _second) = [each for each in logged if "credentials_not_renewed" in each]
        assert "Failed to authenticate" in first
        assert "marked-token" not in caplog.text

    async def test_fixed_credentials_that_are_refused_end_a_live_attachment(self) -> None:
        good = True

        def greet(peer: Peer, received: pb.BaseCommand) -> None:
            if good:
                peer.welcome()
            else:
                refuse(peer, received)

        async with serving(greet=greet) as broker:
            settings = ClientSettings(basic=BASIC)
            pool = pool_of(broker.url, settings)
            attachment = Anywhere(ClientContext(pool, settings))
            await attachment.open(5)
            good = False
            await lose(attachment.found, broker)
            attachment.connection_lost(ConnectionLost("gone"))
            await until(lambda: attachment.state is AttachmentState.FAILED)
            assert isinstance(attachment.error, AuthenticationFailed)
            await attachment.close()
            await pool.close()


# TLS


@asynccontextmanager
async def tls_server(directory: Path, address: str) -> AsyncIterator[tuple[str, Path, list[bytes]]]:
    """A server with a certificate for `address`: its URL, its authority, the bytes that it got."""
    certificate = make_certificate(directory, address)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.chain, certificate.key)
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read(1))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"pulsar+ssl://127.0.0.1:{port}", certificate.chain, got


@pytest.mark.parametrize("kind", ["token", "basic"])
async def test_broker_of_another_name_gets_no_byte_of_connect(tmp_path: Path, kind: str) -> None:
    async with tls_server(tmp_path, "127.0.0.2") as (url, trust, got):
        for file in (trust, None):  # Another name; an unknown authority.
            settings = (
                ClientSettings(token="marked", tls_trust_file=file)
                if kind == "token"
                else ClientSettings(basic=BASIC, tls_trust_file=file)
            )
            with pytest.raises(ConnectionLost, match="certificate") as caught:
                await pool_of(url, settings).any()
            assert "marked" not in repr(caught.value)
        assert got == []


async def test_broker_of_the_right_name_gets_connect(tmp_path: Path) -> None:
    async with tls_server(tmp_path, "127.0.0.1") as (url, trust, got):
        with pytest.raises(ConnectionLost):
            await pool_of(url, ClientSettings(token="marked", tls_trust_file=trust)).any()
        assert [len(each) for each in got] == [1]


# Without encryption


@pytest.mark.parametrize(
    ("url", "settings", "times"),
    [
        ("pulsar://broker", ClientSettings(token="marked"), 1),
        ("pulsar://broker", ClientSettings(basic=BASIC), 1),
        ("pulsar://10.0.0.1", ClientSettings(token="marked"), 1),
        ("pulsar://broker", ClientSettings(), 0),
        ("pulsar+ssl://broker", ClientSettings(token="marked"), 0),
        ("pulsar://localhost", ClientSettings(token="marked"), 0),
    ],
)
async def test_credentials_without_encryption_are_warned_of_once(
    url: str,
    settings: ClientSettings,
    times: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unreachable(*_args: object) -> Connection:
        raise ConnectionLost("no such host")

    monkeypatch.setattr(pool_module, "connect_to", unreachable)
    caplog.set_level(logging.DEBUG)
    pool = pool_of(url, settings)
    for _ in range(3):
        with pytest.raises(ConnectionLost):
            await pool.any()
    assert caplog.text.count("credentials_sent_unencrypted") == times
    assert "marked" not in caplog.text


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("LocalHost.", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("::", False),
    ],
)
def test_loopback_is_known_by_its_name(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClientSettings(basic=BASIC),
        lambda: ClientSettings(basic=BASIC, tls_certificate_file="c", tls_key_file="k"),
    ],
)
def test_basic_counts_more_than_a_certificate(make: Callable[[], ClientSettings]) -> None:
    assert authentication_of(make()).method == "basic"


def test_two_kinds_of_credentials_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="token, basic"):
        ClientSettings(token="x", basic=BASIC)
