"""A cluster that demands TLS and credentials: right ones replicate, wrong ones say what is wrong.

East replicates to west, which has no plain port.  Nothing goes back.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.support.authority import HOST, Authority
from tests.support.oauth2_issuer import Issuer, issuing, key_file
from tests.support.raw_client import RawClient
from tests.support.roles import token_of
from tests.support.secured_broker import Served, serving
from tests.support.security import BROKER_ROLE, PASSWORD, ROOT_ROLE, Security
from tests.support.waiting import until, until_awaited
from tests.unit.broker.replication.conftest import (
    FROM_THE_BEGINNING,
    NAMESPACE,
    TOPIC,
    Cluster,
)

PLUGIN = "org.apache.pulsar.client.impl.auth.Authentication"
OAUTH2 = "org.apache.pulsar.client.impl.auth.oauth2.AuthenticationOAuth2"
PARTS = "persistent://public/default/parts"
BOTH = ["east", "west"]
FILES = ("brokerClientCertificateFilePath", "brokerClientKeyFilePath")


class Secured:
    """East, and west with everything on."""

    def __init__(
        self, directory: Path, east: Cluster, west: Served, security: Security, issuer: Issuer
    ) -> None:
        self.directory = directory
        self.east = east
        self.west = west
        self.security = security
        self.issuer = issuer
        """Gives tokens of a superuser."""

    @property
    def record(self) -> dict[str, object]:
        """The record of west without credentials."""
        return {
            "brokerClientTlsEnabled": True,
            "brokerServiceUrlTls": f"pulsar+ssl://{HOST}:{self.west.broker.port_tls}",
            "serviceUrlTls": f"https://{HOST}:{self.west.admin.port_tls}",
            "brokerClientTrustCertsFilePath": str(self.security.authority.chain),
        }

    async def register(self, **more: object) -> None:
        """Register west, and replicate the namespace to it."""
        await self.east.ask("PUT", "/admin/v2/clusters/west", self.record | more)
        await self.east.ask("POST", "/admin/v2/tenants/public", {"allowedClusters": BOTH})
        await self.east.replicate(*BOTH)

    async def mend(self, **more: object) -> None:
        """Write the record of west anew."""
        await self.east.ask("POST", "/admin/v2/clusters/west", self.record | more)

    async def failure(self) -> str:
        """Why nothing is sent, in the statistics; empty while nothing is known."""
        shown = (await self.east.stats())["replication"].get("west", {})
        assert not shown.get("connected")
        return str(shown.get("lastFailure", ""))

    async def stands(self, *words: str) -> None:
        """Wait until the statistics have all these words, and say what to do."""

        async def said() -> bool:
            failure = await self.failure()
            return all(word in failure for word in words)

        await until_awaited(said)

    async def received(self, count: int, topic: str = TOPIC) -> list[bytes]:
        """The first messages of a topic of west."""
        await until(lambda: self.east.is_done(topic))
        ledger = self.west.broker.topics.loaded()[topic].ledger
        assert ledger.entry_count == count
        port, tls = self.west.broker.port_tls, self.security.context
        assert port is not None
        client = await RawClient.open(HOST, port, self.security.connect(), tls=tls)
        consumer = await client.subscribe(topic, "reader", FROM_THE_BEGINNING, permits=1000)
        found = [(await consumer.receive()).payload for _ in range(count)]
        await client.close()
        return found


def token(role: str = ROOT_ROLE, **options: object) -> dict[str, object]:
    """Credentials by a token."""
    return {
        "authenticationPlugin": f"{PLUGIN}Token",
        "authenticationParameters": f"token:{token_of(role, **options)}",  # type: ignore[arg-type]
    }


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    security = Security(tmp_path / "security", (ROOT_ROLE,), hash_cost=4)
    async with AsyncExitStack() as stack:
        west = await stack.enter_async_context(
            serving(tmp_path / "west", security.authority, cluster_name="west", **security.settings)
        )
        east = Cluster(tmp_path, "east")
        await east.start()
        stack.push_async_callback(east.stop)
        issuer = stack.enter_context(issuing(security.authority.issue("issuer")))
        issuer.make_token = lambda: token_of(ROOT_ROLE)
        yield Secured(tmp_path, east, west, security, issuer)


def credentials_of(kind: str, secured: Secured) -> Mapping[str, object]:
    """Those of a superuser, of one kind."""
    certificate = secured.security.authority.issue(ROOT_ROLE)
    files = str(certificate.chain), str(certificate.key)
    match kind:
        case "token":
            return token()
        case "token file":
            file = secured.directory / "east.token"
            file.write_text(token_of(ROOT_ROLE))
            return token() | {"authenticationParameters": f"file://{file}"}
        case "basic":
            text = json.dumps({"userId": ROOT_ROLE, "password": PASSWORD})
            name, parameters = "Basic", text
        case "oauth2":
            parameters = json.dumps(
                {
                    "issuerUrl": secured.issuer.url,
                    "privateKey": key_file(secured.directory).as_uri(),
                    "audience": "west",
                    "scope": "replicate",
                }
            )
            return {"authenticationPlugin": OAUTH2, "authenticationParameters": parameters}
        case "tls":
            name, parameters = "Tls", f"tlsCertFile:{files[0]},tlsKeyFile:{files[1]}"
        case _:
            return dict(zip(FILES, files, strict=True))
    return {"authenticationPlugin": PLUGIN + name, "authenticationParameters": parameters}


@pytest.mark.parametrize("kind", ["token", "token file", "basic", "oauth2", "tls", "certificate"])
async def test_the_credentials_of_the_record_are_used_for_messages_and_rest(
    secured: Secured, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    east = secured.east
    if kind == "oauth2":
        # The certificates of issuers are checked by the authorities of the system.
        monkeypatch.setenv("SSL_CERT_FILE", str(secured.security.authority.chain))
    await secured.register(**credentials_of(kind, secured))
    await east.publish(b"1", b"2")
    assert await secured.received(2) == [b"1", b"2"]
    await east.ask("PUT", "/admin/v2/persistent/public/default/parts/partitions", 2)
    await east.publish(b"3", topic=f"{PARTS}-partition-1")
    assert await secured.received(1, f"{PARTS}-partition-1") == [b"3"]
    # One token for each, and no other credentials ask for any.
    forms = secured.issuer.forms
    assert {form["audience"] for form in forms} == ({"west"} if kind == "oauth2" else set())
    assert {form["scope"] for form in forms} == ({"replicate"} if kind == "oauth2" else set())


@pytest.mark.parametrize("kind", ["token", "certificate"])
async def test_the_credentials_of_the_settings_are_used_where_the_record_has_none(
    secured: Secured, kind: str
) -> None:
    east, security = secured.east, secured.security
    await east.stop()
    east.settings["broker_client_trust_certs_file"] = security.authority.chain
    if kind == "token":
        east.settings["broker_client_token_file"] = security.settings["broker_client_token_file"]
    else:
        certificate = security.authority.issue(BROKER_ROLE)
        east.settings["broker_client_certificate_file"] = certificate.chain
        east.settings["broker_client_key_file"] = certificate.key
    await east.start()
    await secured.register(brokerClientTrustCertsFilePath=None)
    await east.publish(b"1")
    assert await secured.received(1) == [b"1"]


WRONG: Mapping[str, tuple[dict[str, object], Sequence[str]]] = {
    "no credentials": ({}, ("west", "authenticationPlugin")),
    "expired token": (token(life_s=-60), ("west", "authenticationParameters")),
    "token of nobody": (token(secret=bytes(32)), ("west", "authenticationParameters")),
    "missing file": (
        token() | {"authenticationParameters": "file:///missing/token"},
        ("/missing/token",),
    ),
    "role without grants": (token("stranger"), ("west", "grant")),
    "missing authorities": (
        token() | {"brokerClientTrustCertsFilePath": "/missing/ca.pem"},
        ("west", "/missing/ca.pem"),
    ),
    "authorities of the system": (
        token() | {"brokerClientTrustCertsFilePath": None},
        ("west", "brokerClientTrustCertsFilePath"),
    ),
    "missing certificate": (
        token() | dict.fromkeys(FILES, "/missing/certificate.pem"),
        ("west", "/missing/certificate.pem"),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_statistics_say_what_is_wrong_with_a_record_and_sending_begins_once_it_is_mended(
    secured: Secured, wrong: str
) -> None:
    members, words = WRONG[wrong]
    await secured.register(**members)
    await secured.east.publish(b"1")
    await secured.stands(*words)
    await secured.mend(**token())
    assert await secured.received(1) == [b"1"]


async def test_sending_begins_once_the_other_cluster_grants_it(secured: Secured) -> None:
    await secured.register(**token("stranger"))
    await secured.east.publish(b"1")
    await secured.stands("grant")
    path = f"{NAMESPACE}/permissions/stranger"
    west = secured.west.admin.port_tls
    async with (
        aiohttp.ClientSession(headers=secured.security.headers()) as session,
        session.post(
            f"https://{HOST}:{west}{path}", json=["produce"], ssl=secured.security.context
        ) as answer,
    ):
        assert answer.status == 204
    assert await secured.received(1) == [b"1"]


async def test_a_token_in_a_file_is_read_anew(secured: Secured) -> None:
    file = secured.directory / "east.token"
    file.write_text(token_of(ROOT_ROLE, life_s=-60))
    await secured.register(**token() | {"authenticationParameters": f"file://{file}"})
    await secured.east.publish(b"1")
    await secured.stands("authenticationParameters")
    file.write_text(token_of(ROOT_ROLE))
    assert await secured.received(1) == [b"1"]


async def test_authorities_that_are_replaced_are_read_anew(secured: Secured) -> None:
    trusted = secured.directory / "trusted.pem"
    trusted.write_bytes(Authority(secured.directory / "other").chain.read_bytes())
    await secured.register(**token() | {"brokerClientTrustCertsFilePath": str(trusted)})
    await secured.east.publish(b"1")
    await secured.stands("brokerClientTrustCertsFilePath")
    trusted.write_bytes(secured.security.authority.chain.read_bytes())
    assert await secured.received(1) == [b"1"]


async def test_a_cluster_that_cannot_be_reached_holds_up_no_other(
    secured: Secured, tmp_path: Path
) -> None:
    east, south = secured.east, Cluster(tmp_path, "south")
    await south.start()
    names = ["east", "south", "west"]
    await secured.register(brokerClientTrustCertsFilePath="/missing/ca.pem")
    await east.ask("PUT", "/admin/v2/clusters/south", south.record)
    # Tried before south.
    await east.ask("PUT", "/admin/v2/clusters/a", secured.record | WRONG["missing authorities"][0])
    await east.ask("POST", "/admin/v2/tenants/public", {"allowedClusters": ["a", *names]})
    await east.replicate("a", *names)
    await east.publish(b"1")
    await until(lambda: "south" in east.replicators())
    await until(lambda: east.replicators()["south"].subscription.backlog == 0)
    assert await south.payloads(1) == [b"1"]
    await south.stop()


async def test_no_secret_is_in_a_log(secured: Secured, capfd: pytest.CaptureFixture[str]) -> None:
    secret = token_of(ROOT_ROLE, secret=bytes(32))
    await secured.register(**token() | {"authenticationParameters": f"token:{secret}"})
    await secured.east.publish(b"1")
    await secured.stands("west")
    assert secret not in await secured.failure()
    written = capfd.readouterr()
    assert "replicator" in written.out + written.err
    assert secret not in written.out + written.err
