"""Logins of connections, and refreshes of their credentials."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from broker.app.service import Broker
from broker.wire.connection import ConnectionState
from broker.wire.login import REFRESH
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.roles import TOKENS, connect_as, token_of
from tests.support.waiting import TIMEOUT_S, until

Kind = pb.BaseCommand
CHECK_S = 0.05
SLACK_S = 2
"""For a machine that is busy."""
Open = Callable[[pb.CommandConnect | None], Coroutine[None, None, RawClient]]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(
        tmp_path,
        **TOKENS,
        authentication_refresh_check_s=CHECK_S,
        proxy_roles=("gate",),
    ) as broker:
        yield broker


@pytest.fixture
async def open_client(broker: Broker) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def open_one(connect: pb.CommandConnect | None) -> RawClient:
            client = await RawClient.open("127.0.0.1", broker.port, connect)
            stack.push_async_callback(client.close)
            return client

        yield open_one


def answer(role: str, *, life_s: float = 3600) -> pb.CommandAuthResponse:
    data = token_of(role, life_s=life_s).encode()
    return pb.CommandAuthResponse(response=pb.AuthData(auth_method_name="token", auth_data=data))


async def challenged(client: RawClient) -> None:
    event = await client.wait(client.events.get())
    assert event.type == Kind.AUTH_CHALLENGE
    challenge = event.auth_challenge.challenge
    assert (challenge.auth_method_name, challenge.auth_data) == ("token", REFRESH)


async def test_a_client_has_the_role_of_its_token(broker: Broker, open_client: Open) -> None:
    await open_client(connect_as("alice"))
    (connection,) = broker.connections
    assert connection.state is ConnectionState.READY
    assert (connection.owner, connection.roles) == ("alice", ("alice",))


@pytest.mark.parametrize(
    "connect",
    [
        None,
        connect_as("alice", life_s=-60),
        pb.CommandConnect(auth_method_name="token", auth_data=b"x"),
        pb.CommandConnect(auth_method_name="basic", auth_data=b"alice:secret"),
        pb.CommandConnect(auth_method_name="token", auth_data=token_of(
            "alice", secret=b"another secret of 32 bytes or so"
        ).encode()),
        connect_as("gate"),
    ],
    ids=["none", "expired", "broken", "other method", "other key", "proxy without client"],
)  # fmt: skip
async def test_a_client_without_valid_credentials_gets_one_sentence(
    broker: Broker, open_client: Open, connect: pb.CommandConnect | None
) -> None:
    with pytest.raises(BrokerError) as refused:
        await open_client(connect)
    assert refused.value.code == pb.AuthenticationError
    assert refused.value.message == "Failed to authenticate"
    await until(lambda: not broker.connections)


@pytest.mark.parametrize(
    ("connect", "event"),
    [(None, "connection_refused"), (connect_as("alice", life_s=-60), "login_failed")],
    ids=["none", "expired"],
)
async def test_a_refused_login_has_one_line_in_the_log(
    open_client: Open, connect: pb.CommandConnect | None, event: str
) -> None:
    with capture_logs() as lines, pytest.raises(BrokerError):
        await open_client(connect)
    assert [each["event"] for each in lines if each["log_level"] == "warning"] == [event]


async def test_a_client_of_the_first_protocol_names_its_method_by_a_number(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, **TOKENS, anonymous_role="guest") as broker:
        nothing = pb.CommandConnect(auth_method=pb.AuthMethodNone)
        client = await RawClient.open("127.0.0.1", broker.port, nothing)
        (connection,) = broker.connections
        assert connection.owner == "guest"
        await client.close()
        for named in (pb.AuthMethodAthens, pb.AuthMethodYcaV1):
            connect = pb.CommandConnect(auth_method=named)
            with pytest.raises(BrokerError) as refused:
                await RawClient.open("127.0.0.1", broker.port, connect)
            assert refused.value.code == pb.AuthenticationError


async def test_nothing_is_served_before_the_credentials_are_checked(broker: Broker) -> None:
    assert broker.authenticator is not None
    held = asyncio.Event()
    authenticate = broker.authenticator.authenticate

    async def slow(*given: object, **named: object) -> object:
        await held.wait()
        return await authenticate(*given, **named)  # type: ignore[arg-type]

    broker.authenticator.authenticate = slow  # type: ignore[method-assign, assignment]
    client = await RawClient.open_socket("127.0.0.1", broker.port)
    connect = connect_as("alice")
    connect.client_version = "test"
    client.send(Kind.CONNECT, connect)
    (connection,) = broker.connections
    await until(lambda: connection.state is ConnectionState.AUTHENTICATING)
    client.send(Kind.LOOKUP, pb.CommandLookupTopic(topic="t", request_id=1))
    await asyncio.wait_for(client.closed, TIMEOUT_S)
    held.set()
    await client.close()


async def test_credentials_that_expire_are_refreshed_while_commands_are_served(
    broker: Broker, open_client: Open
) -> None:
    client = await open_client(connect_as("alice", life_s=1.5))
    await challenged(client)
    await client.request(Kind.LOOKUP, pb.CommandLookupTopic(topic="persistent://public/default/t"))
    client.send(Kind.AUTH_RESPONSE, answer("alice"))
    (connection,) = broker.connections
    before = connection.principal
    await until(lambda: connection.principal is not before)
    await client.request(Kind.LOOKUP, pb.CommandLookupTopic(topic="persistent://public/default/t"))
    assert connection.state is ConnectionState.READY


@pytest.mark.parametrize("refreshed", ["bob", "gate"])
async def test_a_refresh_as_another_role_ends_the_connection(
    open_client: Open, refreshed: str
) -> None:
    client = await open_client(connect_as("alice", life_s=1.5))
    await challenged(client)
    client.send(Kind.AUTH_RESPONSE, answer(refreshed))
    await asyncio.wait_for(client.closed, TIMEOUT_S)


@pytest.mark.parametrize(
    ("original", "checked"),
    [
        (None, False),
        ("principal", False),
        ("principal and credentials", False),
        ("principal and credentials", True),
    ],
)
async def test_cve_2023_31007_a_connection_ends_with_its_credentials(
    tmp_path: Path, original: str | None, checked: bool
) -> None:
    """Without an answer to AUTH_CHALLENGE, behind a proxy or not: within two periods."""
    settings = {**TOKENS, "authentication_refresh_check_s": CHECK_S, "proxy_roles": ("gate",)}
    settings["authenticate_original_client"] = checked
    async with running(tmp_path, **settings) as broker:
        connect = connect_as("alice", life_s=1.5)
        if original is not None:
            # Where the client is checked, its own credentials are those that expire first.
            connect = connect_as("gate", life_s=3600 if checked else 1.5)
            connect.original_principal = "alice"
        if original == "principal and credentials":
            connect.original_auth_method = "token"
            connect.original_auth_data = token_of("alice", life_s=1.5)
        expires_s = int(time.time() + 1.5)
        client = await RawClient.open("127.0.0.1", broker.port, connect)
        await asyncio.wait_for(client.closed, TIMEOUT_S)
        assert expires_s <= time.time() < expires_s + 2 * CHECK_S + SLACK_S
        challenges = [client.events.get_nowait().type for _ in range(client.events.qsize())]
        # A proxy cannot get new credentials; a client that is believed has none of its own.
        refreshable = original is None or checked
        assert challenges == ([Kind.AUTH_CHALLENGE] if refreshable else [])


async def test_a_client_that_cannot_refresh_is_disconnected(open_client: Open) -> None:
    client = await open_client(connect_as("alice", life_s=1.5, refreshes=False))
    await asyncio.wait_for(client.closed, TIMEOUT_S)


async def test_an_auth_response_without_a_challenge_ends_the_connection(
    open_client: Open,
) -> None:
    client = await open_client(connect_as("alice"))
    client.send(Kind.AUTH_RESPONSE, answer("alice"))
    await asyncio.wait_for(client.closed, TIMEOUT_S)


async def test_behind_a_proxy_the_client_owns_what_it_makes(
    broker: Broker, open_client: Open
) -> None:
    connect = connect_as("gate")
    connect.original_principal = "alice"
    await open_client(connect)
    (connection,) = broker.connections
    assert (connection.owner, connection.roles) == ("alice", ("alice", "gate"))


async def test_a_client_that_is_no_proxy_may_not_name_another_role(open_client: Open) -> None:
    connect = connect_as("alice")
    connect.original_principal = "bob"
    with pytest.raises(BrokerError):
        await open_client(connect)


async def test_a_connection_of_a_proxy_ends_with_the_proxys_credentials(
    open_client: Open,
) -> None:
    connect = connect_as("gate", life_s=1.5)
    connect.original_principal = "alice"
    client = await open_client(connect)
    await asyncio.wait_for(client.closed, TIMEOUT_S)
