"""The client on a broker with TLS, authentication and authorization.

All tests share one broker of their own, Magnetar or Apache Pulsar (`--peer`).  It checks every
second for tokens that have expired.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from typer.testing import CliRunner, Result

import magnetar
from magnetar.cli.main import build_app
from magnetar.consume.settings import InitialPosition
from magnetar.errors import (
    AuthenticationFailed,
    AuthorizationFailed,
    ConnectionLost,
    TransactionNotFound,
)
from magnetar.settings import Token
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.fixtures import STARTED_PEER, serving
from tests.java.peer_process import PeerProcess
from tests.java.peer_security import ADMIN, PeerSecurity
from tests.support.child_process import HOST, free_port

pytestmark = pytest.mark.timeout(60, func_only=True)  # the broker's start has a limit of its own
WAIT_S = 30
OTHER_NAME = "127.1"
"""Resolves to the broker's address, and is not in its certificate."""
EXPIRES_S = 2
"""Of tokens that a test sees expire: whole seconds, and the broker is asked when they are over."""


@dataclass(frozen=True)
class Secured:
    """The broker of these tests."""

    url: str
    tls_url: str
    admin_url: str
    security: PeerSecurity

    @property
    def trust(self) -> Path:
        """The authority of its certificate."""
        return self.security.authority.chain

    async def ask(self, method: str, path: str, body: object) -> None:
        """One REST request of somebody who may do everything."""
        url = f"{self.admin_url}/admin/v2{path}"
        async with (
            aiohttp.ClientSession(headers=self.security.admin_headers) as session,
            session.request(method, url, json=body) as answer,
        ):
            assert answer.status == 204, await answer.text()

    async def grant(self, role: str, *actions: str) -> None:
        """Let a role do this with the topics of the namespace."""
        await self.ask("POST", f"/namespaces/public/default/permissions/{role}", list(actions))


@pytest.fixture(scope="module")
def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    peer = request.config.getoption("--peer", default=None)
    if peer not in (None, STARTED_PEER):
        pytest.skip("the settings of a broker that runs already are not known")
    directory = tmp_path_factory.mktemp("security")
    security = PeerSecurity.make(directory, free_port(), HOST)
    process: BrokerUnderTest
    if peer is None:
        process = MagnetarProcess(directory, security.settings())
    else:
        process = PeerProcess(free_port(), free_port(), security=security)
        process.wipe()
    for _ in serving(process):
        tls_url = f"pulsar+ssl://{HOST}:{security.tls_port}"
        yield Secured(process.url, tls_url, process.admin_url, security)


@pytest.fixture
async def topic(secured: Secured) -> str:
    """A scalable topic of two segments."""
    name = f"secured-{uuid4().hex[:8]}"
    await secured.ask("PUT", f"/scalable/public/default/{name}?numInitialSegments=2", {})
    return f"topic://public/default/{name}"


@asynccontextmanager
async def trusting(secured: Secured, token: Token) -> AsyncIterator[magnetar.Client]:
    """A client by TLS and with this token."""
    async with magnetar.connect(secured.tls_url, token=token, tls_trust_file=secured.trust) as made:
        yield made


async def works(client: magnetar.Client, topic: str) -> None:
    """Messages go in, by both ways of sending, and come out, by all ways of reading."""
    start = InitialPosition.EARLIEST
    async with (
        client.producer(topic) as producer,
        client.queue_consumer(topic, "queue", initial_position=start) as queue,
        client.stream_consumer(topic, "stream", initial_position=start) as stream,
        client.checkpoint_consumer(topic) as checkpoint,
    ):
        async with client.transaction() as transaction:
            for number in range(10):
                sent = b"%d" % number
                await producer.send(sent, key=f"key-{number}", transaction=transaction)
        for number in range(10, 20):
            await producer.send(b"%d" % number, key=f"key-{number}")
        read: list[set[bytes]] = [set(), set(), set()]
        for _ in range(20):
            of_queue = await queue.receive(WAIT_S)
            of_stream = await stream.receive(WAIT_S)
            of_checkpoint = await checkpoint.receive(WAIT_S)
            await queue.ack(of_queue)
            await stream.ack(of_stream)
            for values, message in zip(read, (of_queue, of_stream, of_checkpoint), strict=True):
                values.add(message.data)
        assert read == [{b"%d" % number for number in range(20)}] * 3


# Tokens


async def test_a_token_as_text_lets_in(secured: Secured, topic: str) -> None:
    async with magnetar.connect(secured.url, token=secured.security.token(ADMIN)) as client:
        await works(client, topic)


async def test_a_token_may_come_from_a_coroutine(secured: Secured) -> None:
    async def token() -> str:
        await asyncio.sleep(0)
        return secured.security.token(ADMIN)

    async with magnetar.connect(secured.url, token=token):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        lambda security: None,
        lambda security: "this is no token",
        lambda security: security.token(ADMIN, secret=b"of somebody else" * 2),
        lambda security: security.token(ADMIN, expires_s=-60),
    ],
    ids=["none", "not a token", "signed by another key", "expired"],
)
async def test_a_wrong_token_is_refused(
    secured: Secured, wrong: Callable[[PeerSecurity], str | None]
) -> None:
    with pytest.raises(AuthenticationFailed):
        await magnetar.connect(secured.url, token=wrong(secured.security))


async def test_a_fresh_token_is_fetched_when_the_last_one_expires(
    secured: Secured, topic: str
) -> None:
    calls = 0

    def token() -> str:
        nonlocal calls
        calls += 1
        return secured.security.token(ADMIN, expires_s=EXPIRES_S)

    async with trusting(secured, token) as client, client.producer(topic) as producer:
        connections = client.context.pool.connections
        await act_until(lambda: calls >= 3, lambda: producer.send(b"still here"))
        assert client.context.pool.connections == connections, "it did not have to connect anew"


async def test_a_token_that_cannot_be_refreshed_ends_it(secured: Secured, topic: str) -> None:
    token = secured.security.token(ADMIN, expires_s=EXPIRES_S)
    async with trusting(secured, token) as client, client.producer(topic) as producer:
        with pytest.raises(AuthenticationFailed):
            await act_until(lambda: False, lambda: producer.send(b"still here"))


@pytest.mark.parametrize("late", ["missing", pytest.param("expired", marks=pytest.mark.long)])
async def test_client_without_a_fresh_token_continues_later(
    secured: Secured, topic: str, late: str
) -> None:
    """What the client has made comes back, all of it, when there is a token again."""
    calls = 0

    def token() -> str:
        nonlocal calls
        calls += 1
        away = 1 < calls < 8
        if away and late == "missing":
            raise OSError("the server of tokens is away")
        return secured.security.token(ADMIN, expires_s=-60 if away else EXPIRES_S)

    async with (
        trusting(secured, token) as client,
        client.producer(topic) as producer,
        client.queue_consumer(topic, "queue") as consumer,
    ):
        sent: set[bytes] = set()

        async def send() -> None:
            value = b"%d" % len(sent)
            await producer.send(value, key=value.decode())
            sent.add(value)

        await act_until(lambda: calls >= 9, send)
        read: set[bytes] = set()
        while read < sent:
            message = await consumer.receive(WAIT_S)
            await consumer.ack(message)
            read.add(message.data)
        assert read == sent


async def act_until(condition: Callable[[], bool], act: Callable[[], Awaitable[object]]) -> None:
    """Act over and over until the condition holds."""
    async with asyncio.timeout(30):
        while not condition():
            await act()
            await asyncio.sleep(0.05)


# Permissions


async def test_role_without_permission_is_refused(secured: Secured, topic: str) -> None:
    async with trusting(secured, secured.security.token("nobody")) as client:
        with pytest.raises(AuthorizationFailed):
            await client.producer(topic)
        with pytest.raises(AuthorizationFailed):
            await client.queue_consumer(topic, "queue")
        with pytest.raises(AuthorizationFailed):
            await client.stream_consumer(topic, "stream")


async def test_role_that_may_produce_may_not_consume(secured: Secured, topic: str) -> None:
    await secured.grant("writer", "produce")
    async with trusting(secured, secured.security.token("writer")) as client:
        async with client.producer(topic) as producer:
            await producer.send(b"mine")
        with pytest.raises(AuthorizationFailed):
            await client.queue_consumer(topic, "queue")
        with pytest.raises(AuthorizationFailed):
            await client.stream_consumer(topic, "stream")
        with pytest.raises(AuthorizationFailed):
            await client.checkpoint_consumer(topic)


# Transactions


async def test_transaction_of_another_role_cannot_be_ended(secured: Secured, on_peer: bool) -> None:
    """The answer is that for a transaction that ended long ago, or never was."""
    # Apache Pulsar has the same code, but says that the transaction is another one's.
    said = "is neither the owner" if on_peer else "There is no transaction"
    async with (
        trusting(secured, secured.security.token("one")) as one,
        trusting(secured, secured.security.token("another")) as another,
    ):
        txn = await one.begin_transaction(timeout_s=WAIT_S)
        with pytest.raises(TransactionNotFound, match=said):
            await another.end_transaction(txn, commit=False)
        await one.end_transaction(txn, commit=True)


# TLS


async def test_everything_works_through_tls(secured: Secured, topic: str) -> None:
    async with trusting(secured, secured.security.token(ADMIN)) as client:
        await works(client, topic)
        assert all(connection.address.tls for connection in client.context.pool.connections)


async def test_topics_of_a_namespace_are_read_through_tls(secured: Secured) -> None:
    mark = uuid4().hex
    name = f"secured-{mark[:8]}"
    await secured.ask("PUT", f"/scalable/public/default/{name}", {"mark": mark})
    topic = f"topic://public/default/{name}"
    async with (
        trusting(secured, secured.security.token(ADMIN)) as client,
        client.producer(topic) as producer,
        client.queue_consumer(
            subscription="all",
            namespace="public/default",
            properties={"mark": mark},
            initial_position=InitialPosition.EARLIEST,
        ) as consumer,
    ):
        await producer.send(b"found")
        assert (await consumer.receive(WAIT_S)).data == b"found"


async def run(*command: str, **environment: str) -> Result:
    """A command, where and who by the environment."""
    names = {f"MAGNETAR_{name.upper()}": value for name, value in environment.items()}
    names["COLUMNS"] = "1000"
    return await asyncio.to_thread(lambda: CliRunner().invoke(build_app(), command, env=names))


async def test_commands_take_a_token_and_an_authority(secured: Secured, topic: str) -> None:
    where = ("--url", secured.tls_url, "--tls-trust-file", str(secured.trust))
    token = ("--token", secured.security.token(ADMIN))
    produced = await run("produce", topic, "-m", "one", *where, *token)
    assert produced.exit_code == 0, produced.output
    peeked = await run("peek", topic, "-n", "1", *where, *token)
    assert "one" in peeked.output
    refused = await run("peek", topic, *where)
    assert refused.exit_code == 1
    assert "authenticate" in refused.output


async def test_commands_take_a_token_from_a_file_and_from_the_environment(
    secured: Secured, topic: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(secured.security.token(ADMIN) + "\n")
    tls = {"url": secured.tls_url, "tls_trust_file": str(secured.trust)}
    produced = await run("produce", topic, "-m", "one", "--token-file", str(file), **tls)
    assert produced.exit_code == 0, produced.output
    for who in ({"token_file": str(file)}, {"token": secured.security.token(ADMIN)}):
        peeked = await run("peek", topic, "-n", "1", **tls, **who)
        assert "one" in peeked.output
    file.unlink()
    refused = await run("peek", topic, "--token-file", str(file), **tls)
    assert refused.exit_code == 1
    assert "The file of the token" in refused.output


async def test_commands_take_a_certificate(secured: Secured, topic: str) -> None:
    mine = secured.security.certificate(ADMIN)
    shown = ("--tls-certificate-file", str(mine.chain), "--tls-key-file", str(mine.key))
    tls = {"url": secured.tls_url, "tls_trust_file": str(secured.trust)}
    for command in (
        ["produce", topic, "-m", "one"],
        ["peek", topic, "-n", "1"],
        ["consume", topic, "-s", "s", "-n", "1"],
    ):
        done = await run(*command, *shown, **tls)
        assert done.exit_code == 0, done.output
    files = {"tls_certificate_file": str(mine.chain), "tls_key_file": str(mine.key)}
    peeked = await run("peek", topic, "-n", "1", **tls, **files)
    assert "one" in peeked.output
    half = await run("peek", topic, *shown[:2], **tls)
    assert (half.exit_code, "needs its key" in half.output) == (1, True)


async def test_commands_may_trust_any_broker_and_any_name(secured: Secured, topic: str) -> None:
    token = {"token": secured.security.token(ADMIN)}
    by_name = secured.tls_url.replace(HOST, OTHER_NAME)
    trust = ("--tls-trust-file", str(secured.trust))
    refused = await run("peek", topic, "--url", by_name, *trust, **token)
    assert refused.exit_code == 1
    for more in ((*trust, "--no-tls-check-hostname"), ("--no-tls-check-certificate",)):
        done = await run("peek", topic, "--idle-s", "0.1", "--url", by_name, *more, **token)
        assert done.exit_code == 0, done.output


async def test_a_broker_of_an_unknown_authority_is_refused(
    secured: Secured, tmp_path: Path
) -> None:
    token = secured.security.token(ADMIN)
    other = PeerSecurity.make(tmp_path, free_port(), HOST)
    for trust in (None, other.authority.chain):
        with pytest.raises(ConnectionLost, match="tls_trust_file"):
            await magnetar.connect(secured.tls_url, token=token, tls_trust_file=trust)
    async with magnetar.connect(secured.tls_url, token=token, tls_check_certificate=False):
        pass


async def test_a_broker_of_another_name_is_refused(secured: Secured) -> None:
    token = secured.security.token(ADMIN)
    url = secured.tls_url.replace(HOST, OTHER_NAME)
    trust = secured.trust
    with pytest.raises(ConnectionLost, match=re.escape(OTHER_NAME)):
        await magnetar.connect(url, token=token, tls_trust_file=trust)
    async with magnetar.connect(url, token=token, tls_trust_file=trust, tls_check_hostname=False):
        pass


async def test_the_wrong_scheme_for_a_port_is_told(secured: Secured) -> None:
    token = secured.security.token(ADMIN)
    with pytest.raises(ConnectionLost, match="TLS"):
        await magnetar.connect(
            secured.url.replace("pulsar://", "pulsar+ssl://"),
            token=token,
            tls_trust_file=secured.trust,
        )
    with pytest.raises(ConnectionLost, match="TLS"):
        await magnetar.connect(secured.tls_url.replace("pulsar+ssl://", "pulsar://"), token=token)


# Certificates of clients


async def test_a_certificate_lets_in(secured: Secured, topic: str) -> None:
    mine = secured.security.certificate(ADMIN)
    async with magnetar.connect(
        secured.tls_url,
        tls_trust_file=secured.trust,
        tls_certificate_file=mine.chain,
        tls_key_file=mine.key,
    ) as client:
        await works(client, topic)


async def test_its_common_name_is_the_role(secured: Secured, topic: str) -> None:
    mine = secured.security.certificate("nobody")
    async with magnetar.connect(
        secured.tls_url,
        tls_trust_file=secured.trust,
        tls_certificate_file=mine.chain,
        tls_key_file=mine.key,
    ) as client:
        with pytest.raises(AuthorizationFailed):
            await client.producer(topic)


async def test_without_credentials_connecting_is_refused(secured: Secured) -> None:
    with pytest.raises(AuthenticationFailed):
        await magnetar.connect(secured.tls_url, tls_trust_file=secured.trust)


async def test_a_certificate_that_the_broker_does_not_trust_is_refused(secured: Secured) -> None:
    foreign = secured.security.foreign_certificate(ADMIN)
    with pytest.raises(ConnectionLost):
        await magnetar.connect(
            secured.tls_url,
            tls_trust_file=secured.trust,
            tls_certificate_file=foreign.chain,
            tls_key_file=foreign.key,
        )
