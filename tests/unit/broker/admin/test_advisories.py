"""Tests of the security advisories of Apache Pulsar; docs/security.md has all, with their tests."""

import ast
import asyncio
import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from broker.admin import not_served
from broker.admin.access import routes_of, rules
from broker.admin.app import build_app
from broker.app.service import Broker
from config.settings import load_settings
from magnetar.protocol import pulsar_pb2 as pb
from scripts.print_access_rules import filled
from security.access import Need
from security.authentication import make_authenticator
from security.errors import CredentialsRefused
from security.password_file import hash_apr1, parse_password_file
from security.providers import Credentials
from security.token_keys import TokenKeys, secret_key
from security.tokens import TokenChecker, TokenRules
from tests.support.child_process import free_port
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.roles import SECRET, TOKENS, connect_as, token_of
from tests.unit.broker.admin.conftest import Rest, asking_broker

Kind = pb.BaseCommand
ROOT: Final = Path(__file__).parents[4]
PACKAGES: Final = ("broker", "config", "magnetar", "security", "storage", "txn")
SECRET_NAMES: Final = (
    "secret|passwd|password|token|signature|digest|hmac|proof|credential|auth_data"
)
SECRET_NAME: Final = re.compile(rf"({SECRET_NAMES})s?$")
COMPARISON: Final = re.compile(rf"({SECRET_NAMES}).*[!=]=|[!=]=.*({SECRET_NAMES})")
NO_SECRETS: Final = frozenset(
    {
        "magnetar/credentials/kinds.py: self.password == ''",
        "security/tls.py: digest == self._digest",
        "storage/managed_ledger/owned_record.py: _digest(record.value) != self._digest",
        "storage/managed_ledger/owned_record.py: _digest(value) == self._digest",
    }
)
"""Comparisons of digests of files and records, and of an empty password of our own."""
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
    headers: tuple[dict[str, str], ...] = (
        {"alg": "none"},
        {"alg": "None"},
        {"alg": "NONE"},
        {},
        {"alg": "RS256"},
    )
    tokens = [
        b".".join((_part(header), claims, signature))
        for header in headers
        for signature in (b"", b"e30")
    ]
    signed = b".".join((_part({"alg": "HS256"}), claims))
    by_public_key = base64.urlsafe_b64encode(hmac.digest(der, signed, hashlib.sha256))
    tokens.append(signed + b"." + by_public_key.rstrip(b"="))
    # Side by side, as each answer is held back.
    answers = await asyncio.gather(
        *(authenticator.authenticate(Credentials("token", each), address="x") for each in tokens),
        return_exceptions=True,
    )
    assert {type(each) for each in answers} == {CredentialsRefused}


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
    for connect in (
        connect_as("writer"),
        connect_as("root"),
        connect_as("root", life_s=-60),
        pb.CommandConnect(),
    ):
        connect.proxy_to_broker_url = f"127.0.0.1:{port}"
        with pytest.raises(BrokerError):
            await RawClient.open("127.0.0.1", broker.port, connect)
    assert not connected.is_set()
    server.close()
    await server.wait_closed()


async def test_cve_2022_34321_2023_37544_no_route_answers_without_credentials(
    broker: Broker, rest: Rest
) -> None:
    rest.role = None
    served = set(routes_of(build_app(broker).router)) | rules().keys()
    answers = {
        (method, path): (await rest.call(method, filled(path)))[0] for method, path in served
    }
    others = [("GET", "/"), ("GET", "/admin"), ("GET", "/ws/v2/pingpong"), ("GET", "/proxy-stats")]
    answers |= {each: (await rest.call(*each))[0] for each in others}
    open_to_all = {route for route, status in answers.items() if status != 401}
    assert open_to_all == {
        ("GET", "/metrics"),
        ("GET", "/status.html"),
        ("GET", "/admin/v2/brokers/ready"),
    }


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


def test_cve_2023_51437_secrets_are_compared_in_constant_time() -> None:
    """No `==` on anything with the name of a secret; the comparisons are those of libraries."""
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        # To parse all files would take seconds.
        if COMPARISON.search(text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        and any(isinstance(each, ast.Eq | ast.NotEq) for each in node.ops)
        and any(SECRET_NAME.search(_name(each)) for each in (node.left, *node.comparators))
    }
    assert found == NO_SECRETS


def _name(node: ast.expr) -> str:
    """The last name in an expression such as `self.password`, `digest(x)` or `tokens[0]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("method", ["token", "basic"])
def test_cve_2023_51437_a_signature_and_a_hash_are_compared_by_hmac(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    compared: list[object] = []
    compare = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    if method == "token":
        checker = TokenChecker(TokenKeys([secret_key(SECRET, "the tests")]), TokenRules())
        checker.check(token_of("alice").encode(), now_s=time.time())
    else:
        line = b"alice:$apr1$12345678$" + hash_apr1(b"secret", b"12345678")
        with pytest.raises(CredentialsRefused):
            parse_password_file(line, "the tests").check("alice", b"wrong")
    assert compared


async def test_cve_2024_27135_27317_27894_nothing_is_fetched_at_a_requests_word(
    broker: Broker, rest: Rest
) -> None:
    """There is no function worker: no route takes code, an archive or the URL of one."""
    served = {path for _, path in rules()} - {path for _, path in not_served.paths()}
    for path in served:
        assert not re.search("function|sink|source|package|worker|upload", path, re.IGNORECASE)
    connected = asyncio.Event()
    server = await asyncio.start_server(lambda *_: connected.set(), "127.0.0.1", 0)
    url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    for kind in ("http", "https", "s3", "file"):
        for method, path in (
            ("PUT", f"{TOPIC}/offload"),
            ("GET", "/admin/v2/offload/orphans"),
            ("DELETE", "/admin/v2/offload/orphans"),
        ):
            await rest.refused(412, method, f"{path}?url={kind}://{url}")
    assert not connected.is_set()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("role", ["reader", "writer"])
async def test_cve_2024_28098_and_29834_grants_change_no_policies_and_unload_nothing(
    rest: Rest, role: str
) -> None:
    """Each route for admins, on a topic, a partitioned one and a partition of it."""
    rest.role = role
    parts = {"tenant": "public", "namespace": "default", "role": role}
    for (method, path), need in rules().items():
        if need not in (Need.TENANT_ADMIN, Need.SUPERUSER) or "{namespace}" not in path:
            continue
        for topic in ("t", "tp", "tp-partition-0") if "{topic}" in path else ("",):
            places = dict.fromkeys(re.findall(r"\{(\w+)\}", path), "1")
            asked = path.format(**{**places, **parts, "topic": topic})
            await rest.refused(403, method, asked)


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


async def test_cve_2026_105927_105935_nothing_is_written_as_the_broker_at_a_clients_word(
    broker: Broker, rest: Rest
) -> None:
    """Dead letters are the client's to send; and no route sends a message or triggers anything."""
    assert not any(re.search("trigger|produce|dlq|retry", path) for _, path in rules())
    root = await RawClient.open("127.0.0.1", broker.port, connect_as("root"))
    producer = await root.create_producer("persistent://public/default/t")
    before = sorted(broker.topics.loaded())
    reader = await RawClient.open("127.0.0.1", broker.port, connect_as("reader"))
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    for key in ("deadLetterTopic", "DEAD_LETTER_TOPIC", "retryLetterTopic"):
        for texts in (options.metadata, options.subscription_properties):
            texts.add(key=key, value="persistent://public/default/written")
    consumer = await reader.subscribe("persistent://public/default/t", "s", options, permits=100)
    await producer.send(b"x")
    for _ in range(20):
        delivery = await consumer.receive()
        reader.send(
            Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES,
            pb.CommandRedeliverUnacknowledgedMessages(
                consumer_id=consumer.consumer_id, message_ids=[delivery.message_id]
            ),
        )
    assert sorted(broker.topics.loaded()) == before
    await rest.refused(404, "GET", TOPIC.removesuffix("/t") + "/written/stats")
    for client in (root, reader):
        await client.close()


@pytest.mark.parametrize(
    "path",
    [
        "coordinators",
        "coordinatorStats",
        "headers/open",
        "records/persistent/public/default/t",
    ],
)
async def test_cve_2026_105931_transactions_are_shown_to_superusers(rest: Rest, path: str) -> None:
    """Those of its own are shown to each role: see `test_own_transactions`."""
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
    # The forms for many subscriptions or topics at once were unchecked there: here they are for
    # admins.
    paths = (
        f"{TOPIC}/all_subscription/expireMessages/1",
        f"{NAMESPACE}/clearBacklog",
        f"{NAMESPACE}/clearBacklog/other",
        f"{NAMESPACE}/unsubscribe/other",
    )
    for path in paths:
        await rest.refused(403, "POST", path)
    rest.role = "root"
    for path in paths:
        await rest.done("POST", path)
