"""One test for each security advisory of Apache Pulsar that this broker could share.

Those of its client, and of connections between brokers: `tests/unit/magnetar/credentials`,
`tests/unit/security/test_tls.py`, `tests/unit/security/test_oidc.py`.
"""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from broker.app.service import Broker
from config.settings import load_settings
from magnetar.protocol import pulsar_pb2 as pb
from security.authentication import make_authenticator
from security.errors import CredentialsRefused
from security.providers import Credentials
from tests.support.child_process import free_port
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.roles import TOKENS, connect_as, token_of
from tests.unit.broker.admin.conftest import Rest, asking_broker

Kind = pb.BaseCommand
NAMESPACE = "/admin/v2/namespaces/public/default"
TOPIC = "/admin/v2/persistent/public/default/t"
MARK = "marked-secret-7d1e"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    settings = {
        **TOKENS,
        "authorization": "on",
        "superuser_roles": ("root", "gate"),
        "proxy_roles": ("gate",),
        "ledger_password": MARK,
    }
    async with running(tmp_path, **settings) as broker:
        yield broker


@pytest.fixture
async def rest(broker: Broker) -> AsyncIterator[Rest]:
    async with asking_broker(broker) as rest:
        rest.role = "root"
        await rest.done("PUT", TOPIC)
        await rest.done("PUT", TOPIC + "p/partitions", 2)
        for role, action in (("reader", "consume"), ("writer", "produce")):
            await rest.done("POST", f"{NAMESPACE}/permissions/{role}", [action])
        yield rest


def _part(value: object) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")


async def test_cve_2021_22160_an_unsigned_token_is_none() -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    source = f"data:;base64,{base64.b64encode(der).decode()}"
    settings = load_settings(
        None, {"authentication_providers": "token", "token_public_keys": source}
    )
    authenticator = make_authenticator(settings)
    claims = _part({"sub": "root"})
    for header in ({"alg": "none"}, {"alg": "None"}, {"alg": "NONE"}, {}, {"alg": "RS256"}):
        for signature in (b"", b"e30"):
            token = b".".join((_part(header), claims, signature))
            with pytest.raises(CredentialsRefused):
                await authenticator.authenticate(Credentials("token", token), address="x")
    signed = b".".join((_part({"alg": "HS256"}), claims))
    by_public_key = base64.urlsafe_b64encode(hmac.digest(der, signed, hashlib.sha256))
    token = signed + b"." + by_public_key.rstrip(b"=")
    with pytest.raises(CredentialsRefused):
        await authenticator.authenticate(Credentials("token", token), address="x")


async def test_cve_2021_41571_entries_of_another_topics_ledger_are_not_read(
    broker: Broker, rest: Rest
) -> None:
    await rest.done("PUT", "/admin/v2/tenants/acme", {"adminRoles": []})
    await rest.done("PUT", "/admin/v2/namespaces/acme/secret")
    root = await RawClient.open("127.0.0.1", broker.port, connect_as("root"))
    producer = await root.create_producer("persistent://acme/secret/t")
    stored = (await producer.send(b"secret")).message_id
    reader = await RawClient.open("127.0.0.1", broker.port, connect_as("reader"))
    asked = pb.CommandReadEntries(
        topic="persistent://public/default/t",
        start=pb.MessageIdData(ledger_id=stored.ledger_id, entry_id=stored.entry_id),
        end=pb.MessageIdData(ledger_id=stored.ledger_id, entry_id=stored.entry_id + 1),
        max_bytes=1000,
    )
    answer = await reader.request(Kind.READ_ENTRIES, asked)
    assert b"secret" not in answer.SerializeToString()
    for client in (root, reader):
        await client.close()


async def test_cve_2022_24280_nothing_is_connected_to_at_a_clients_word(broker: Broker) -> None:
    connected = asyncio.Event()
    port = free_port()
    server = await asyncio.start_server(lambda *_: connected.set(), "127.0.0.1", port)
    for role in ("writer", "root"):
        connect = connect_as(role)
        connect.proxy_to_broker_url = f"127.0.0.1:{port}"
        with pytest.raises(BrokerError):
            await RawClient.open("127.0.0.1", broker.port, connect)
    assert not connected.is_set()
    server.close()
    await server.wait_closed()


async def test_cve_2023_30428_a_header_gives_nobody_another_role(rest: Rest) -> None:
    headers = {
        "Authorization": f"Bearer {token_of('writer')}",
        "X-Original-Principal": "root",
    }
    assert (await rest.raw("GET", "/admin/v2/tenants", "", headers))[0] == 401


async def test_cve_2023_30429_behind_a_proxy_the_clients_role_counts(rest: Rest) -> None:
    headers = {
        "Authorization": f"Bearer {token_of('gate')}",
        "X-Original-Principal": "writer",
    }
    assert (await rest.raw("GET", "/admin/v2/tenants", "", headers))[0] == 403


@pytest.mark.parametrize("role", ["reader", "writer"])
async def test_cve_2023_37579_configuration_is_for_superusers(rest: Rest, role: str) -> None:
    for path in ("configuration/runtime", "internal-configuration"):
        rest.role = role
        await rest.refused(403, "GET", f"/admin/v2/brokers/{path}")
        rest.role = "root"
        assert MARK not in json.dumps(await rest.get(f"/admin/v2/brokers/{path}"))


@pytest.mark.parametrize("role", ["reader", "writer"])
async def test_cve_2024_28098_and_29834_grants_change_no_policies_and_unload_nothing(
    rest: Rest, role: str
) -> None:
    rest.role = role
    for topic in (TOPIC, TOPIC + "p", TOPIC + "p-partition-0"):
        for method, path in (
            ("PUT", "/unload"),
            ("POST", "/terminate"),
            ("DELETE", ""),
            ("PUT", "/partitions"),
            ("PUT", "/properties"),
            ("PUT", "/offload"),
            ("POST", f"/permissions/{role}"),
        ):
            await rest.refused(403, method, topic + path)
    for method, path in (("PUT", "/unload"), ("POST", "/retention"), ("DELETE", "")):
        await rest.refused(403, method, NAMESPACE + path)


async def test_cve_2025_30677_no_secret_is_in_the_log(
    broker: Broker, rest: Rest, capsys: pytest.CaptureFixture[str]
) -> None:
    structlog.configure()
    token = token_of("writer")
    connect = connect_as("writer")
    client = await RawClient.open("127.0.0.1", broker.port, connect)
    for wrong in (token[:-2], MARK):
        with pytest.raises(BrokerError):
            await RawClient.open(
                "127.0.0.1",
                broker.port,
                pb.CommandConnect(auth_method_name="token", auth_data=wrong.encode()),
            )
        await rest.raw("GET", "/admin/v2/tenants", "", {"Authorization": f"Bearer {wrong}"})
    await client.close()
    written = "".join(capsys.readouterr())
    assert "login_failed" in written
    for secret in (MARK, token, token.rpartition(".")[2], connect.auth_data.decode()):
        assert secret not in written


async def test_cve_2026_105926_schemas_need_a_grant_without_a_lookup_too(broker: Broker) -> None:
    stranger = await RawClient.open("127.0.0.1", broker.port, connect_as("stranger"))
    topic = "persistent://public/default/t"
    schema = pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
    for kind, body in (
        (Kind.GET_SCHEMA, pb.CommandGetSchema(topic=topic)),
        (Kind.GET_OR_CREATE_SCHEMA, pb.CommandGetOrCreateSchema(topic=topic, schema=schema)),
    ):
        with pytest.raises(BrokerError) as refused:
            await stranger.request(kind, body)
        assert refused.value.code == pb.AuthorizationError
    await stranger.close()


@pytest.mark.parametrize(
    "path",
    [
        "coordinators",
        "coordinatorStats",
        "slowTransactions/1",
        "open",
        "transaction/1/1",
        "transactionMetadata/1/1",
        "headers/open",
        "records/persistent/public/default/t",
    ],
)
async def test_cve_2026_105931_transactions_are_shown_to_superusers(rest: Rest, path: str) -> None:
    for role in ("reader", "writer"):
        rest.role = role
        await rest.refused(403, "GET", f"/admin/v3/transactions/{path}")


async def test_cve_2026_105932_every_domain_has_the_same_rule(rest: Rest) -> None:
    rest.role = "stranger"
    for domain in ("persistent", "non-persistent"):
        await rest.refused(403, "GET", f"/admin/v2/{domain}/public/default")
        await rest.refused(403, "GET", f"/lookup/v2/topic/{domain}/public/default/t")


async def test_cve_2026_105938_a_subscription_of_another_role_is_left_alone(rest: Rest) -> None:
    await rest.done("POST", NAMESPACE + "/subscriptionAuthMode", "Prefix")
    rest.role = "reader"
    await rest.refused(403, "PUT", TOPIC + "/subscription/other")
    await rest.refused(403, "POST", TOPIC + "/subscription/other/skip_all")
    await rest.refused(403, "DELETE", TOPIC + "/subscription/other")
    await rest.done("PUT", TOPIC + "/subscription/reader-1")
