"""Every cell of docs/access.md, asked of a live broker, over REST and by commands."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import pytest
from google.protobuf.message import Message

from broker.admin.access import question_of, rules
from broker.admin.authentication import ORIGINAL_PRINCIPAL
from broker.app.service import Broker
from broker.wire.handlers.access import RULES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.frames import Frame, FrameDecoder, encode_command
from magnetar.protocol.names import NamespaceName
from scripts.print_access_rules import (
    PATH_PARTS,
    POLICIES,
    PROXIES,
    REFUSED,
    ROLES,
    filled,
    may,
    questions_of,
)
from tests.support.embedded_broker import running
from tests.support.example_commands import complete_command
from tests.support.raw_client import BrokerError, RawClient
from tests.support.raw_handles import basecommand
from tests.support.roles import TOKENS, bearer, connect_as, token_of
from tests.unit.broker.admin.conftest import Rest, asking_broker

Kind = pb.BaseCommand
REFUSED_STATUS: Final = (401, 403)
TENANT: Mapping[str, object] = {"adminRoles": ["acme-admin"], "allowedClusters": ["standalone"]}
BODIES: Mapping[str, object] = {
    "grantPermissionsOnTopics": [],
    "revokePermissionsOnTopics": [],
    "{tenant}": TENANT,
}
"""Bodies of changes, by the last part of the path."""
STREAMED = {Kind.SCALABLE_TOPIC_LOOKUP, Kind.WATCH_SCALABLE_TOPICS, Kind.WATCH_TC_ASSIGNMENTS}
"""Commands whose answers have no request id."""


CHANNEL: Final = ("GET", "/admin/v2/broker-channel")
"""A path that only brokers with others serve."""
CONNECTIONS: Final = 300
"""Requests and connections at once: each answer to wrong credentials is held back."""


class Caller(NamedTuple):
    """Valid credentials, with the client that they name if they are a proxy's."""

    role: str | None
    client: str | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(filter(None, self))

    @property
    def connect(self) -> pb.CommandConnect:
        assert self.role is not None
        connect = connect_as(self.role)
        if self.client is not None:
            connect.original_principal = self.client
        return connect

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.role is None else bearer(token_of(self.role))
        return headers if self.client is None else {**headers, ORIGINAL_PRINCIPAL: self.client}


def callers() -> Iterator[Caller]:
    """All of the page whose credentials are valid, those who may least first."""
    strong, weak = PROXIES
    for role in ROLES.values():
        yield Caller(role)
        if role is not None:
            yield Caller(strong, role)
            yield Caller(weak, role)


class Refused(NamedTuple):
    """Credentials that are refused."""

    token: str
    original: str | None = None

    @property
    def connect(self) -> pb.CommandConnect:
        data = self.token.encode()
        connect = pb.CommandConnect(auth_method_name="token", auth_data=data)
        if self.original is not None:
            connect.original_principal = self.original
        return connect

    @property
    def headers(self) -> dict[str, str]:
        headers = bearer(self.token)
        return headers if self.original is None else {**headers, ORIGINAL_PRINCIPAL: self.original}


def refused() -> Mapping[str, Refused]:
    """The callers of the page whose credentials are refused, by the page's names."""
    return {
        "wrong": Refused("x.y.z"),
        "expired": Refused(token_of("root", life_s=-60)),
        "foreign": Refused(token_of("root", secret=bytes(range(1, 33)))),
        "claim": Refused(token_of("other"), "root"),
        "bare proxy": Refused(token_of("gate")),
        "proxy for a proxy": Refused(token_of("gate"), "weak-gate"),
    }


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    settings = {
        **TOKENS,
        "authorization": "on",
        "superuser_roles": ("root", "gate"),
        "proxy_roles": PROXIES,
    }
    async with running(tmp_path, **settings) as broker:
        yield broker


@pytest.fixture
async def secured(broker: Broker) -> AsyncIterator[Rest]:
    """A broker with the tenant, the namespace and the grants of the page."""
    async with asking_broker(broker) as rest:
        rest.role = "root"
        await prepare(broker, rest)
        yield rest


async def prepare(broker: Broker, rest: Rest) -> None:
    """Make what the page names, where it is not there."""
    rest.role = "root"
    await rest.call("PUT", "/admin/v2/tenants/acme", TENANT)
    await rest.call("PUT", "/admin/v2/namespaces/acme/orders")
    namespace = NamespaceName("acme", "orders")
    await broker.namespaces.change(namespace, lambda record: record.update(POLICIES))
    await rest.call("PUT", "/admin/v2/persistent/acme/orders/new")


def _last_what_deletes(route: tuple[str, str]) -> tuple[bool, str, str]:
    method, path = route
    return method == "DELETE", path, method


async def test_every_request_is_served_to_its_roles_and_to_no_others(
    broker: Broker, secured: Rest
) -> None:
    needs = rules()
    routes = sorted(needs.keys() - {CHANNEL}, key=_last_what_deletes)
    async with aiohttp.ClientSession(secured.base) as session:
        for caller in callers():
            await prepare(broker, secured)
            for method, path in routes:
                allowed = may(caller.roles, (question_of(needs[method, path], PATH_PARTS),))
                body = BODIES.get(path.rpartition("/")[2]) if method in ("POST", "PUT") else None
                async with session.request(
                    method,
                    filled(path),
                    headers=caller.headers,
                    **({} if body is None else {"json": body}),  # type: ignore[arg-type]
                ) as answer:
                    got = (caller, method, path, answer.status, await answer.text())
                assert (answer.status not in REFUSED_STATUS) is allowed, got


async def test_refused_credentials_get_401_on_every_path(secured: Rest) -> None:
    assert refused().keys() == REFUSED.keys()
    routes = rules().keys() - {CHANNEL}
    # Side by side, as answers to wrong credentials are held back.
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(secured.base, connector=connector) as session:

        async def status_of(name: str, method: str, path: str) -> None:
            headers = refused()[name].headers
            async with session.request(method, filled(path), headers=headers) as answer:
                assert answer.status == 401, (name, method, path)

        await asyncio.gather(
            *(status_of(name, method, path) for name in REFUSED for method, path in routes)
        )


async def test_a_path_is_refused_in_whatever_form_it_is_written(secured: Rest) -> None:
    """A second way to write a path is no way around its rule."""
    secured.role = "other"
    for path in (
        "/admin/v2/tenants/",
        "/admin/v2/tenants//acme",
        "/admin/v2/./tenants",
        "/admin/v2/clusters/../tenants",
        "/admin/v2/%74enants",
        "/admin/v2/persistent/acme/orders/new%2Fpermissions",
        "/admin/v2/persistent/acme/orders/new/permissions/",
        "/admin/v2/persistent/acme%2Forders/new/stats",
        "/admin/v2/persistent/acme/orders/..%2F..%2Ftenants/stats",
    ):
        for method in ("GET", "HEAD"):
            status, answer = await secured.call(method, path)
            assert status in (403, 404, 405, 412), (method, path, status, answer)


async def test_every_command_is_served_to_its_roles_and_to_no_others(secured: Rest) -> None:
    asked = [kind for kind in RULES if RULES[kind].questions is not None]
    for caller in callers():
        if caller.role is None:
            continue
        async with AsyncExitStack() as stack:
            for kind in asked:
                client = await RawClient.open("127.0.0.1", secured.binary_port, caller.connect)
                stack.push_async_callback(client.close)
                is_refused = await _is_refused(client, kind)
                allowed = may(caller.roles, questions_of(kind))
                assert is_refused is not allowed, (caller, FIELD_OF_TYPE[kind])


async def test_every_role_is_served_commands_without_questions(secured: Rest) -> None:
    """Those that go by an id of the connection, and those that are about the role's own things."""
    for kind in (kind for kind in RULES if RULES[kind].questions is None):
        connect = basecommand(Kind.CONNECT, connect_as("other"))
        asked = [complete_command(kind), basecommand(Kind.PING, pb.CommandPing())]
        _, *answers = await _answers(secured.binary_port, connect, asked)
        for each in answers:
            assert each.error.error not in (pb.AuthorizationError, pb.AuthenticationError), each
        assert may(("other",), questions_of(kind)), FIELD_OF_TYPE[kind]


async def test_nothing_is_served_without_credentials(secured: Rest) -> None:
    for kind in RULES:
        (answer,) = await _answers(secured.binary_port, complete_command(kind))
        expected = pb.AuthenticationError if kind == Kind.CONNECT else pb.NotAllowedError
        assert (answer.type, answer.error.error) == (Kind.ERROR, expected), answer
        # The page lets nobody send CONNECT, so that its credentials can be checked.
        assert may((), questions_of(kind)) is (kind == Kind.CONNECT)


async def test_refused_credentials_get_one_error_and_no_command_is_served(secured: Rest) -> None:
    gate = asyncio.Semaphore(CONNECTIONS)

    async def ask(name: str, kind: int) -> None:
        connect = basecommand(Kind.CONNECT, refused()[name].connect)
        async with gate:
            answers = await _answers(secured.binary_port, connect, [complete_command(kind)])
        assert [(each.type, each.error.error) for each in answers] == [
            (Kind.ERROR, pb.AuthenticationError)
        ], (name, FIELD_OF_TYPE[kind])

    await asyncio.gather(*(ask(name, kind) for name in REFUSED for kind in RULES))


async def _answers(
    port: int, first: pb.BaseCommand, later: Sequence[pb.BaseCommand] = ()
) -> list[pb.BaseCommand]:
    """All that the broker sends to these commands until it closes, or answers a PING.

    `later` are sent after the first answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    decoder, answers = FrameDecoder(1 << 20, 1 << 20), list[pb.BaseCommand]()
    if first.type == Kind.CONNECT:
        first.connect.client_version = "test"
    writer.write(encode_command(first))
    while data := await reader.read(1 << 16):
        for frame in decoder.feed(data):
            assert isinstance(frame, Frame)
            answers.append(frame.command)
        if any(each.type == Kind.PONG for each in answers):
            break
        writer.write(b"".join(map(encode_command, later)))
        later = ()
    writer.close()
    return answers


async def _is_refused(client: RawClient, kind: int) -> bool:
    """Whether a command is answered by AuthorizationError."""
    body: Message = getattr(complete_command(kind), FIELD_OF_TYPE[kind])
    if kind in STREAMED:
        client.send(kind, body)  # type: ignore[arg-type]
        answer = await client.wait(client.events.get())
    else:
        try:
            answer = await client.request(kind, body)  # type: ignore[arg-type]
        except BrokerError as error:
            return error.code == pb.AuthorizationError
    fields = getattr(answer, FIELD_OF_TYPE[answer.type])
    names = fields.DESCRIPTOR.fields_by_name
    codes = [getattr(fields, name) for name in ("error", "error_code") if name in names]
    return pb.AuthorizationError in codes
