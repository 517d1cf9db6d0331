"""Every cell of docs/access.md, asked of a live broker, over REST and by commands."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from google.protobuf.message import Message

from broker.admin.access import question_of, rules
from broker.wire.handlers.access import RULES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.names import NamespaceName
from scripts.print_access_rules import (
    PATH_PARTS,
    POLICIES,
    ROLES,
    example,
    filled,
    may,
    questions_of,
)
from security.access import Need
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.roles import TOKENS, connect_as, token_of
from tests.unit.broker.admin.conftest import Rest, asking_broker

Kind = pb.BaseCommand
REFUSED = (401, 403)
TENANT: Mapping[str, object] = {"adminRoles": ["acme-admin"], "allowedClusters": ["standalone"]}
BODIES: Mapping[str, object] = {
    "grantPermissionsOnTopics": [],
    "revokePermissionsOnTopics": [],
    "{tenant}": TENANT,
}
"""Bodies of changes, by the last part of the path."""
STREAMED = {Kind.SCALABLE_TOPIC_LOOKUP, Kind.WATCH_SCALABLE_TOPICS, Kind.WATCH_TC_ASSIGNMENTS}
"""Commands whose answers have no request id."""


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Rest]:
    """A broker with the tenant, the namespace and the grants of the page."""
    settings = {**TOKENS, "authorization": "on", "superuser_roles": ("root",)}
    async with running(tmp_path, **settings) as broker, asking_broker(broker) as rest:
        rest.role = "root"
        await rest.done("PUT", "/admin/v2/tenants/acme", TENANT)
        await rest.done("PUT", "/admin/v2/namespaces/acme/orders")
        await broker.namespaces.change(
            NamespaceName("acme", "orders"), lambda record: record.update(POLICIES)
        )
        await rest.done("PUT", "/admin/v2/persistent/acme/orders/new")
        yield rest


def _last_what_deletes(route: tuple[str, str]) -> tuple[bool, str, str]:
    method, path = route
    return method == "DELETE", path, method


async def test_every_request_is_served_to_its_roles_and_to_no_others(secured: Rest) -> None:
    needs = rules()
    routes = sorted(needs.keys() - {("GET", "/admin/v2/broker-channel")}, key=_last_what_deletes)
    # Who may do least comes first, so that what is deleted in the end is there for all others.
    for role in ROLES.values():
        secured.role = role
        for method, path in routes:
            allowed = may(role, (question_of(needs[method, path], PATH_PARTS),))
            body = BODIES.get(path.rpartition("/")[2]) if method in ("POST", "PUT") else None
            status, answer = await secured.call(method, filled(path), body)
            assert (status not in REFUSED) is allowed, (role, method, path, status, answer)


@pytest.mark.parametrize("wrong", ["expired", "foreign", "broken"])
async def test_wrong_credentials_are_refused_on_every_path(secured: Rest, wrong: str) -> None:
    token = {
        "expired": token_of("root", life_s=-60),
        "foreign": token_of("root", secret=bytes(range(1, 33))),
        "broken": "x.y.z",
    }[wrong]
    headers = {"Authorization": f"Bearer {token}"}
    routes = rules().keys() - {("GET", "/admin/v2/broker-channel")}
    # Side by side, as each answer is held back.
    answers = await asyncio.gather(
        *(secured.raw(method, filled(path), "", headers) for method, path in routes)
    )
    assert {status for status, _ in answers} == {401}


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
    exempt = {Kind.CONNECT, Kind.AUTH_RESPONSE, Kind.PING, Kind.PONG}
    asked = [kind for kind in RULES if kind not in exempt and RULES[kind].questions is not None]
    for role in filter(None, ROLES.values()):
        async with AsyncExitStack() as stack:
            for kind in asked:
                client = await RawClient.open("127.0.0.1", secured.binary_port, connect_as(role))
                stack.push_async_callback(client.close)
                refused = await _is_refused(client, kind)
                assert refused is not may(role, questions_of(kind)), (role, FIELD_OF_TYPE[kind])


async def _is_refused(client: RawClient, kind: int) -> bool:
    """Whether a command is answered by AuthorizationError."""
    body = _complete(kind)
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


def _complete(kind: int) -> Message:
    """The example of a command with all fields that it must have."""
    body: Message = getattr(example(kind), FIELD_OF_TYPE[kind])
    for field in body.DESCRIPTOR.fields:
        if not field.is_required or body.HasField(field.name):
            continue
        if field.name == "schema":
            body.schema.CopyFrom(  # type: ignore[attr-defined]
                pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
            )
        elif field.message_type is not None:
            getattr(body, field.name).CopyFrom(pb.MessageIdData(ledger_id=0, entry_id=0))
        else:
            setattr(body, field.name, "x" if field.cpp_type == field.CPPTYPE_STRING else 1)
    return body


def test_who_may_be_nobody_is_served_nothing_but_two_paths() -> None:
    assert [route for route, need in rules().items() if need is Need.NOTHING] == [
        ("GET", "/metrics"),
        ("GET", "/admin/v2/brokers/ready"),
    ]
